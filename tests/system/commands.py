"""Run commands in this process and capture output and exit code; small text to run them on."""

import contextlib
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from transduce.__main__ import main
from transduce.demo.corpus import demo_pairs
from transduce.runs.folder import RunFolder

SMALL = (
    "model.d_model=32",
    "model.d_ff=64",
    "model.n_heads=2",
    "model.n_encoder_layers=1",
    "model.n_decoder_layers=1",
    "tokenizer.vocab_size=300",
    "training.batch_tokens=512",
    "training.precision=float32",
    "training.valid_bleu_sentences=4",
    "decoding.max_length=20",
)
"""Settings that train in seconds."""


@dataclass(frozen=True)
class Done:
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str


def transduce(*arguments: object, stdin: str | None = None) -> Done:
    """Run a command as from the shell, with this text on its standard input if given."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)
        for errors in ("strict", "backslashreplace")  # as Python's own
    )
    code = -1
    given = sys.stdin if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch("sys.stdin", given):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Done(code, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, err)))  # type: ignore[attr-defined]


def succeed(*arguments: object, stdin: str | None = None, says: Iterable[str] = ()) -> Done:
    """Run a command whose exit code has to be 0, and whose stderr has to contain the texts `says`."""
    done = transduce(*arguments, stdin=stdin)
    assert done.code == 0, done.err
    assert [text for text in says if text not in done.err] == [], done.err
    return done


def assert_refused(done: Done, *parts: str) -> None:
    """Check for exit code 2 and a one-line error with these parts."""
    assert done.code == 2, done
    (line,) = (line for line in done.err.splitlines() if "the native library" not in line)  # it may not be built
    assert line.startswith("transduce: error: "), done.err
    for part in parts:
        assert part in line, done.err


def assert_same_weights(one: Path, other: Path) -> None:
    """Check that the models of two runs are equal bit for bit."""
    ours, theirs = (RunFolder.open(run).load_model() for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def sets(*values: str) -> list[str]:
    """Return --set options."""
    return [part for value in values for part in ("--set", value)]


def small(*more: str) -> list[str]:
    """Return --set options of a small, short training; later ones win."""
    return sets(*SMALL, "training.max_updates=4", *more)


def write_corpus(folder: Path, name: str, n: int, *, split: str = "train", seed: int = 1) -> tuple[Path, Path]:
    """Write `name`.en and `name`.de with `n` pairs of the built-in corpus."""
    pairs = list(demo_pairs(split, n, seed=seed))
    src, tgt = folder / f"{name}.en", folder / f"{name}.de"
    src.write_text("".join(f"{pair.src}\n" for pair in pairs), encoding="utf-8", newline="\n")
    tgt.write_text("".join(f"{pair.tgt}\n" for pair in pairs), encoding="utf-8", newline="\n")
    return src, tgt
