"""A limit in minutes becomes a limit in updates, so that runs do not depend on the clock."""

from __future__ import annotations

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
from transduce.training import loop
from transduce.training.meter import Stopwatch
from transduce.training.schedule import MARGIN, TIME_LIMIT, TimeLimit

pytestmark = pytest.mark.usefixtures("unchecked")
OPTIONS: dict[str, Any] = {"max_updates": None, "max_minutes": 0.5, "valid_updates": 10, "warmup_updates": 5}


def tick(monkeypatch: pytest.MonkeyPatch, seconds: float, *, slower_from: int = 10**9) -> None:
    """A clock that advances by a fixed time at each call."""
    looks = count()

    def now(total: list[float] = [0.0]) -> float:  # noqa: B006
        total[0] += seconds * (10 if next(looks) > slower_from else 1)
        return total[0]

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=now))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_tensors(path / "model.safetensors")


def test_the_limit_is_the_number_of_updates_that_fit_into_the_remaining_time() -> None:
    found = TimeLimit.derive(
        done=40, seconds_left=1010.0, seconds_per_update=0.4, validation_seconds=10.0, valid_updates=100
    )
    assert found == TimeLimit(updates=40 + int(MARGIN * 1000.0 / 0.5), since=40)
    late = TimeLimit.derive(done=7, seconds_left=-3.0, seconds_per_update=1.0, validation_seconds=0.0, valid_updates=10)
    assert late.updates == 8


def test_the_first_updates_and_pauses_are_not_measured() -> None:
    watch = Stopwatch(100.0)
    for now in (110.0, 120.0, 130.0, 140.0, 150.0):
        watch.count(now, 10)
    assert watch.seconds_per_update(150.0) == 10.0
    watch.count(151.0, 10)
    watch.pause(7.0)
    watch.count(159.0, 10)
    assert watch.seconds_per_update(159.0) == pytest.approx(1.0)
    assert watch.targets_per_second(159.0) == pytest.approx(70 / 52)
    watch.count(161.0, 30)
    assert watch.targets_per_second(161.0) == pytest.approx(15)


def test_a_run_ends_at_the_derived_update_with_a_learning_rate_near_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monkeypatch, 0.25)
    _, result = toys.toy_run(tmp_path / "run", toys.settings(**OPTIONS))
    stored = json.loads((tmp_path / "run" / TIME_LIMIT).read_text())
    assert result.update == stored["updates"] and stored["since"] == 10
    assert result.finished == "max_minutes"
    assert 20 <= result.seconds <= 30
    lrs = [event["lr"] for event in events(tmp_path / "run", "update")]
    assert lrs == sorted(lrs, reverse=True) and lrs[-1] < 0.35 * lrs[0]


def test_a_killed_run_makes_the_same_updates_on_a_machine_of_another_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick(monkeypatch, 0.25)
    toys.toy_run(tmp_path / "whole", toys.settings(**OPTIONS))
    tick(monkeypatch, 0.25)
    with toys.failing_update(17, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        toys.toy_run(tmp_path / "cut", toys.settings(**OPTIONS))
    tick(monkeypatch, 0.1)
    toys.toy_run(tmp_path / "cut", toys.settings(**OPTIONS))
    assert (tmp_path / "cut" / TIME_LIMIT).read_bytes() == (tmp_path / "whole" / TIME_LIMIT).read_bytes()
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(one[name], two[name]) for name in one)
    lrs = [[event["lr"] for event in events(tmp_path / name, "update")] for name in ("whole", "cut")]
    assert lrs[0] == lrs[1]


def test_the_clock_ends_a_run_that_became_slower_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tick(monkeypatch, 0.1, slower_from=150)
    data = {"train_on": toys.pairs(120, seed=1), "validate_on": toys.pairs(20, seed=2)}
    _, result = toys.run(tmp_path / "run", toys.settings(**OPTIONS), log=Log(), **data)  # type: ignore[arg-type]
    assert result.finished == "max_minutes (by the clock)"
    assert result.update < json.loads((tmp_path / "run" / TIME_LIMIT).read_text())["updates"]
    assert "max_minutes" in (said := capfd.readouterr().err) and "planned" in said
