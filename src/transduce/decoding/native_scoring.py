"""Log-probabilities of given outputs, and attention weights, from the C++ library."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from transduce.data.examples import Example, Ids, RowExample
from transduce.decoding.native_model import NativeModel
from transduce.native.library import address, packed
from transduce.text.special import BOS, EOS, PAD

Head = tuple[int, int]
"""A decoder layer and a head of its cross-attention, both from 0."""

_SHARE = 4096  # tokens that a thread scores before it takes more


class _Pairs(ctypes.Structure):
    """`transduce_pairs` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sources", "source_offsets", "inputs", "tokens", "offsets")),
        ("n", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class _Item:
    """The inputs of the model, and the token after each of them whose log-probability is wanted (-1: none)."""

    source: Ids
    inputs: Ids
    tokens: Ids

    @property
    def size(self) -> int:
        return len(self.source) + len(self.inputs)


class NativeScorer:
    """Scores with a native model. Safe to call from several threads."""

    def __init__(self, native: NativeModel, *, n_threads: int) -> None:
        self._native, self._n_threads = native, n_threads

    def score(self, pairs: Sequence[Example]) -> list[list[float]]:
        """See `Engine.score`."""
        return [found.tolist() for found, _ in self._map([_pair(pair) for pair in pairs], ())]

    def score_rows(self, rows: Sequence[RowExample], *, separate: bool) -> list[list[float]]:
        """See `Engine.score_rows`."""
        items, owners = list[_Item](), list[int]()
        for number, row in enumerate(rows):
            ids = np.asarray(row.ids)
            tokens = np.where(np.equal(row.targets, PAD), -1, row.targets)
            # A document sees nothing of the others, and its positions count from its own beginning.
            starts = {0, *np.flatnonzero(ids == BOS).tolist(), len(ids)} if separate else {0, len(ids)}
            ids = np.where(ids == BOS, self._native.start, ids)
            places = sorted(starts)
            for start, stop in itertools.pairwise(places):
                items.append(_Item((), ids[start:stop].tolist(), tokens[start:stop].tolist()))
                owners.append(number)
        found: list[list[float]] = [[] for _ in rows]
        for number, (log_probs, _) in zip(owners, self._map(items, ()), strict=True):
            found[number] += log_probs.tolist()
        return found

    def attention(self, pairs: Sequence[Example], heads: Sequence[Head]) -> list[np.ndarray]:
        """Weights of cross-attention of each pair: [heads, targets, sources], with the ends of both sides.

        Row t has the weights with which target token t is predicted.
        """
        return [weights for _, weights in self._map([_pair(pair) for pair in pairs], heads)]

    def _map(self, items: Sequence[_Item], heads: Sequence[Head]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Log-probabilities and weights of each item, in order."""
        shares: list[list[int]] = [[]]
        room = _SHARE
        for place in sorted(range(len(items)), key=lambda i: -items[i].size):
            if room < items[place].size and shares[-1]:
                shares.append([])
                room = _SHARE
            shares[-1].append(place)
            room -= items[place].size
        found: list[Any] = [None] * len(items)

        def work(share: list[int]) -> None:
            for place, one in zip(share, self._score([items[i] for i in share], heads), strict=True):
                found[place] = one

        if (n := min(self._n_threads, len(shares))) == 1:
            for share in shares:
                work(share)
            return found
        with ThreadPoolExecutor(n, thread_name_prefix="score") as pool:
            list(pool.map(work, shares))
        return found

    def _score(self, items: Sequence[_Item], heads: Sequence[Head]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same in this thread."""
        sources, source_offsets = packed([item.source for item in items])
        inputs, offsets = packed([item.inputs for item in items])
        tokens, _ = packed([item.tokens for item in items])
        sizes = [len(heads) * len(item.inputs) * len(item.source) for item in items]
        log_probs, weights = np.zeros(len(inputs), np.float32), np.empty(sum(sizes), np.float32)
        given = np.array(heads, np.int32)
        pairs = _Pairs(n=len(items))
        if len(sources):
            pairs.sources, pairs.source_offsets = address(sources), address(source_offsets)
        pairs.inputs, pairs.tokens, pairs.offsets = map(address, (inputs, tokens, offsets))
        self._native.library.transduce_score(
            self._native.handle,
            ctypes.byref(pairs),
            log_probs.ctypes.data,
            given.ctypes.data if heads else None,
            len(heads),
            weights.ctypes.data if heads else None,
        )
        stops = np.cumsum(sizes)
        return [
            (
                log_probs[offsets[i] : offsets[i + 1]],
                weights[stop - size : stop].reshape(len(heads), len(item.inputs), len(item.source)),
            )
            for i, (item, size, stop) in enumerate(zip(items, sizes, stops, strict=True))
        ]


def _pair(pair: Example) -> _Item:
    return _Item((*pair.src, EOS), (BOS, *pair.tgt), (*pair.tgt, EOS))
