import json
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toys
from kills import events
from transduce.errors import RunFolderError, TrainingError
from transduce.models.registry import build_model
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors
from transduce.training import loop
from transduce.training.averaging import decay_at
from transduce.training.step import Updater


def judge_with(values: Iterator[float]) -> Any:
    return toys.judge(lambda model: {"bleu": next(values), "chrf": 1.0})


def run(path: Path, judge: Any = None, **training: Any) -> tuple[nn.Module, Any]:
    data = {"train_on": toys.pairs(120, seed=1), "validate_on": toys.pairs(20, seed=2)}
    return toys.run(path, toys.settings(**training), judge=judge, **data)


def saved(path: Path) -> dict[str, torch.Tensor]:
    return load_tensors(path / "model.safetensors")


def test_a_run_learns_writes_its_log_and_a_model_that_loads(tmp_path: Path) -> None:
    _, result = run(tmp_path / "run", max_updates=60, valid_updates=25, lr=1e-2, average="none")
    path = tmp_path / "run"
    assert events(path)[0]["event"] == "start"
    updates = events(path, "update")
    assert [event["update"] for event in updates] == [10, 20, 30, 40, 50, 60]
    assert updates[-1]["loss"] < updates[0]["loss"] - 0.3
    assert [event["update"] for event in events(path, "validation")] == [25, 50, 60]
    for event in updates:
        assert set(event) >= {"loss", "nll", "lr", "grad_norm", "tokens_per_second", "epoch", "padding", "seconds"}
        assert event["tokens_per_second"] > 0
    end = events(path)[-1]
    assert (end["event"], end["update"], end["reason"]) == ("end", 60, "max_updates")
    assert (result.update, result.finished, result.scores["loss"]) == (60, "max_updates", events(path)[-2]["loss"])
    fresh = build_model(toys.settings().model, n_src=24, n_tgt=24)
    fresh.load_state_dict(saved(path))
    assert len(list((path / "checkpoints").iterdir())) == 2


def test_the_learning_rates_are_the_schedules(tmp_path: Path) -> None:
    run(tmp_path / "run", max_updates=20, valid_updates=20, warmup_updates=5, lr=0.01)
    assert [event["lr"] for event in events(tmp_path / "run", "update")] == pytest.approx(
        [0.01 * (1 - 4 / 15), 0.01 / 15 * 1]
    )


