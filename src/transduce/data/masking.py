"""Mask tokens for masked language modelling (Devlin et al. 2019, 3.1 and appendix A.1).

Pure functions of the ids of a row and of (seed, epoch, place).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transduce.data.examples import Ids, RowExample
from transduce.text.special import MASK, PAD

RATE = 0.15
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1  # the rest is unchanged


def mask(
    ids: Ids,
    draw: np.random.Generator,
    *,
    vocab_size: int,
    rate: float = RATE,
    starts: np.ndarray | None = None,
) -> RowExample:
    """Select a fraction of the tokens to predict; 80 % of them become MASK, 10 % a random token, 10 % are unchanged.

    Special tokens (ids up to MASK) are neither selected nor drawn. The number of selected tokens is `rate` times that
    of ordinary tokens, rounded at random, and at least one. `starts`: for each id whether its piece begins a word; then
    whole words are selected, as many as fit. A row without ordinary tokens is unchanged.
    """
    ids = np.asarray(ids, dtype=np.int64)
    ordinary = np.flatnonzero(ids > MASK)
    targets = np.full(len(ids), PAD, dtype=np.int64)
    if not len(ordinary):
        return RowExample(ids, targets)
    wanted = max(1, int(len(ordinary) * rate + draw.random()))
    chosen = draw.permutation(ordinary)[:wanted] if starts is None else _words(ids, ordinary, starts, draw, wanted)
    targets[chosen] = ids[chosen]
    fate, other = draw.random(len(chosen)), draw.integers(MASK + 1, max(vocab_size, MASK + 2), len(chosen))
    hidden = ids.copy()
    as_mask = fate < SHOWN_AS_MASK
    as_random = ~as_mask & (fate < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
    hidden[chosen[as_mask]] = MASK
    hidden[chosen[as_random]] = other[as_random]
    return RowExample(hidden, targets)


def _words(
    ids: np.ndarray, ordinary: np.ndarray, starts: np.ndarray, draw: np.random.Generator, wanted: int
) -> np.ndarray:
    """The positions of random words: one, and more while they fit into `wanted` tokens."""
    begins = starts[ids[ordinary]] | (np.diff(ordinary, prepend=-2) != 1)  # no word crosses a special token
    words = np.split(ordinary, np.flatnonzero(begins)[1:])
    chosen: list[np.ndarray] = []
    left = wanted
    for i in draw.permutation(len(words)):
        if len(words[i]) <= left or not chosen:
            chosen.append(words[i])
            left -= len(words[i])
        if left <= 0:
            break
    return np.concatenate(chosen)


def word_starts(pieces: Sequence[str]) -> np.ndarray | None:
    """For each id whether its piece begins a word; None where the vocabulary does not mark words.

    U+2581 (SentencePiece) and U+0120 (byte-level BPE) mark the first piece of a word, ## (WordPiece) all others.
    """
    marks = np.array([piece.startswith(("\u2581", "\u0120")) for piece in pieces])
    if marks.any():
        return marks
    continues = np.array([piece.startswith("##") for piece in pieces])
    return ~continues if continues.any() else None
