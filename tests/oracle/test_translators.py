"""Translators of every kind that can be imported: translated, served, fine-tuned and exported back.

They are small random models, written by the libraries that they belong to; other tests compare their outputs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import marian_models
import marians
import seq2seqs
from marians import LINES
from oracle import test_ctranslate2, test_t5
from oracle.quiet_transformers import transformers
from oracle.twins import randomized
from servers import Server
from system.commands import assert_refused, sets, succeed, transduce
from transduce.runs.folder import RunFolder

engine = pytest.importorskip("ctranslate2")
pytestmark = [pytest.mark.usefixtures("few_pieces"), pytest.mark.loopback]
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
TEXTS = [*LINES[::16], "two women reads the ball ."]


def write_marian(path: Path) -> Path:
    """Write a random MarianMTModel, with a vocabulary that splits LINES."""
    marians.make_folder(path, marians.make_run(path.with_name("vocabulary")))
    transformers.set_seed(1)
    config = transformers.MarianConfig.from_pretrained(path)
    randomized(transformers.MarianMTModel(config), 1).save_pretrained(path)
    return path


def write_npz(path: Path) -> Path:
    path.mkdir()
    config = marian_models.config(tied_embeddings_all=True)
    marian_models.write_npz(path / "model.npz", config, marian_models.weights(config))
    (path / "vocab.spm").write_bytes(marian_models.pieces())
    return path / "model.npz"


def convert(folder: Path, out: Path, *vocabularies: str) -> Path:
    engine.converters.TransformersConverter(str(folder), copy_files=[*vocabularies]).convert(str(out))
    return out


def write_converted(path: Path) -> Path:
    return convert(write_marian(path.with_name("marian")), path, "source.spm", "target.spm")


def write_seq2seq(kind: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        seq2seqs.write_model(path, kind, 3)
        return path

    return write


def write_t5(kind: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        test_t5.write_model(path, kind, 3)
        return path

    return write


class Kind(NamedTuple):
    """A kind of translators: a function that writes one, the format to export to, and the languages to choose."""

    write: Callable[[Path], Path]
    to: str | None = "huggingface"
    languages: Sequence[str] = ()


KINDS = {
    "Marian": Kind(write_marian),
    "Marian's .npz": Kind(write_npz, "ctranslate2"),
    "Marian's .bin": Kind(lambda path: marian_models.make_folder(path, kind=marian_models.INT8), None),
    **{kind: Kind(write_seq2seq(kind), languages=("en", "de")) for kind in ("m2m", "nllb", "mbart", "mbart25")},
    "bart": Kind(write_seq2seq("bart")),
    **{kind: Kind(write_t5(kind)) for kind in ("t5", "t5 1.1", "mt5")},
    "madlad": Kind(write_t5("madlad"), languages=("fr", "de")),
    "CTranslate2": Kind(write_converted, "ctranslate2"),
    "Argos": Kind(test_ctranslate2.write_package, "argos"),
}


def translated(run: Path, languages: Sequence[str], *options: str) -> list[str]:
    given = [part for option in zip(("--src-lang", "--tgt-lang"), languages, strict=False) for part in option]
    done = succeed("translate", run, *given, *options, stdin="\n".join(TEXTS))
    return done.out.removesuffix("\n").split("\n")


def words(texts: Sequence[str]) -> list[list[str]]:
    """The words of texts, in which a command replaces control characters, which a random model writes."""
    return [text.split() for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_translated_served_fine_tuned_and_exported(tmp_path: Path, kind: str) -> None:
    made = KINDS[kind]
    run = tmp_path / "run"
    done = succeed("import", made.write(tmp_path / "theirs"), run)
    assert "checked: " in done.out or kind.startswith("Marian's"), done.out
    expected = translated(run, made.languages)
    assert len(expected) == len(TEXTS) and any(expected)
    data = RunFolder.open(run).settings.data
    pair = made.languages or (data.src_lang, data.tgt_lang)
    server = Server(f"{pair[0]}-{pair[1]}={run}" if made.languages else run)
    form = "&".join(f"q={text}" for text in TEXTS) + f"&source={pair[0]}&target={pair[1]}"
    try:
        status, answer = server.request(
            "/translate", form.encode(), **{"Content-Type": "application/x-www-form-urlencoded"}
        )
    finally:
        server.stop()
    assert status == 200, answer
    assert words(answer["translatedText"]) == words(expected)

    for name, lines in (("src", LINES), ("tgt", LINES[9:] + LINES[:9])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    tuned = tmp_path / "tuned"
    options = [part for option in zip(("--src-lang", "--tgt-lang"), made.languages, strict=False) for part in option]
    succeed(
        *("train", "--from", run, "--src", tmp_path / "src", "--tgt", tmp_path / "tgt", *options, "--run", tuned),
        *sets("training.max_updates=20", "training.valid_updates=20", "training.lr=0.01", "training.batch_tokens=200"),
        *sets("training.warmup_updates=1", "training.valid_bleu_sentences=0", "data.max_length=30"),
    )
    before, after = (RunFolder.open(path).load_model()["tgt_embedding.table.weight"] for path in (run, tuned))
    assert not torch.equal(before, after)
    out = tmp_path / ("out.argosmodel" if made.to == "argos" else "out")
    if made.to is None:
        assert_refused(transduce("export", tuned, out, "--to", "ctranslate2"), "model.decoder_self = 'ssru'")
        return
    done = succeed("export", tuned, out, "--to", made.to)
    assert "checked: " in done.out, done.out
    succeed("import", out, tmp_path / "again")
    # An export rules out padding and the beginning, which have a probability in a run: the best token stays.
    again, before = (translated(path, made.languages, "--beam", "1") for path in (tmp_path / "again", tuned))
    assert again == before
