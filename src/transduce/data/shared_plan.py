"""The plan of an epoch on disk, where several processes train together: made once, and mapped by all of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from transduce.data.store import Store, StoreWriter
from transduce.errors import RunFolderError
from transduce.runs.atomic import remove_leftovers


@dataclass(frozen=True, eq=False)
class PlanStore(Store):
    """indices [n], ends [batches]: the batches of an epoch in training order."""

    indices: np.ndarray
    ends: np.ndarray
    facts: Mapping[str, Any]

    def batches(self) -> list[np.ndarray]:
        """The batches, as parts of the mapped array."""
        return np.split(self.indices, self.ends[:-1])


def shared_plan(folder: Path, epoch: int, make: Callable[[int], list[np.ndarray]]) -> list[np.ndarray]:
    """The plan of an epoch, which the first of several processes makes and all map, so that a machine has it once.

    `make` gives the same plan whenever it is called. The plans of the last two epochs stay in `folder`, because ranks
    read some updates ahead.
    """
    path = folder / f"epoch{epoch}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        remove_leftovers(folder)  # of a process that was killed here
        with contextlib.suppress(RunFolderError):  # missing or damaged: it is made again
            return PlanStore.open(path).batches()
        batches = make(epoch)
        if not batches:
            return []
        for old in folder.glob("epoch*"):
            if old.name not in (f"epoch{epoch - 1}", f"epoch{epoch - 2}"):
                shutil.rmtree(old, ignore_errors=True)

        def fill(writer: StoreWriter) -> None:
            for batch in batches:
                writer.append("indices", batch)
            writer.append("ends", np.cumsum([len(batch) for batch in batches]))

        return PlanStore.create(path, {"indices": batches[0].dtype, "ends": np.int64}, fill).batches()
