"""Learning vocabularies (sizes, samples, long lines, determinism) and extending them: old ids stay."""

import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from transduce.config.settings import TokenizerSettings
from transduce.demo.corpus import demo_pairs
from transduce.errors import DataError, SettingsError
from transduce.text.extension import Extended, add_language, extend, new_pieces
from transduce.text.hub import HubTokenizer
from transduce.text.special import SPECIAL_PIECES, UNK
from transduce.text.tokenizer import PieceTokenizer, Tokenizer, Tokenizers, with_pieces
from transduce.text.training import (
    Reservoir,
    parts_of,
    sample_of,
    train_tokenizer,
    train_tokenizers,
    with_language_tokens,
)

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

    def __getitem__(self, key: Any) -> "CountedText":
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


OLD = [pair.src for pair in demo_pairs("train", 300, seed=1)]
NEW = [
    f"{who} {does} {what}"
    for who in ("кошка", "большая собака", "猫", "Quokkas")
    for does in ("спит", "видит", "zwitschern")
    for what in ("в саду", "Eukalyptus", "在家")
]


def vocabulary(kind: str = "unigram", *, exact: bool = False, size: int = 200, lines: list[str] = OLD) -> Tokenizer:
    own = {"exact": True, "normalization": "identity"} if exact else {}
    return train_tokenizer(lines, TokenizerSettings(kind=kind, **own), vocab_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["unigram", "bpe", "char"])
def test_old_pieces_keep_their_ids_and_new_pieces_are_used(kind: str, exact: bool) -> None:
    old = vocabulary(kind, exact=exact, size=400 if exact else 200)
    found = extend(Tokenizers(old, old), NEW, (), n=80)
    new, n = found.tokenizers.tgt, old.vocab_size
    assert found.tokenizers.joint and found.src == found.tgt
    assert new.pieces(range(n)) == old.pieces(range(n))
    pieces = new_pieces(old, new)
    assert 0 < len(pieces) == len(found.tgt) <= 80 and len(set(pieces)) == len(pieces)
    cut = new.encode_batch(NEW)
    assert all(new.decode(ids) == line for ids, line in zip(cut, NEW, strict=True))
    assert not any(UNK in ids for ids in cut) and any(i >= n for ids in cut for i in ids)
    if kind != "char":
        assert {"猫", "к"} <= set(pieces) and any(piece.endswith("собака") for piece in pieces), pieces
    # old text without new pieces is split exactly as before
    same = [(a, b) for a, b in zip(old.encode_batch(OLD), new.encode_batch(OLD), strict=True) if max(b) < n]
    assert len(same) > 200 and all(a == b for a, b in same)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_new_pieces_list_the_old_pieces_that_they_replace(kind: str) -> None:
    old = vocabulary(kind)
    text = [f"{line} whistledown" for line in OLD]
    found = extend(Tokenizers(old, old), text, (), n=40)
    pieces = new_pieces(old, found.tokenizers.tgt)
    for piece, parts in zip(pieces, found.tgt, strict=True):
        assert "".join(old.pieces(parts)) == piece
    assert any("whistledown"[:6] in piece for piece in pieces)
    exact = vocabulary("char", exact=True, size=400)
    grown = extend(Tokenizers(exact, exact), ["ŝ" * 9], (), n=5)
    assert [exact.pieces(parts) for parts in grown.tgt] == [["<0xC5>", "<0x9D>"]]


def test_no_piece_crosses_words_scripts_or_signs() -> None:
    old = vocabulary()
    text = ["dog,dog,dog iPhone猫 iPhone猫 it's 2024"] * 30
    grown = extend(Tokenizers(old, old), text, (), n=200)
    for piece in new_pieces(old, grown.tokenizers.tgt):
        body = piece.removeprefix("\u2581")
        assert len(body) == 1 or (body.isalpha() and not {"猫", "e"} <= set(body)), piece


def test_a_limit_keeps_the_most_frequent_characters() -> None:
    old = vocabulary()
    grown = extend(Tokenizers(old, old), ["жжжж щщщ ф"], (), n=2).tokenizers.tgt
    assert new_pieces(old, grown) == ["ж", "щ"] and grown.unknown("жщф") == ["ф"]


