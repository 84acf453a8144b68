"""A limit in minutes becomes a limit in updates, so that runs do not depend on the clock."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toys
from kills import events
from transduce.logging import Log
from transduce.runs.tensors import load_tensors
from transduce.training import loop, session
from transduce.training.meter import Row, Stopwatch, summarize
from transduce.training.schedule import MARGIN, TIME_LIMIT, TimeLimit
from transduce.training.step import Updater

pytestmark = pytest.mark.usefixtures("unchecked")
OPTIONS: dict[str, Any] = {"max_updates": None, "max_minutes": 0.5, "valid_updates": 10, "warmup_updates": 5}


def tick(
    monkeypatch: pytest.MonkeyPatch, seconds: float, *, slower_from: int = 10**9, slower_until: float = 0.0
) -> None:
    """A clock that advances by a fixed time at each call, and by more from a call on or until a time."""
    looks = count()

    def now(total: list[float] = [0.0]) -> float:  # noqa: B006
        total[0] += seconds * (10 if next(looks) > slower_from else 5 if total[0] < slower_until else 1)
        return total[0]

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=now))
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: 0.0))  # of saving


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_tensors(path / "model.safetensors")


def test_the_limit_is_the_number_of_updates_that_fit_into_the_remaining_time() -> None:
    found = TimeLimit.derive(
        done=40, seconds_left=1010.0, seconds_per_update=0.4, validation_seconds=10.0, valid_updates=100
    )
    assert found == TimeLimit(updates=40 + int(MARGIN * 1000.0 / 0.5), since=40)
    slower = TimeLimit.derive(
        done=40,
        seconds_left=1000.0 / MARGIN,
        seconds_per_update=1.0,
        validation_seconds=0.0,
        valid_updates=100,
        extra_seconds=2.0,
        extra_from=0.75,
    )
    assert slower.updates == pytest.approx(693, abs=1)  # 520 - 40 updates of 1 s, and 173 of 3 s
    late = TimeLimit.derive(done=7, seconds_left=-3.0, seconds_per_update=1.0, validation_seconds=0.0, valid_updates=10)
    assert late.updates == 8


def test_the_first_half_of_the_updates_and_pauses_are_not_measured() -> None:
    watch = Stopwatch(100.0)
    for now in (110.0, 120.0, 130.0):
        watch.count(now, 10)
    assert watch.seconds_per_update(130.0) == 10.0
    watch.count(131.0, 10)
    watch.pause(7.0)
    for now in (139.0, 140.0):
        watch.count(now, 10)
    assert watch.seconds_per_update(140.0) == pytest.approx(1.0)
    assert watch.targets_per_second(140.0) == pytest.approx(60 / 33)
    watch.count(142.0, 30)
    assert watch.targets_per_second(142.0) == pytest.approx(15)


def test_a_run_ends_at_the_derived_update_with_a_learning_rate_near_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monkeypatch, 0.25)
    _, result = toys.toy_run(tmp_path / "run", toys.settings(**OPTIONS))
    stored = json.loads((tmp_path / "run" / TIME_LIMIT).read_text())
    assert result.update == stored["updates"] and 0.2 <= stored["since"] / stored["updates"] <= 0.3
    assert result.finished == "max_minutes"
    assert 20 <= result.seconds <= 30
    lrs = [event["lr"] for event in events(tmp_path / "run", "update")]
    assert lrs == sorted(lrs, reverse=True) and lrs[-1] < 0.35 * lrs[0]


def test_a_run_whose_updates_become_slower_by_a_setting_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consistency doubles the time of the updates in the second half."""
    tick(monkeypatch, 0.1)
    original = Updater.update

    def slowed(self: Updater, *args: Any, progress: float, **options: Any) -> Any:
        if progress >= 0.5:
            loop.time.monotonic()
        return original(self, *args, progress=progress, **options)

    monkeypatch.setattr(Updater, "update", slowed)
    asked = toys.settings(**OPTIONS, consistency={"kind": "rdrop", "from": 0.5})
    _, result = toys.toy_run(tmp_path / "run", asked)
    assert result.finished == "max_minutes" and 24 <= result.seconds <= 30


