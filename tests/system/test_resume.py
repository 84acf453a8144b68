"""A killed run resumes from its last checkpoint and ends with the same weights: real SIGKILLs in child processes."""

import os
import signal
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from kills import events
from system.teams import Team
from transduce.runs.folder import RunFolder

TIMELESS = ("event", "update", "loss", "nll", "lr", "grad_norm", "padding", "epoch", "n_targets", "perplexity", "best")
EMA = ("average=ema", "optimizer=adam", "schedule=inverse_sqrt")
LAST = ("average=last", "average_n=2", "optimizer=muon", "schedule=cosine", "matrix_lr=0.01")


@pytest.fixture
def runs(processes: ForkServerContext, tmp_path: Path) -> Team:
    return Team(processes, tmp_path)


@pytest.fixture(scope="module")
def whole(processes: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """Uninterrupted runs."""
    runs = Team(processes, tmp_path_factory.mktemp("whole"))
    return {settings: runs.train(settings[0], 1, *settings) for settings in (EMA, LAST)}


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The log without times and restarts."""
    return [{k: e[k] for k in TIMELESS if k in e} for e in events(folder) if e["event"] != "restart"]


def assert_same(one: Path, other: Path) -> None:
    """The log, the model and the last checkpoint are equal bit for bit."""
    assert timeless(one) == timeless(other)
    for read in (lambda run: run.load_model(), lambda run: run.checkpoints.latest().tensors()):
        a, b = (read(RunFolder.open(folder, model=False)) for folder in (one, other))
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    ("settings", "kills"),
    [
        # before the first checkpoint; instead of a save; between the weights and the checkpoint; between updates; after
        # a save and before old checkpoints are removed. The counts start anew with every process.
        (EMA, ("update:13", "checkpoint:1", "model:2", "update:13", "prune:2")),
        # before a log line; with snapshots that a later checkpoint refers to
        (LAST, ("line:4", "checkpoint:2", "update:27", "model:1")),
    ],
    ids=["ema", "last"],
)
def test_resume_is_bit_identical_after_any_number_of_sigkills(
    runs: Team, whole: dict[tuple[str, ...], Path], settings: tuple[str, ...], kills: tuple[str, ...]
) -> None:
    for kill in kills:
        runs.train("cut", 1, *settings, kill=(0, kill))
    assert_same(whole[settings], runs.train("cut", 1, *settings))


@pytest.mark.parametrize(
    "settings",
    [
        ("model.kind=rnn",),
        ("model.kind=rnn", "model.cell=gru", "model.attention=concat", "model.n_decoder_layers=2"),
        ("model.kind=convs2s",),
        ("model.kind=star",),
        ("model.encoder_pattern=fixed", "model.decoder_pattern=strided", "model.window=2", "model.positions=shaw"),
        ("precision=bfloat16", "model.dropout=0.2"),  # with the native kernels, where the CPU has them
        ("precision=bfloat16", "model.dropout=0.2", "kernels=torch"),
        ('consistency={kind="simcut",from=0.3}', "word_dropout=0.1", "average=best", "average_n=2"),
    ],
    ids=" ".join,
)
def test_resume_is_bit_identical_for_every_architecture(runs: Team, settings: tuple[str, ...]) -> None:
    asked = *settings, "max_updates=10", "valid_updates=5", "save_updates=3"
    whole = runs.train("whole", 1, *asked)
    runs.train("cut", 1, *asked, kill=(0, "update:5"))
    assert_same(whole, runs.train("cut", 1, *asked))


def test_a_skipped_update_is_bit_identical_however_the_run_is_killed(runs: Team) -> None:
    """Kills come instead of the checkpoint after it, and before a log line after it."""
    asked = ("--poison", "17", "save_updates=10", "valid_updates=20", "max_updates=30", *EMA)
    whole = runs.train("whole", 1, *asked)
    (skipped,) = events(whole, "skipped")
    assert (skipped["update"], skipped["loss"]) == (17, None)
    for kill in ("checkpoint:2", "line:3"):
        runs.train("cut", 1, *asked, kill=(0, kill))
    assert_same(whole, runs.train("cut", 1, *asked))


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    runs: Team, whole: dict[tuple[str, ...], Path]
) -> None:
    cut = runs.train("cut", 1, *LAST, kill=(0, "update:50"))
    damaged = cut / "checkpoints" / "u00000040" / "training.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert_same(whole[LAST], runs.train("cut", 1, *LAST))
    assert "u00000040" in runs.said("cut")


def test_signals_save_everything_and_the_run_can_be_resumed(runs: Team, whole: dict[tuple[str, ...], Path]) -> None:
    for number, sign in ((signal.SIGINT, '"update": 10'), (signal.SIGTERM, '"restart"')):
        (process,) = runs.start("cut", 1, *EMA)
        runs.wait_for_log("cut", process, sign)
        os.kill(process.pid, number)
        runs.finish([process], 128 + number)
        errors = runs.said("cut")
        assert f"{number.name}: stopped after update" in errors
        assert "the same command" in errors
        assert RunFolder.open(runs.path / "cut", model=False).checkpoints.latest() is not None
    assert_same(whole[EMA], runs.train("cut", 1, *EMA))
