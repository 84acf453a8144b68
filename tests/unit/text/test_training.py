"""Learning vocabularies: sizes that do not fit, samples, long lines, determinism, silence."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from transduce.config.settings import TokenizerSettings
from transduce.errors import DataError, SettingsError
from transduce.text.tokenizer import UNK
from transduce.text.training import Reservoir, parts_of, sample_of, train_tokenizer

LINES = [
    f"der {a} Hund sieht die {b} Katze {n}" for n in range(40) for a in ("alte", "junge") for b in ("graue", "rote")
]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_too_large_a_vocabulary_is_reduced(kind: str) -> None:
    tokenizer = train_tokenizer(LINES, TokenizerSettings(kind=kind), vocab_size=5000)
    assert 20 < tokenizer.vocab_size < 1000
    assert UNK not in tokenizer.encode(LINES[0])
    fits = train_tokenizer(LINES, TokenizerSettings(kind=kind), vocab_size=tokenizer.vocab_size)
    assert fits.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_vocabulary_smaller_than_the_characters_is_a_one_line_error(kind: str) -> None:
    with pytest.raises(SettingsError) as caught:
        train_tokenizer(LINES, TokenizerSettings(kind=kind), vocab_size=10)
    n = len(set("".join(LINES)) - {" "}) + len("▁") + 4
    assert str(caught.value) == (
        f"tokenizer.vocab_size = 10: the characters of the text alone need {n}; "
        "raise it, or lower tokenizer.character_coverage (1)"
    )
    assert train_tokenizer(LINES, TokenizerSettings(kind=kind), vocab_size=n).vocab_size == n


@pytest.mark.parametrize("lines", [[], [""], ["  ", "\t", "\u200b"]])
def test_empty_text_is_a_one_line_error(lines: list[str]) -> None:
    with pytest.raises(DataError, match="there is no text to learn a vocabulary from"):
        train_tokenizer(lines, TokenizerSettings(), vocab_size=50)


def test_case_folding_normalizations_are_supported() -> None:
    tokenizer = train_tokenizer(LINES, TokenizerSettings(normalization="nmt_nfkc_cf"), vocab_size=60)
    assert tokenizer.decode(tokenizer.encode("Der HUND")) == "der hund"


def test_a_long_line_is_not_skipped() -> None:
    """SentencePiece's own limit is 4192 bytes; here the only Q comes after it."""
    line = "der Hund " * 3000 + "Querflöte"
    tokenizer = train_tokenizer([*LINES, line], TokenizerSettings(kind="bpe"), vocab_size=80)
    assert tokenizer.decode(tokenizer.encode("Querflöte")) == "Querflöte"


def test_long_lines_are_split_at_spaces_without_loss() -> None:
    lines = ["short", "word " * 400, "x" * 1201, "", "a" * 300 + " " + "b" * 600]
    parts = list(parts_of(lines))
    assert "".join(parts) == "".join(lines)
    assert max(map(len, parts)) <= 500
    assert all(part.endswith(" ") for part in parts[1:4])


class CountedText(str):
    """Counts the characters that slices copy."""

    n_copied = 0

    def __getitem__(self, key: Any) -> CountedText:
        part = CountedText(super().__getitem__(key))
        CountedText.n_copied += len(part)
        return part


def test_a_long_line_is_copied_once() -> None:
    line = CountedText("word " * 50_000)
    assert "".join(parts_of([line])) == line and CountedText.n_copied == len(line)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_another_process_learns_the_same_vocabulary_without_output(kind: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n".join(LINES), encoding="utf-8")
    code = (
        "import sys, hashlib; from transduce.config.settings import TokenizerSettings\n"
        "from transduce.text.training import train_tokenizer\n"
        "lines = open(sys.argv[2], encoding='utf-8').read().split('\\n')\n"
        "t = train_tokenizer(lines, TokenizerSettings(kind=sys.argv[1]), vocab_size=60)\n"
        "print(hashlib.sha256(t.model).hexdigest())\n"
    )
    command = [sys.executable, "-c", code, kind, str(tmp_path / "text")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = train_tokenizer(LINES, TokenizerSettings(kind=kind), vocab_size=60)
    assert (done.stdout, done.stderr) == (f"{hashlib.sha256(ours.model).hexdigest()}\n", "")


def test_a_sample_is_uniform_and_determined_by_the_seed() -> None:
    lines = [str(i) for i in range(50)]
    assert sample_of(lines, 60, seed=1) == lines
    assert sample_of(iter(lines), 20, seed=1) == sample_of(lines, 20, seed=1) != sample_of(lines, 20, seed=2)
    counts = Counter(line for seed in range(2000) for line in sample_of(lines, 10, seed=seed))
    assert set(counts) == set(lines)
    assert all(abs(count - 400) < 5 * 18 for count in counts.values())  # binomial, standard deviation 17.9
    one_by_one = Reservoir[str](20, seed=1)
    for line in lines:
        one_by_one.add(line)
    assert one_by_one.items == sample_of(lines, 20, seed=1)