def test_a_slow_start_does_not_end_the_run_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is five times as slow for the first tenth of the time."""
    tick(monkeypatch, 0.1, slower_until=3.0)
    _, result = toys.toy_run(tmp_path / "run", toys.settings(**OPTIONS))
    assert result.finished == "max_minutes" and 24 <= result.seconds <= 30


def test_a_killed_run_makes_the_same_updates_on_a_machine_of_another_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monkeypatch, 0.25)
    toys.toy_run(tmp_path / "whole", toys.settings(**OPTIONS))
    tick(monkeypatch, 0.25)
    with toys.failing_update(37, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        toys.toy_run(tmp_path / "cut", toys.settings(**OPTIONS))
    tick(monkeypatch, 0.1)
    toys.toy_run(tmp_path / "cut", toys.settings(**OPTIONS))
    assert (tmp_path / "cut" / TIME_LIMIT).read_bytes() == (tmp_path / "whole" / TIME_LIMIT).read_bytes()
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[name], two[name]) for name in one)
    lrs = [[event["lr"] for event in events(tmp_path / name, "update")] for name in ("whole", "cut")]
    assert lrs[0] == lrs[1]


def test_a_continuation_by_minutes_measures_the_speed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch, 0.25)
    _, first = toys.toy_run(tmp_path / "run", toys.settings(**OPTIONS))
    seconds = first.seconds + 30
    changes = {"training.max_minutes": (0.5, seconds / 60), "training.lr": (3e-3, 1e-3)}
    toys.change(tmp_path / "run", changes, continues=True)
    tick(monkeypatch, 0.25)
    _, result = toys.toy_run(tmp_path / "run", toys.settings(**OPTIONS))
    stored = json.loads((tmp_path / "run" / TIME_LIMIT).read_text())
    assert result.finished == "max_minutes" and result.update == stored["updates"] > stored["since"] > first.update
    assert 0.15 <= (stored["since"] - first.update) / (result.update - first.update) <= 0.35
    assert seconds - 10 <= result.seconds <= seconds
    lrs = [event["lr"] for event in events(tmp_path / "run", "update") if event["update"] > first.update + 10]
    assert lrs == sorted(lrs, reverse=True) and lrs[0] <= 1e-3 and lrs[-1] < 0.35e-3


def test_the_clock_ends_a_run_that_became_slower_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tick(monkeypatch, 0.1, slower_from=150)
    data = {"train_on": toys.pairs(120, seed=1), "validate_on": toys.pairs(20, seed=2)}
    _, result = toys.run(tmp_path / "run", toys.settings(**OPTIONS), log=Log(), **data)  # type: ignore[arg-type]
    assert result.finished == "max_minutes (by the clock)"
    assert result.update < json.loads((tmp_path / "run" / TIME_LIMIT).read_text())["updates"]
    assert "max_minutes" in (said := capfd.readouterr().err) and "planned" in said


def row(update: int, *, loss: float = 6.0, n_targets: int = 3, norm: float = 1.0) -> Row:
    sums = {"loss_sum": loss, "nll_sum": loss / 2, "grad_norm": norm}
    return Row(update, lr=0.1 * update, n_targets=n_targets, n_tokens=8, n_slots=10, **sums)


def test_a_line_divides_sums_by_all_targets() -> None:
    line = summarize([row(1, loss=6.0, n_targets=2, norm=1.0), row(2, loss=3.0, n_targets=4, norm=3.0)])
    assert line.pop("padding") == pytest.approx(0.2)
    assert line == {"update": 2, "loss": 1.5, "nll": 0.75, "lr": 0.2, "grad_norm": 2.0, "n_targets": 6}
