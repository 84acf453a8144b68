"""`transduce shortlist` and `translate --shortlist`."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from system.commands import assert_refused, small, transduce, write_corpus
from transduce import DecodingOptions, Translator
from transduce.decoding.shortlist import FILE, load_shortlist
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import load_tokenizers

N_BEST, N_FREQUENT = 4, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a shortlist."""
    path = tmp_path_factory.mktemp("shortlist")
    src, tgt = write_corpus(path, "train", 300)
    done = transduce(
        *("train", "--src", src, "--tgt", tgt, "--run", path / "run"), *small("training.valid_bleu_sentences=0")
    )
    assert done.code == 0, done.err
    done = transduce("shortlist", path / "run", "--n-best", N_BEST, "--n-frequent", N_FREQUENT, "--max-loss", 9)
    assert done.code == 0, done.err
    assert done.out == f"written: {path / 'run' / FILE}\n"
    assert "validation sentences" in done.err and "from 2" in done.err and "sentence pairs" in done.err
    return path


def test_translations_consist_of_tokens_of_the_list(folder: Path) -> None:
    texts = (folder / "train.en").read_text(encoding="utf-8").splitlines()[:40]
    src = folder / "some.en"
    src.write_text("\n".join(texts) + "\n", encoding="utf-8")
    run = RunFolder.open(folder / "run")
    tokenizers = load_tokenizers(run)
    shortlist = load_shortlist(run, tokenizers)
    assert shortlist.candidates.shape == (tokenizers.n_src, N_BEST + tokenizers.joint)
    assert len(shortlist.frequent) == N_FREQUENT
    done = transduce("translate", folder / "run", src, "--shortlist", "--device", "cpu")
    assert done.code == 0, done.err
    found = done.out.splitlines()
    translator = Translator.load(folder / "run", device="cpu")
    translations = translator.translate(texts, DecodingOptions(shortlist=True, scores=False))
    assert found == [translation.text for translation in translations]
    for text, translation in zip(texts, translations, strict=True):
        allowed = shortlist.tokens(tokenizers.src.encode(text))
        assert allowed is not None and {*translation.candidates[0].ids} <= {*allowed.tolist()}
    out = folder / "out"
    done = transduce("translate", folder / "run", src, "--shortlist", "--device", "cpu", "--output-dir", out)
    assert done.code == 0, done.err
    assert (out / "some.en").read_text(encoding="utf-8").splitlines() == found
    done = transduce("translate", folder / "run", src, "--device", "cpu", "--output-dir", out)
    assert done.code == 2 and "shortlist" in done.err


def test_the_same_text_gives_the_same_file(folder: Path) -> None:
    before = (folder / "run" / FILE).read_bytes()
    args = "shortlist", folder / "run", "--n-best", N_BEST, "--n-frequent", N_FREQUENT, "-q", "--max-loss", 9
    assert transduce(*args).code == 0
    assert (folder / "run" / FILE).read_bytes() == before


def test_a_shortlist_that_loses_too_much_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([SimpleNamespace(bleu=SimpleNamespace(value=value)) for value in (30.0, 29.5, 30.0, 29.5)])
    monkeypatch.setattr("transduce.distillation.shortlist.score_translator", lambda *_: (next(scores), []))
    before = (folder / "run" / FILE).read_bytes()
    done = transduce("shortlist", folder / "run", "-q")
    assert done.code == 2 and "30.00 without the shortlist, 29.50 with it" in done.err and "max_loss" in done.err
    assert (folder / "run" / FILE).read_bytes() == before
    args = "shortlist", folder / "run", "--n-best", N_BEST, "--n-frequent", N_FREQUENT, "-q", "--max-loss", 0.6
    assert transduce(*args).code == 0


def test_what_is_missing_is_an_error(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns(FILE))
    done = transduce("translate", tmp_path / "run", folder / "train.en", "--shortlist")
    assert done.code == 2 and "transduce shortlist" in done.err
    done = transduce("shortlist", tmp_path / "run", "--data", tmp_path)
    assert done.code == 2 and "there is no file" in done.err and "name its folder (data)" in done.err
    done = transduce("shortlist", tmp_path / "none")
    assert done.code == 2 and "no run folder" in done.err
    for options, parts in (
        (["--n-best", 1 << 20], ["n_best"]),
        (["--set", "data=texts"], ["data = 'texts'", "a section"]),
        (["--set", "decoding.beam=1"], ["decoding", "settings of data"]),
    ):
        assert_refused(transduce("shortlist", folder / "run", *options), *parts)
