"""A signal during a validation, updates without targets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import toys
from transduce.errors import Interrupted
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.tensors import load_tensors
from transduce.training.step import Updater

DATA = {"train_on": toys.pairs(120, seed=1), "validate_on": toys.pairs(20, seed=2)}
OPTIONS: dict[str, Any] = {"max_updates": 20, "valid_updates": 10, "average": "ema"}


def judge(model: nn.Module) -> Mapping[str, float]:
    return {"bleu": 1.0, "chrf": 1.0}


def run_with_slow_validation(path: Path, marker: Path) -> None:
    def slow(model: nn.Module) -> Mapping[str, float]:
        marker.touch()
        time.sleep(120)
        return judge(model)

    try:
        toys.run(path, toys.settings(**OPTIONS), judge=slow, **DATA)
    except Interrupted as error:
        sys.exit(error.exit_code)


def test_sigterm_interrupts_a_validation_after_everything_was_saved(tmp_path: Path) -> None:
    toys.run(tmp_path / "whole", toys.settings(**OPTIONS), judge=judge, **DATA)
    marker = tmp_path / "validating"
    process = toys.start_script(__file__, tmp_path / "cut", marker)
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143, "at once, not after the validation"
    checkpoint = Checkpoints(tmp_path / "cut" / "checkpoints").latest()
    assert checkpoint is not None and checkpoint.update == 10
    assert checkpoint.state["training"]["validated"] < 10
    _, result = toys.run(tmp_path / "cut", toys.settings(**OPTIONS), judge=judge, **DATA)
    assert result.update == 20
    lines = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    assert [event["update"] for event in lines if event["event"] == "validation"] == [10, 20]
    one, two = (load_tensors(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_update_without_any_target_changes_nothing_but_momentum() -> None:
    """A small BERT batch may have no masked token."""
    torch.manual_seed(1)
    model = nn.Linear(3, 3)

    def criterion(forward: Any, model: Any, batch: Any, *, smoothing: float, carry: Any = ()) -> Any:
        loss = forward(torch.ones(1, 3)).sum() * 0.0
        return loss, loss.detach(), ()

    updater = Updater(model, toys.settings().training, device=toys.CPU, precision="float32", criterion=criterion)
    batch = next(iter(toys.PairFeeder(DATA["train_on"], toys.settings().training, device=toys.CPU).batches()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    result = updater.update([batch], 1.0, 0)
    assert not result.skipped
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


if __name__ == "__main__":
    run_with_slow_validation(*map(Path, sys.argv[1:]))
