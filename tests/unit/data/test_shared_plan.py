from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transduce.data.shared_plan import shared_plan


def plan_of(epoch: int) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.int32) + epoch for n in (3, 1, 2)]


@pytest.mark.parametrize("damage", ["missing", "cut", "none"])
def test_a_damaged_plan_is_made_again(tmp_path: Path, damage: str) -> None:
    made: list[int] = []

    def make(epoch: int) -> list[np.ndarray]:
        made.append(epoch)
        return plan_of(epoch)

    for _ in range(2):
        plan = shared_plan(tmp_path, 7, make, n_ranks=2)
        assert [batch.tolist() for batch in plan] == [batch.tolist() for batch in plan_of(7)]
    file = tmp_path / "epoch7-2" / "indices.npy"
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    plan = shared_plan(tmp_path, 7, make, n_ranks=2)
    assert [batch.tolist() for batch in plan] == [batch.tolist() for batch in plan_of(7)]
    assert made == [7] * (1 if damage == "none" else 2)


def test_an_empty_plan_is_not_written(tmp_path: Path) -> None:
    assert shared_plan(tmp_path, 1, lambda epoch: [], n_ranks=2) == []
    assert not [*tmp_path.glob("epoch*")]