def marian(tokenizer: Tokenizer, pieces: list[str]) -> PieceTokenizer:
    return PieceTokenizer(tokenizer.model, pieces)


def test_both_sides_of_marian_share_the_new_pieces() -> None:
    src, tgt = vocabulary(), vocabulary(lines=[pair.tgt for pair in demo_pairs("train", 300, seed=1)])
    ordinary = dict.fromkeys([*src.pieces(range(4, src.vocab_size)), *tgt.pieces(range(4, tgt.vocab_size))])
    listed = [*SPECIAL_PIECES, *ordinary]
    old = Tokenizers(marian(src, listed), marian(tgt, listed))
    found = extend(old, NEW, [f"{line} überall" for line in NEW], n=60)
    new = found.tokenizers
    assert not new.joint and new.n_src == new.n_tgt == len(listed) + len(found.src) and found.src == found.tgt
    assert new.src.pieces(range(new.n_src)) == new.tgt.pieces(range(new.n_tgt))
    assert 0 < len(found.src) <= 60
    assert not any(UNK in ids for ids in [*new.src.encode_batch(NEW), *new.tgt.encode_batch(NEW)])
    assert all(
        a == b
        for a, b in zip(old.src.encode_batch(OLD), new.src.encode_batch(OLD), strict=True)
        if max(b) < len(listed)
    )
    # pieces of the model that are missing from the list get rows
    short = Tokenizers(*[marian(src, [*SPECIAL_PIECES, *list(ordinary)[:-30]])] * 2)
    separate = Tokenizers(short.src, marian(tgt, listed))
    grown = extend(separate, OLD, (), n=1000).tokenizers
    lost = {p for line in OLD for p in short.src.unknown(line)}
    assert not any(grown.src.unknown(line) for line in OLD) and (not lost or grown.n_src > short.n_src)


def test_appended_pieces_are_valid_protobuf() -> None:
    old = vocabulary()
    long = "a" * 200
    sp = sentencepiece.SentencePieceProcessor(model_proto=with_pieces(old.model, [("ёж", -3.5), (long, -7.25)]))
    n = old.vocab_size
    assert sp.vocab_size() == n + 2
    assert [(sp.id_to_piece(i), sp.get_score(i)) for i in (n, n + 1)] == [("ёж", -3.5), (long, -7.25)]


def test_extending_a_vocabulary_of_another_library_is_refused() -> None:
    tokenizers: Any = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    hub = HubTokenizer(model.to_str().encode(), [-1, 0, -1, -1, 1])
    with pytest.raises(SettingsError, match="stays as it came"):
        extend(Tokenizers(hub, hub), NEW, (), n=5)


@pytest.mark.parametrize("joint", [True, False])
def test_language_tokens_survive_an_extension_and_get_another_language(joint: bool, tmp_path: Path) -> None:
    settings = TokenizerSettings(joint=joint, placeholders=0)
    plain = train_tokenizers(iter(OLD), iter(OLD), settings, vocab_size=200)
    old = with_language_tokens(plain, [("en", "de"), ("en", "fr")], src=("tgt",))
    extended = extend(old.unframed(), NEW, NEW, n=10)
    known = extended.tokenizers.src.framing
    assert known == old.src.framing and extended.tokenizers.tgt.framing == old.tgt.framing
    grown = add_language(extended, "nl", like="de")
    grown.tokenizers.save(tmp_path)
    tokenizers = Tokenizers.load(tmp_path)
    (token, *pieces), n = tokenizers.between("en", "nl").src.encode(OLD[0]), tokenizers.n_src
    assert tokenizers.src.pieces([token]) == ["<2nl>"] and token == n - 1
    assert pieces == extended.tokenizers.between("en", "de").src.encode(OLD[0])[1:]
    assert token not in tokenizers.unframed().src.encode("<2nl> a dog")
    assert grown.src[-1] == (known.languages["de"],) and len(grown.src) == n - old.n_src
    assert len(grown.tgt) == tokenizers.n_tgt - old.n_tgt


def test_a_language_needs_a_vocabulary_with_languages() -> None:
    old = vocabulary()
    with pytest.raises(SettingsError, match="has no tokens for languages"):
        add_language(Extended(Tokenizers(old, old), (), ()), "nl", like="de")
