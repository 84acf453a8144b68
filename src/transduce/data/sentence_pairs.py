"""Pairs of text segments for next-sentence prediction (Devlin et al. 2019, 3.1, A.2).

Pure functions of the sentence lengths and of (seed, epoch). The text itself is looked up when a batch is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.data.batching import generator
from transduce.text.special import BOS, EOS

FOLLOWS, RANDOM = 0, 1
"""The labels of a pair; the numbers are BERT's."""

_SHORT = 0.1  # pairs that are wanted shorter than the longest, so that lengths vary


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Segment A is sentences a[0] .. a[1] of all, segment B b[0] .. b[1], or none; `label` is FOLLOWS or RANDOM.

    `place` is the number of the pair in its epoch, with which its random choices are seeded.
    """

    a: tuple[int, int]
    b: tuple[int, int]
    label: int
    place: int


@dataclass(frozen=True, slots=True)
class Packed:
    """[CLS] A [SEP] B [SEP], and the segment of each token: 0 up to the first [SEP], 1 after it; or vectors, [S, N]."""

    ids: np.ndarray
    segments: np.ndarray


def pack(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray | None = None) -> Packed:
    """One text or two, framed; or one sequence of vectors or two, without a frame.

    >>> pack([7, 8], [9]).ids.tolist(), pack([7, 8], [9]).segments.tolist()
    ([2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1])
    """
    if isinstance(a, np.ndarray) and a.ndim == 2:
        segments = np.repeat([0, 1], [len(a), 0 if b is None else len(b)])
        return Packed(a if b is None else np.concatenate([a, b]), segments)
    parts = [[BOS], a, [EOS]] + ([] if b is None else [b, [EOS]])
    ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    segments = np.zeros(len(ids), dtype=np.int64)
    segments[len(a) + 2 :] = 1
    return Packed(ids, segments)


def fit(n_a: int, n_b: int, room: int, draw: np.random.Generator) -> tuple[slice, slice]:
    """The parts of two segments to keep so that both fit into `room` tokens.

    The longer one loses a token at a time, at random from its front or its end.
    """
    cuts = [[0, n_a], [0, n_b]]
    while (n_a := cuts[0][1] - cuts[0][0]) + (n_b := cuts[1][1] - cuts[1][0]) > room:
        longer = cuts[0] if n_a > n_b else cuts[1]
        if draw.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return slice(*cuts[0]), slice(*cuts[1])


def plan_pairs(lengths: np.ndarray, document_starts: np.ndarray, *, room: int, seed: int, epoch: int) -> list[PairPlan]:
    """The pairs of one epoch over consecutive documents, in the order of the text.

    lengths: tokens of each sentence. document_starts: the number of each document's first sentence, and at the end
    that of all sentences. room: tokens of both segments together. Sentences are gathered until they fill the room; A is
    a random number of them from the front; B is the rest or, in half of the pairs, text of another document, and then
    the rest goes into the next pair. A single sentence at a document's end gets its B from elsewhere. There must be two
    documents at least: of one alone, every B would follow.
    """
    assert len(document_starts) > 2, "there is no other document"
    draw = generator(seed, epoch, use="sentence pairs")
    plans: list[PairPlan] = []
    n_documents = len(document_starts) - 1
    for number in range(n_documents):
        first, end = int(document_starts[number]), int(document_starts[number + 1])
        while first < end:
            target = room if draw.random() >= _SHORT else int(draw.integers(2, room + 1))
            last = _filled(lengths, first, end, target)
            cut = first + (int(draw.integers(1, last - first)) if last - first > 1 else 1)
            if last - first == 1 or draw.random() < 0.5:
                b = _elsewhere(lengths, document_starts, number, target - int(lengths[first:cut].sum()), draw)
                plans.append(PairPlan((first, cut), b, RANDOM, len(plans)))
                first = cut
                continue
            plans.append(PairPlan((first, cut), (cut, last), FOLLOWS, len(plans)))
            first = last
    return plans


def plan_runs(lengths: np.ndarray, document_starts: np.ndarray, *, room: int, seed: int, epoch: int) -> list[PairPlan]:
    """The single segments of one epoch: runs of whole sentences of one document that fit the room; each sentence once.

    Where the first run of a document ends is drawn anew in each epoch. A sentence alone may be longer than the room.
    """
    draw = generator(seed, epoch, use="sentence runs")
    plans: list[PairPlan] = []
    for first, end in zip(document_starts[:-1].tolist(), document_starts[1:].tolist(), strict=True):
        target = int(draw.integers(1, room + 1)) if int(lengths[first:end].sum()) > room else room
        while first < end:
            last = _filled(lengths, first, end, target)
            if last - first > 1 and int(lengths[first:last].sum()) > target:
                last -= 1
            plans.append(PairPlan((first, last), (last, last), FOLLOWS, len(plans)))
            first, target = last, room
    return plans


def _filled(lengths: np.ndarray, first: int, end: int, target: int) -> int:
    """The end of as many sentences from `first` on as reach the target."""
    total = 0
    for i in range(first, end):
        total += int(lengths[i])
        if total >= target:
            return i + 1
    return end


def _elsewhere(
    lengths: np.ndarray, document_starts: np.ndarray, own: int, target: int, draw: np.random.Generator
) -> tuple[int, int]:
    """Sentences of another document, from a random one on."""
    other = int(draw.integers(len(document_starts) - 2))
    other += other >= own
    first, end = int(document_starts[other]), int(document_starts[other + 1])
    begin = int(draw.integers(first, end))
    return begin, _filled(lengths, begin, end, max(1, target))
