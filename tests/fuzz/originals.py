"""The originals: small run folders of every task, finished and interrupted, imported folders, recipes and texts."""

# ruff: noqa: E501  (long tables of strange values)
import contextlib
import gzip
import json
import lzma
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import berts
import marian_models
import marians
from system.commands import sets, succeed, transduce, write_corpus
from transduce.data.lines import zstd

SETTINGS = (
    *("model.d_model=16", "model.d_ff=16", "model.n_heads=2"),
    *("training.batch_tokens=400", "training.max_updates=2", "training.valid_updates=1", "training.optimizer=adam"),
)
TEXT = "A dog sleeps.\nThe cat reads a book in the garden.\n\nTwo men play.\n"


BULK = ("translate", "--beam", "1", "--max-length", "3", "--device", "cpu")


@contextlib.contextmanager
def stopped_after_one_update() -> Iterator[None]:
    """Stop a training with SIGTERM in its first update, after which it saves."""
    from transduce.training.step import Updater

    update = Updater.update

    def last(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return update(*args, **kwargs)

    with mock.patch.object(Updater, "update", last):
        yield


@contextlib.contextmanager
def stopped_after_two_chunks() -> Iterator[None]:
    """Stop a bulk translation, of a line per chunk, with SIGTERM."""
    from transduce.bulk import translate as bulk
    from transduce.bulk.translate import OutputFile

    append, left = OutputFile.append, [2]

    def last(*args: Any, **kwargs: Any) -> None:
        append(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(OutputFile, "append", last), mock.patch.object(bulk, "CHUNK_LINES", 1):
        yield


def _train(folder: Path, arguments: list[Any], *more: str) -> None:
    """Make `finished` and `halfway` in a folder, and store the command's arguments in command.json."""
    command = ["train", *arguments, "--quiet", *sets(*SETTINGS, *more)]
    succeed(*command, "--run", folder / "finished")
    with stopped_after_one_update():
        assert transduce(*command, "--run", folder / "halfway").code == 143
    (folder / "command.json").write_text(json.dumps(list(map(str, command))))


def translation(folder: Path) -> None:
    src, tgt = write_corpus(folder, "train", 40)
    test = write_corpus(folder, "test", 4, split="test")
    sides = ["--src", src, "--tgt", tgt, "--valid-src", test[0], "--valid-tgt", test[1], "--test-src", test[0], "--test-tgt", test[1]]  # fmt: skip
    more = ("data.max_length=64", "training.keep_checkpoints=1", "training.valid_bleu_sentences=2")
    _train(folder, sides, "model.n_encoder_layers=1", "model.n_decoder_layers=1", *more)
    lines = folder / "lines.txt"
    lines.write_text(TEXT, encoding="utf-8")
    with stopped_after_two_chunks():
        assert transduce(*BULK, folder / "finished", lines, "--output-dir", folder / "bulk").code == 143


def causal(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT * 20, encoding="utf-8")
    sizes = ("model.n_decoder_layers=1", "data.context=16", "tokenizer.vocab_size=300")
    _train(folder, ["--text", folder / "text.txt"], *sizes)


def _recipe(folder: Path, task: str, name: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(f'task = "{task}"\n[data]\ntrain = [{{ path = "{name}" }}]\n', encoding="utf-8")
    return path


def classification(folder: Path) -> None:
    lines = [f"{label}\t{text}\n" for text, label in zip(TEXT.split("\n") * 12, "ab" * 40, strict=False) if text]
    (folder / "labels.tsv").write_text("".join(lines), encoding="utf-8")
    _train(folder, [_recipe(folder, "classification", "labels.tsv")], "model.n_encoder_layers=1", "data.max_length=64")


def marian(folder: Path) -> None:
    made = marians.make_run(folder / "made", joint=False, tie="two_way")
    marians.make_folder(folder / "theirs", made)
    succeed("import", folder / "theirs", folder / "finished")


def marian_files(folder: Path) -> None:
    marian_models.make_folder(folder / "theirs", kind=marian_models.INT8)


def ctranslate2(folder: Path) -> None:
    made = marians.make_run(folder / "made", joint=False, tie="two_way")
    succeed("export", made, folder / "theirs", "--to", "ctranslate2", "--quantization", "int8")


def bert(folder: Path) -> None:
    berts.make_folder(folder / "theirs", "BertForMaskedLM", seed=1)
    succeed("import", folder / "theirs", folder / "finished")


def gpt2(folder: Path) -> None:
    berts.make_gpt2(folder / "theirs", [TEXT], n_layer=1, n_head=2, n_positions=24, n_inner=32)
    succeed("import", folder / "theirs", folder / "finished")


def recipes(folder: Path) -> None:
    write_corpus(folder, "train", 20)
    (folder / "recipe.toml").write_text(
        """name = "small"
task = "translation"
[data]
train = [{ src = "train.en", tgt = "train.de", weight = 1.0 }]
valid = [{ src = "train.en", tgt = "train.de" }]
max_length = 64
src_lang = "en"
[tokenizer]
vocab_size = 300
kind = "unigram"
character_coverage = 1.0
[model]
preset = "tiny"
d_model = 16
n_heads = 2
tie = "three_way"
[training]
max_updates = 2
lr = 0.001
betas = [0.9, 0.98]
average = "ema"
[decoding]
beam = 2
"""
    )


def tmx_of(pairs: list[tuple[str, str]]) -> str:
    units = "".join(
        f'<tu>\n<tuv xml:lang="en"><seg>{s}</seg></tuv>\n<tuv xml:lang="de"><seg>{t}</seg></tuv>\n</tu>\n'
        for s, t in pairs
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4"><header/><body>\n{units}</body></tmx>\n'


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def texts(folder: Path) -> None:
    """A corpus of 30 pairs in every format."""
    from transduce.demo.corpus import demo_pairs

    pairs = [(pair.src, pair.tgt) for pair in demo_pairs("train", 30, seed=1)]
    made = {
        "a.txt": "".join(f"{s}\n" for s, _ in pairs),
        "b.txt": "".join(f"{t}\n" for _, t in pairs),
        "c.tsv": "".join(f"{s}\t{t}\n" for s, t in pairs),
        "c.jsonl": "".join(json.dumps({"src": s, "tgt": t}) + "\n" for s, t in pairs),
        "c.tmx": tmx_of(pairs),
        "labels.tsv": "".join(f"{'ab'[i % 2]}\t{s}\n" for i, (s, _) in enumerate(pairs)),
    }
    for name, text in made.items():
        (folder / name).write_bytes(text.encode("utf-8"))
        for suffix, pack in PACK.items():
            (folder / f"{name}{suffix}").write_bytes(pack(text.encode("utf-8")))


ORIGINALS: dict[str, Callable[[Path], None]] = {
    f.__name__: f
    for f in (translation, causal, classification, marian, marian_files, ctranslate2, bert, gpt2, recipes, texts)
}


def make(name: str, folder: Path) -> Path:
    """The original of this name, which is made once."""
    path = folder / name
    if not path.exists():
        path.mkdir(parents=True)
        torch.manual_seed(1)
        ORIGINALS[name](path)
    return path
