"""Cut running text into rows of equal length (packing). Pure functions of (size, context, seed, epoch).

The rows of an epoch do not overlap and contain every target once. The first cut is drawn again in each epoch, so that
tokens change their position in the row, and the rows are shuffled.
"""

from __future__ import annotations

import numpy as np


def offset_of(context: int, *, seed: int, epoch: int) -> int:
    """Tokens of the first row of an epoch, which is shorter than the others; 0: it is as long as they are."""
    return int(_generator(seed, epoch, "offset").integers(context))


def row_starts(n_tokens: int, *, context: int, offset: int) -> np.ndarray:
    """Where the targets of rows begin in `n_tokens` ids, all but the first asked for; the first row has `offset`."""
    starts = np.arange(1 + offset, n_tokens, context)
    return np.concatenate(([1], starts)) if offset and n_tokens > 1 else starts


def row_end(start: int, n_tokens: int, *, context: int, offset: int) -> int:
    """Where the row that begins at `start` ends."""
    return min(n_tokens, start + context - (start - 1 - offset) % context)


def plan_rows(n_tokens: int, *, context: int, n_rows: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch: arrays of at most `n_rows` row starts, of equal number but for one."""
    offset = offset_of(context, seed=seed, epoch=epoch)
    starts = row_starts(n_tokens, context=context, offset=offset)
    if not len(starts):
        return []
    shuffled = _generator(seed, epoch, "rows").permutation(starts)
    return np.array_split(shuffled, -(-len(starts) // max(1, n_rows)))


def plan_streams(n_tokens: int, *, context: int, n_streams: int) -> list[np.ndarray]:
    """Batches of contiguous streams: row r of batch j starts at token `context * j` of part r of the text.

    All parts are of equal length; fewer than `n_streams` tokens at the end of the text are left out.
    """
    length = (n_tokens - 1) // n_streams
    return [1 + offset + length * np.arange(n_streams) for offset in range(0, length, context)]


def _generator(seed: int, number: int, use: str) -> np.random.Generator:
    """An independent random generator for each use."""
    return np.random.default_rng([seed & (2**63 - 1), number, *use.encode()])
