from __future__ import annotations

import json
import math

import pytest
import torch

from transduce.training.feed import Position
from transduce.training.loss_spikes import BadLoss
from transduce.training.meter import Meter, Row


def add(meter: Meter, update: int, *, loss: float = 6.0, n_targets: int = 3, norm: float = 1.0) -> None:
    row = Row(update, lr=0.1 * update, n_targets=n_targets, n_tokens=8, n_slots=10)
    meter.add(row, (torch.tensor(loss), torch.tensor(loss / 2), norm), Position(2, update + 100))


def test_a_line_divides_sums_by_all_targets() -> None:
    meter = Meter()
    add(meter, 1, loss=6.0, n_targets=2, norm=1.0)
    add(meter, 2, loss=3.0, n_targets=4, norm=3.0)
    meter.settle()
    line = meter.line()
    assert line.pop("padding") == pytest.approx(0.2)
    assert line == {"update": 2, "loss": 1.5, "nll": 0.75, "lr": 0.2, "grad_norm": 2.0, "n_targets": 6}
    assert meter.rows == []


def test_saved_rows_give_the_same_line() -> None:
    one, other = Meter(), Meter()
    for update in (1, 2, 3):
        add(one, update, loss=1 / 3 + update)
    one.settle()
    other.load(json.loads(json.dumps(one.state())))
    for meter in (one, other):
        add(meter, 4)
        meter.settle()
    assert one.line() == other.line()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["loss", "norm"])
def test_the_first_bad_update_is_reported_with_its_position(bad: float, what: str) -> None:
    meter = Meter()
    add(meter, 1)
    add(meter, 2, **{what: bad})
    add(meter, 3, loss=math.nan)
    with pytest.raises(BadLoss, match="not finite") as caught:
        meter.settle()
    (suspect,) = caught.value.suspects
    assert (suspect.update, suspect.position) == (2, Position(2, 102))
