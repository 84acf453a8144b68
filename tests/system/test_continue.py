"""A finished training is continued, and settings change at a resume: the same commands as a user's, on small text."""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import toys
from kills import events
from system.commands import Done, assert_refused, sets, small, succeed, transduce, write_corpus
from transduce import train
from transduce.config.settings import Settings
from transduce.errors import Interrupted, SettingsError
from transduce.runs.folder import RunFolder
from transduce.tasks.continuation import More

PLAIN = ("training.warmup_updates=2", "training.valid_updates=4", "training.valid_bleu_sentences=0")
CONSTANT = (*PLAIN, "training.schedule=constant")
SCORED = ("training.valid_bleu_sentences=4",)
LINEAR = (*PLAIN, "training.schedule=linear")
COMPUTED = ("event", "update", "loss", "nll", "lr", "grad_norm", "epoch", "n_targets", "best")


def begin(folder: Path, run: str, *settings: str) -> Done:
    sides = ["--src", folder / "train.en", "--tgt", folder / "train.de"]
    return transduce("train", *sides, "--run", folder / run, "--quiet", *small(*settings))


def interrupted(number: int) -> Any:
    """As if a signal had arrived before the `number`-th update."""
    return toys.failing_update(number, Interrupted("saved", signal=2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 updates, one of 24 updates, and one of 12 whose learning rate falls to zero."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder, "train", 100)
    for run, settings in (
        ("short", (*CONSTANT, "training.max_updates=12")),
        ("long", (*CONSTANT, "training.max_updates=24")),
        ("falling", (*LINEAR, "training.max_updates=12")),
    ):
        assert begin(folder, run, *settings).code == 0
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished runs; their text stays."""
    for run in ("short", "falling"):
        shutil.copytree(trained / run, tmp_path / run)
    return tmp_path


def computed(run: Path) -> list[dict[str, Any]]:
    """The losses and learning rates in the log."""
    kept = [event for event in events(run) if event["event"] in ("update", "validation")]
    return [{key: event[key] for key in COMPUTED if key in event} for event in kept]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = RunFolder.open(run)
    checkpoint = folder.checkpoints.latest()
    return folder.load_model() | checkpoint.tensors()


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_continued_run_computes_what_a_longer_one_does_although_it_is_interrupted(trained: Path, runs: Path) -> None:
    run = runs / "short"
    before = (run / "data.json").read_bytes()
    with interrupted(6):
        done = transduce("train", run, "--more-updates", 12)
    assert done.code == 130
    assert "after update 12, epoch" in done.err and "to update 24; the learning rate begins at 0.02" in done.err
    with interrupted(3):
        done = transduce("train", run, "--more-updates", 12)  # as a user who repeats the command
    assert done.code == 130 and "resuming after update 16" in done.err and "is not finished" in done.err
    succeed("train", run, says=[f"train {run} --more-updates N"])
    assert computed(run) == computed(trained / "long")
    ours, theirs = tensors(run), tensors(trained / "long")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [(event["update"], event["continuations"]) for event in events(run, "end")] == [(12, 0), (24, 1)]
    (change,) = events(run, "change")
    assert (change["update"], change["settings"]) == (12, {"training.max_updates": [12, 24]})
    assert "training.max_updates 12 -&gt; 24" in (run / "report.html").read_text()
    assert (run / "data.json").read_bytes() == before and transduce("verify", run).code == 0
    assert "is finished" in transduce("train", run).err
    assert not [path for path in run.iterdir() if path.name.startswith((".cont", "tokens"))]


def test_a_kill_before_the_continuation_is_recorded_leaves_a_finished_run(runs: Path) -> None:
    run = runs / "short"
    before = (run / "model.safetensors").read_bytes()
    for command in (("train", run), ("train", run, "--more-epochs", 0.5)):
        with mock.patch.object(RunFolder, "change", side_effect=Interrupted("killed", signal=2)):
            assert transduce("train", run, "--more-updates", 4).code == 130
        assert (run / "tokens").exists() and (run / "model.safetensors").read_bytes() == before
        done = transduce(*command)
        assert done.code == 0 and not (run / "tokens").exists(), done.err
    assert events(run, "change")[0]["settings"]["training.max_updates"] == [12, None]
    first, last = (event["epochs"] for event in events(run, "end"))
    assert first + 0.5 <= last < first + 0.7


def test_a_learning_rate_that_has_fallen_to_zero_has_to_be_given(runs: Path) -> None:
    run = runs / "falling"
    before = contents(run)
    state = json.loads((run / "checkpoints" / "u00000012" / "state.json").read_text())
    assert state["training"]["factor"] == pytest.approx(0.1)
    with mock.patch("transduce.tasks.continuation.LEAST_FACTOR", 0.2):
        assert_refused(transduce("train", run, "--more-updates", 8), "has fallen to 0.002", "--set training.lr=RATE")
    assert contents(run) == before
    succeed(
        "train", run, "--more-updates", 8, "--set", "training.lr=0.02", says=["begins at 0.02, as given (linear)"]
    )  # its peak was the same
    rates = [event["lr"] for event in events(run, "update")]
    assert rates == pytest.approx([0.02 * 3 / 10, 0.02 * 1 / 8])  # of updates 10 and 20


def test_a_continuation_begins_at_the_rate_at_which_the_training_ended(runs: Path) -> None:
    run = runs / "falling"
    train(run=run, more=More(updates=8))
    settings = RunFolder.open(run).settings.training
    assert (settings.lr, settings.matrix_lr) == (pytest.approx(0.002), pytest.approx(0.004))
    assert events(run, "update")[-1]["lr"] == pytest.approx(0.002 / 8)


def test_text_that_has_changed_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    _, text = write_corpus(tmp_path, "train", 60)
    assert begin(tmp_path, "run", *CONSTANT).code == 0
    run = tmp_path / "run"
    before = contents(run)
    text.write_text(text.read_text() + "one more line\n")
    assert_refused(transduce("train", run, "--more-updates", 4, "--quiet"), "has changed", f"train --from {run}")
    text.unlink()
    assert_refused(transduce("train", run, "--more-updates", 4, "--quiet"), "train.de", f"train --from {run}")
    assert contents(run).keys() - {".lock"} == before.keys() and before.items() <= contents(run).items()
    assert transduce("translate", run, stdin="A dog.\n").code == 0


def test_without_a_checkpoint_there_is_no_continuation(runs: Path, trained: Path) -> None:
    assert begin(trained, "none", *CONSTANT, "training.keep_checkpoints=0").code == 0
    run = trained / "none"
    assert not (run / "checkpoints").exists()
    done = transduce("train", run, "--more-updates", 4, "--quiet")
    assert_refused(done, "checkpoints", "is missing", f"train --from {run}")


def test_settings_change_at_a_resume_and_the_change_is_recorded(trained: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path, "train", 100)
    with interrupted(10):
        assert begin(tmp_path, "run", *CONSTANT, "training.max_updates=40", *SCORED).code == 130
    run = tmp_path / "run"
    changes = ("lr=0.01", "batch_tokens=256", "valid_bleu_sentences=2", "stop_by=loss", "max_updates=14")
    with interrupted(2):
        done = transduce("train", run, *sets(*(f"training.{change}" for change in changes)))
    assert done.code == 130
    assert "at update 8: " in done.err and "training.lr 0.02 -> 0.01" in done.err
    assert "the rest of this epoch has other batches" in done.err
    done = transduce("train", run)
    assert done.code == 0 and "->" not in done.err, done.err
    (change,) = events(run, "change")
    assert change["update"] == 8 and change["settings"] == {
        "training.batch_tokens": [512, 256],
        "training.lr": [0.02, 0.01],
        "training.matrix_lr": [0.04, 0.02],
        "training.max_updates": [40, 14],
        "training.stop_by": ["bleu", "loss"],
        "training.valid_bleu_sentences": [4, 2],
    }
    assert "training.lr 0.02 -&gt; 0.01" in (run / "report.html").read_text()
    assert events(run, "end")[0]["update"] == 14 and events(run, "update")[-1]["lr"] == 0.01
    assert events(run, "end")[0]["epochs"] < 14 * 100 / 512  # smaller batches
    (scored,) = json.loads((run / "scores.json").read_text())["sets"]
    assert scored["scores"]["n_sentences"] == 2


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (sets("training.lr=0.001"), ("is finished", "training.lr", "--more-updates")),
        (sets("model.dropout=0.2"), ("another run", "model.dropout")),
        (sets("tokenizer.vocab_size=200"), ("another run", "tokenizer.vocab_size")),
        (["--more-updates", 3, *sets("training.max_epochs=9")], ("training.max_epochs", "--more-updates")),
        (["--more-updates", 3, "--more-minutes", 1], ("give one of",)),
        (["--more-minutes", "nan"], ("--more-minutes",)),
        (["--more-updates", 3, "--dry-run"], ("dry_run",)),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(runs: Path, options: list[object], parts: tuple[str, ...]) -> None:
    before = contents(runs / "short")
    assert_refused(transduce("train", runs / "short", "--quiet", *options), *parts)
    assert contents(runs / "short").keys() - {".lock"} == before.keys()
    assert before.items() <= contents(runs / "short").items()


def test_there_has_to_be_a_training_to_continue(trained: Path, tmp_path: Path) -> None:
    sides = ["--src", trained / "train.en", "--tgt", trained / "train.de"]
    done = transduce("train", *sides, "--run", tmp_path / "new", "--more-updates", 3)
    assert_refused(done, "no training that could be continued", "--more-updates")
    assert not (tmp_path / "new").exists()
    with pytest.raises(SettingsError, match="no training text"):
        train(Settings(), tmp_path / "new")
