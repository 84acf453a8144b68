"""The plan of an epoch on disk, where several processes train together: made once, and mapped by all of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from filelock import FileLock

from transduce.runs.atomic import remove_leftovers, write_aside


def shared_plan(folder: Path, epoch: int, make: Callable[[int], list[np.ndarray]], *, n_ranks: int) -> list[np.ndarray]:
    """The plan of an epoch, which the first of several processes makes and all map, so that a machine has it once.

    `make` gives the same plan whenever it is called for `n_ranks` ranks. The plans of the last two epochs stay in
    `folder`, because ranks read some updates ahead.
    """
    path = folder / f"epoch{epoch}-{n_ranks}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        remove_leftovers(folder)  # of a process that was killed here
        with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged: it is made again
            return _mapped(path)
        if not (batches := make(epoch)):
            return []
        for old in folder.glob("epoch*"):
            if old.name not in (f"epoch{epoch - 1}-{n_ranks}", f"epoch{epoch - 2}-{n_ranks}"):
                shutil.rmtree(old, ignore_errors=True)
        with write_aside(path) as aside:
            aside.mkdir()
            ends = np.cumsum([len(batch) for batch in batches])
            np.save(aside / "ends.npy", ends)
            shape, dtype = (int(ends[-1]),), batches[0].dtype
            np.concatenate(batches, out=np.lib.format.open_memmap(aside / "indices.npy", "w+", dtype, shape))
        return _mapped(path)


def _mapped(path: Path) -> list[np.ndarray]:
    indices, ends = (np.asarray(np.load(path / f"{name}.npy", mmap_mode="r")) for name in ("indices", "ends"))
    return np.split(indices, ends[:-1])
