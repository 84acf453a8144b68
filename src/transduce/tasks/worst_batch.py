"""The largest batch that a plan can make: what tasks share to make rows as long as the settings allow."""

from __future__ import annotations

import numpy as np

from transduce.config import Settings


def n_rows_of(length: int, settings: Settings) -> int:
    """Rows of this length that are more than a batch."""
    training = settings.training
    return 2 + (training.micro_batch_tokens or training.batch_tokens or 1) // length * 2


def tiled(ids: np.ndarray, length: int) -> np.ndarray:
    """The first ids, over and over.

    >>> tiled(np.array([7, 8, 9]), 5).tolist()
    [7, 8, 9, 7, 8]
    """
    return np.resize(np.asarray(ids[: max(1, min(len(ids), length))]), length)
