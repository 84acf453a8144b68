"""Masked language modelling: which tokens are hidden, and how (Devlin et al. 2019, 3.1 and appendix A.1).

Pure functions: what is hidden of a row of text follows from its ids and the numbers that name it (seed, epoch, place).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.text.special import MASK, PAD

RATE = 0.15
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1  # the rest is shown as it is


@dataclass(frozen=True, slots=True)
class Masked:
    """A row as the model sees it, and beside each token what it should tell there: `PAD` where nothing is asked for."""

    ids: np.ndarray
    targets: np.ndarray


def generator_of(*, seed: int, epoch: int, place: int, use: str = "masking") -> np.random.Generator:
    """The random numbers of one row in one epoch, which depend on nothing else."""
    return np.random.default_rng([seed & (2**63 - 1), epoch, place, *use.encode()])


def mask(
    ids: Sequence[int] | np.ndarray,
    draw: np.random.Generator,
    *,
    vocab_size: int,
    rate: float = RATE,
    starts: np.ndarray | None = None,
) -> Masked:
    """Hide a share of the ordinary tokens: 80 % of these behind MASK, 10 % behind another token, 10 % not at all.

    Special tokens, ids up to MASK, are never hidden nor drawn. The number hidden is the share of the row's ordinary
    tokens, its fraction decided by chance, and at least one. `starts`: for each id whether its piece begins a word;
    then whole words are hidden, as many as fit. A row without ordinary tokens stays as it is.
    """
    ids = np.asarray(ids, dtype=np.int64)
    ordinary = np.flatnonzero(ids > MASK)
    targets = np.full(len(ids), PAD, dtype=np.int64)
    if not len(ordinary):
        return Masked(ids, targets)
    wanted = max(1, int(len(ordinary) * rate + draw.random()))
    chosen = draw.permutation(ordinary)[:wanted] if starts is None else _words(ids, ordinary, starts, draw, wanted)
    targets[chosen] = ids[chosen]
    fate, other = draw.random(len(chosen)), draw.integers(MASK + 1, max(vocab_size, MASK + 2), len(chosen))
    hidden = ids.copy()
    as_mask = fate < SHOWN_AS_MASK
    as_random = ~as_mask & (fate < SHOWN_AS_MASK + SHOWN_AS_RANDOM)
    hidden[chosen[as_mask]] = MASK
    hidden[chosen[as_random]] = other[as_random]
    return Masked(hidden, targets)


def _words(
    ids: np.ndarray, ordinary: np.ndarray, starts: np.ndarray, draw: np.random.Generator, wanted: int
) -> np.ndarray:
    """The places of words drawn at random: one, and more while they fit within `wanted` tokens."""
    begins = starts[ids[ordinary]] | (np.diff(ordinary, prepend=-2) != 1)  # nothing goes on behind a special token
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
    """For each id whether its piece begins a word, told by the marks that vocabularies use; None where none does.

    U+2581 (SentencePiece) and U+0120 (byte-level BPE) stand before a word's first piece, ## (WordPiece) before others.
    """
    marks = np.array([piece.startswith(("\u2581", "\u0120")) for piece in pieces])
    if marks.any():
        return marks
    goes_on = np.array([piece.startswith("##") for piece in pieces])
    return ~goes_on if goes_on.any() else None
