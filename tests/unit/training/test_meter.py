from __future__ import annotations

import pytest

from transduce.training.meter import Row, summarize


def row(update: int, *, loss: float = 6.0, n_targets: int = 3, norm: float = 1.0) -> Row:
    sums = {"loss_sum": loss, "nll_sum": loss / 2, "grad_norm": norm}
    return Row(update, lr=0.1 * update, n_targets=n_targets, n_tokens=8, n_slots=10, **sums)


def test_a_line_divides_sums_by_all_targets() -> None:
    line = summarize([row(1, loss=6.0, n_targets=2, norm=1.0), row(2, loss=3.0, n_targets=4, norm=3.0)])
    assert line.pop("padding") == pytest.approx(0.2)
    assert line == {"update": 2, "loss": 1.5, "nll": 0.75, "lr": 0.2, "grad_norm": 2.0, "n_targets": 6}
