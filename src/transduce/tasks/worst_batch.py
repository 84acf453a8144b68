"""Rows as long as the settings allow, to measure the memory of the largest batch."""

from __future__ import annotations

import numpy as np

from transduce.config import Settings, resolved


def n_rows_of(length: int, settings: Settings) -> int:
    """A number of rows of this length that is more than a batch."""
    training = settings.training
    budget = training.micro_batch_tokens or resolved(training.batch_tokens, "training.batch_tokens")
    return 2 + budget // length * 2


def tiled(ids: np.ndarray, length: int) -> np.ndarray:
    """The first ids, repeated to `length`.

    >>> tiled(np.array([7, 8, 9]), 5).tolist()
    [7, 8, 9, 7, 8]
    """
    return np.resize(np.asarray(ids[: max(1, min(len(ids), length))]), length)