def test_the_ema_is_validated_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The average, recomputed here from the weights after every update."""
    average: dict[str, torch.Tensor] = {}
    n_updates = [0]
    original = Updater.update

    def noted(self: Updater, *args: Any, **options: Any) -> Any:
        live = dict(self.model.named_parameters())
        if not average:
            average.update({name: p.detach().double().clone() for name, p in live.items()})
        result = original(self, *args, **options)
        decay = decay_at(n_updates[0], 0.9)
        for name, p in live.items():
            average[name].mul_(decay).add_(p.detach().double(), alpha=1 - decay)
        n_updates[0] += 1
        return result

    monkeypatch.setattr(Updater, "update", noted)
    seen: list[dict[str, torch.Tensor]] = []

    def judge(model: nn.Module) -> dict[str, float]:
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return {"bleu": 1.0, "chrf": 1.0}

    model, _ = run(tmp_path / "run", toys.judge(judge), max_updates=20, valid_updates=20, ema_decay=0.9)
    kept = saved(tmp_path / "run")
    for name, expected in average.items():
        torch.testing.assert_close(kept[name].double(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(seen[0][name], kept[name])
    assert not torch.equal(model.state_dict()["tgt_embedding.table.weight"], kept["tgt_embedding.table.weight"])


def test_the_best_validation_is_kept_and_patience_ends_the_run(tmp_path: Path) -> None:
    weights: list[torch.Tensor] = []
    values = iter([10.0, 30.0, 20.0, 25.0, 99.0])

    def judge(model: nn.Module) -> dict[str, float]:
        weights.append(model.state_dict()["tgt_embedding.table.weight"].clone())
        return {"bleu": next(values), "chrf": 1.0}

    _, result = run(tmp_path / "run", toys.judge(judge), max_updates=500, valid_updates=5, patience=2, average="none")
    assert (result.update, result.best_update) == (20, 10)
    assert "no better bleu in 2 validations" in result.finished
    assert torch.equal(saved(tmp_path / "run")["tgt_embedding.table.weight"], weights[1])
    assert [event["best"] for event in events(tmp_path / "run", "validation")] == [True, True, False, False]


@pytest.mark.parametrize(("average", "kept"), [("last", (1, 2, 3)), ("best", (0, 2, 3))])
def test_the_mean_of_the_last_or_the_best_weights_is_kept(average: str, kept: tuple[int, ...], tmp_path: Path) -> None:
    live: list[torch.Tensor] = []
    name = "src_embedding.table.weight"
    values = iter([40.0, 10.0, 20.0, 30.0])

    original = loop.Trainer._validate

    def noted(self: loop.Trainer, *args: Any, **kwargs: Any) -> None:
        live.append(self.live[name].detach().clone())
        original(self, *args, **kwargs)
        assert torch.equal(self.live[name], live[-1]), "validation must give the live weights back"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "_validate", noted)
        run(tmp_path / "run", judge_with(values), max_updates=20, valid_updates=5, average=average, average_n=3)
    expected = torch.stack([live[i].double() for i in kept]).mean(0).float()
    torch.testing.assert_close(saved(tmp_path / "run")[name], expected)
    snapshots = {path.name for path in (tmp_path / "run" / "averaging").iterdir()}
    assert {f"u{n:08d}.safetensors" for n in (10, 15, 20)} <= snapshots, "a continuation needs them"


def test_a_continued_mean_of_the_last_weights_is_that_of_a_longer_run(tmp_path: Path) -> None:
    options = {"valid_updates": 5, "average": "last", "average_n": 3, "schedule": "inverse_sqrt"}
    run(tmp_path / "long", max_updates=25, **options)
    run(tmp_path / "run", max_updates=15, **options)
    toys.change(tmp_path / "run", {"training.max_updates": (15, 25)}, continues=True)
    run(tmp_path / "run", max_updates=15, **options)
    one, other = saved(tmp_path / "run"), saved(tmp_path / "long")
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_the_schedule_follows_a_limit_that_changes_at_a_resume(tmp_path: Path) -> None:
    options = {"warmup_updates": 5, "valid_updates": 10, "lr": 0.01}
    with toys.failing_update(11, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", max_updates=20, **options)
    run(tmp_path / "run", max_updates=30, **options)
    rates = [event["lr"] for event in events(tmp_path / "run", "update")]
    assert rates == pytest.approx([0.01 * (1 - 4 / 15), 0.01 * (1 - 14 / 25), 0.01 / 25])


def test_patience_counts_anew_in_a_continuation(tmp_path: Path) -> None:
    values = iter([10.0, 9.0, 9.0, 9.0, 11.0, 9.0, 9.0])
    options = {"judge": judge_with(values), "max_updates": 500, "valid_updates": 5, "patience": 2}
    assert run(tmp_path / "run", **options)[1].update == 15
    toys.change(tmp_path / "run", {}, continues=True)
    _, result = run(tmp_path / "run", **options)
    assert (result.update, result.best_update) == (35, 25)


def test_loss_decides_where_nothing_is_translated(tmp_path: Path) -> None:
    _, result = run(tmp_path / "run", max_updates=20, valid_updates=10, stop_by="bleu")
    losses = [event["loss"] for event in events(tmp_path / "run", "validation")]
    assert result.best_update == 10 * (1 + losses.index(min(losses)))


@pytest.mark.parametrize(("epochs", "n_updates"), [(2.0, 2), (0.4, 0.4)])
def test_epochs_are_a_limit(tmp_path: Path, epochs: float, n_updates: float) -> None:
    _, result = run(tmp_path / "run", max_updates=None, max_epochs=epochs, valid_updates=1000)
    assert result.finished == "max_epochs"
    assert epochs <= result.epochs < epochs + 0.3
    assert events(tmp_path / "run", "validation")[-1]["update"] == result.update


def nan_in_updates(*numbers: int) -> Any:
    """An `Updater.update` with NaN among the weights in these calls."""
    calls = count(1)
    return toys.with_nan(lambda batches: next(calls) in numbers)


def test_an_update_whose_loss_is_not_finite_is_skipped_and_its_sentences_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Updater, "update", nan_in_updates(3, 4, 14))
    toys.show_indices(monkeypatch)
    _, result = run(tmp_path / "run", max_updates=20, valid_updates=10)
    assert result.update == 20
    assert [e["update"] for e in events(tmp_path / "run", "skipped")] == [3, 4, 14]
    assert all(e["loss"] is None and e["grad_norm"] is None for e in events(tmp_path / "run", "skipped"))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: update ")]
    assert len(warnings) == 3
    assert "update 14: the loss" in warnings[2] and "not finite" in warnings[2] and "skipped.jsonl" in warnings[2]
    named = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()]
    feeds = toys.PairFeeder(toys.pairs(120, seed=1), toys.settings().training, device=toys.CPU).feeds(
        toys.DataPosition()
    )
    indices = [[[str(i)] for i in next(feeds).indices] for _ in range(20)]
    assert named == [{"update": n, "sentences": indices[n - 1]} for n in (3, 4, 14)]
    assert all(math.isfinite(e["loss"]) for e in events(tmp_path / "run", "update"))


def test_the_third_skipped_update_in_a_row_stops_the_run_after_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Updater, "update", nan_in_updates(12, 14, 15, 16))
    toys.show_indices(monkeypatch)
    with pytest.raises(TrainingError, match=r"3 updates in a row.*update 16.*training\.lr"):
        run(tmp_path / "run", max_updates=20, valid_updates=10)
    checkpoint = RunFolder.open(tmp_path / "run", model=False).checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.update == 16
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors().values())
    monkeypatch.undo()
    _, result = run(tmp_path / "run", max_updates=20, valid_updates=10)
    assert result.update == 20, "the same command resumes after the sentences"


def test_a_validation_without_a_checkpoint_after_it_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill or a full disk between the log line of a validation and its checkpoint: a resumed run validates again."""
    original, saved_updates = Checkpoints.save, list[int]()

    def full(self: Checkpoints, update: int, *args: Any) -> Path:
        saved_updates.append(update)
        if saved_updates.count(20) == 2:
            raise RunFolderError("cannot write: No space left on device")
        return original(self, update, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunFolderError, match="No space left"):
        patch.setattr(Checkpoints, "save", full)
        run(tmp_path / "run", max_updates=30, valid_updates=10)
    assert [event["update"] for event in events(tmp_path / "run", "validation")] == [10, 20]
    run(tmp_path / "run", max_updates=30, valid_updates=10)
    assert [event["update"] for event in events(tmp_path / "run", "validation")] == [10, 20, 30]


def test_checkpoints_are_saved_between_distant_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    updates: list[int] = []
    original = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, update, *args: updates.append(update) or original(self, update, *args)
    )
    run(tmp_path / "run", max_updates=5, valid_updates=1000)
    assert updates == [1, 2, 3, 4, 5, 5]


def test_checkpoints_are_saved_every_save_updates(tmp_path: Path) -> None:
    run(tmp_path / "run", max_updates=20, valid_updates=10, save_updates=4, keep_checkpoints=9)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [f"u{n:08d}" for n in (4, 8, 10, 12, 16, 20)]
