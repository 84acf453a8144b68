"""Translation probabilities of words: IBM Model 1 over token ids, in NumPy.

Model 1 (Brown et al. 1993, section 4.1) takes every target token to be the translation of one source token of its
sentence, or of an empty one, all equally likely in advance. Expectation maximisation finds the probability of each
target token given each source token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TokenPair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a sentence and of its translation."""

_CHUNK = 1 << 20  # links: a target token and a source token of one sentence pair


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Pairs of tokens that occur in one sentence pair, by source then target, with P(target | source)."""

    src: np.ndarray
    tgt: np.ndarray
    probability: np.ndarray

    def best(self, n_src: int, n: int, *, fill: int) -> np.ndarray:
        """The n most probable target tokens of each source token, best first, [n_src, n]; `fill` where there are fewer.

        Ties go to the lower id.
        """
        order = np.lexsort((-self.probability, self.src))
        src, tgt = self.src[order], self.tgt[order]
        rank = np.arange(len(src)) - np.searchsorted(src, src)
        near = (rank < n) & (src < n_src)
        table = np.full((n_src, n), fill, np.int32)
        table[src[near], rank[near]] = tgt[near]
        return table


class _Chunk:
    """Links of some sentence pairs: the target tokens concatenated, each with all its possible sources."""

    def __init__(self, pairs: Sequence[TokenPair], n_src: int, n_tgt: int) -> None:
        empty = n_src  # the empty source token
        keys, n_sources = [], []
        for src, tgt in pairs:
            sources = np.array([*src, empty], np.int64)
            keys.append((sources * n_tgt + np.array(tgt, np.int64)[:, None]).ravel())
            n_sources.append(np.full(len(tgt), len(sources)))
        self.distinct, self.links = np.unique(np.concatenate(keys), return_inverse=True)
        self.n_sources = np.concatenate(n_sources)
        self.starts = np.concatenate([[0], self.n_sources.cumsum()[:-1]])

    def renumber(self, distinct: np.ndarray) -> None:
        """Number the pairs of tokens by their place in all distinct ones."""
        self.links = np.searchsorted(distinct, self.distinct)[self.links].astype(np.int32)
        self.distinct = distinct[:0]

    def expected(self, probability: np.ndarray) -> np.ndarray:
        """The number of links of each pair of tokens."""
        found = probability[self.links]
        found /= np.repeat(np.add.reduceat(found, self.starts), self.n_sources)
        return np.bincount(self.links, found, minlength=len(probability))


def n_links(pair: TokenPair) -> int:
    """Number of token pairs in a sentence pair: time and memory are in proportion to their sum."""
    return (len(pair[0]) + 1) * len(pair[1])


def learn_lexicon(
    pairs: Sequence[TokenPair],
    *,
    n_src: int,
    n_tgt: int,
    n_iterations: int = 5,
    progress: Callable[[float], object] = lambda fraction: None,
) -> Lexicon:
    """Train Model 1 from uniform probabilities.

    Memory: 4 bytes per link and 24 per distinct pair of tokens. The empty source token has the number `n_src`.
    """
    pairs = [pair for pair in pairs if len(pair[1])]
    total, chunks = n_iterations + 1, []
    for done, part in _chunks(pairs):
        chunks.append(_Chunk(part, n_src, n_tgt))
        progress(done / len(pairs) / total)
    distinct = np.unique(np.concatenate([np.empty(0, np.int64), *(chunk.distinct for chunk in chunks)]))
    for chunk in chunks:
        chunk.renumber(distinct)
    src, tgt = (column.astype(np.int32) for column in np.divmod(distinct, n_tgt))
    probability = np.ones(len(distinct))
    for i in range(n_iterations):
        expected = np.zeros(len(distinct))
        for number, chunk in enumerate(chunks, 1):
            expected += chunk.expected(probability)
            progress((i + 1 + number / len(chunks)) / total)
        probability = expected / np.bincount(src, expected, minlength=n_src + 1)[src]
    return Lexicon(src, tgt, probability)


def _chunks(pairs: Sequence[TokenPair]) -> Iterator[tuple[int, list[TokenPair]]]:
    """Sentence pairs of about `_CHUNK` links, with the number of those up to their end."""
    part: list[TokenPair] = []
    size = 0
    for done, pair in enumerate(pairs, 1):
        part.append(pair)
        size += n_links(pair)
        if size >= _CHUNK or done == len(pairs):
            yield done, part
            part, size = [], 0
