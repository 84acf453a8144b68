"""Random segmentation of text with a SentencePiece model, for subword regularization.

SentencePiece's own sampling cannot be used: its generator has a different seed in every process, but a resumed run must
see the same pieces. Pieces do not cross spaces, so a text is sampled word by word, and the lattice of a word is cached.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from transduce.text.languages import ENTITY
from transduce.text.special import SPACE

_SMOOTHING = 0.2  # alpha of sampling from all segmentations of a sentence (Kudo 2018, section 3.2)
_WORDS = 1 << 16  # words in the cache

Scores = dict[str, float]
Lattice = list[tuple[list[float], list[int]]]
"""For each end position in a word: the cumulative weights, and the start positions, of the pieces that end there."""


def resegmented(sp: Any, texts: Sequence[str], *, kind: str, amount: float, seed: int) -> dict[int, list[str]]:
    """Segment some of the texts at random. Returns their pieces, by the index of the text.

    The result depends only on the arguments, in every process. `amount`: for a unigram model, the fraction of texts to
    resegment; a segmentation is drawn in proportion to its probability to the power of 0.2 (Kudo 2018). For BPE, the
    fraction of merges to drop in every text (Provilkov et al. 2020). Other models have only one segmentation. A text
    with unknown characters keeps its usual segmentation.
    """
    if amount <= 0 or kind not in ("unigram", "bpe") or not texts:
        return {}
    draw = random.Random(seed)
    chosen = [i for i in range(len(texts)) if draw.random() < (amount if kind == "unigram" else 1.0)]
    scores, words_of, entities = _scores(sp), _splitter(sp), _entities(sp)
    word = _unigram_word(sp) if kind == "unigram" else lambda text, draw: _bpe_word(scores, text, amount, draw)
    segmented: dict[int, list[str]] = {}
    for i, pieces in zip(chosen, sp.encode([texts[i] for i in chosen], out_type=str, num_threads=1), strict=True):
        known = all(piece in scores for piece in pieces)
        if known:
            words = words_of("".join(pieces))
            pieces = [p for part in words for p in ([part] if part in entities else word(part, draw))]
        segmented[i] = pieces
    return segmented


@lru_cache(maxsize=8)
def _scores(sp: Any) -> Scores:
    """The log-probability (unigram) or merge rank (BPE) of each ordinary piece."""
    left_out = (sp.is_control, sp.is_unknown, sp.is_unused, sp.is_byte)
    ids = [i for i in range(sp.get_piece_size()) if not any(is_kind(i) for is_kind in left_out)]
    return {sp.id_to_piece(i): sp.get_score(i) for i in ids}


@lru_cache(maxsize=8)
def _entities(sp: Any) -> frozenset[str]:
    """HTML entities, such as &apos;, that are one piece each in every segmentation."""
    return frozenset(piece for piece in _scores(sp) if ENTITY.fullmatch(piece))


@lru_cache(maxsize=8)
def _splitter(sp: Any) -> Callable[[str], list[str]]:
    """Return a function that splits a text into words and entities, or only at entities if pieces contain spaces."""
    entities = _entities(sp)
    parts = re.compile(f"({'|'.join(map(re.escape, sorted(entities))) or '(?!)'})").split
    if any(SPACE in piece[1:] for piece in _scores(sp)):
        return parts
    words = re.compile(f"{SPACE}[^{SPACE}]*|[^{SPACE}]+").findall
    return lambda text: [word for part in parts(text) for word in ([part] if part in entities else words(part))]


@lru_cache(maxsize=8)
def _unigram_word(sp: Any) -> Callable[[str, random.Random], list[str]]:
    """Return a function that draws a segmentation of a word (forward filtering, backward sampling)."""
    scores = _scores(sp)
    longest = max(map(len, scores), default=1)

    @lru_cache(maxsize=_WORDS)
    def lattice(word: str) -> Lattice:
        forward, ends = [0.0], []
        for end in range(1, len(word) + 1):
            begins = [b for b in range(max(0, end - longest), end) if word[b:end] in scores and forward[b] > -math.inf]
            logs = [forward[b] + _SMOOTHING * scores[word[b:end]] for b in begins]
            top = max(logs, default=-math.inf)
            weights = [math.exp(value - top) for value in logs]
            forward.append(top + math.log(sum(weights)) if weights else -math.inf)
            ends.append((list(itertools.accumulate(weights)), begins))
        return ends

    def drawn(word: str, draw: random.Random) -> list[str]:
        ends, pieces, end = lattice(word), [], len(word)
        while end:
            sums, begins = ends[end - 1]
            begin = begins[min(bisect(sums, draw.random() * sums[-1]), len(begins) - 1)]
            pieces.append(word[begin:end])
            end = begin
        return pieces[::-1]

    return drawn


def _bpe_word(scores: Scores, word: str, amount: float, draw: random.Random) -> list[str]:
    """Segment a word by merges in the order of their ranks. Each merge is dropped with probability `amount`."""
    parts: list[str] = list(word)
    after, before = [*range(1, len(word)), -1], [-1, *range(len(word) - 1)]
    waiting: list[tuple[float, int, str]] = []
    offered = list(range(len(word) - 1))
    while True:
        for left in offered:
            if left >= 0 and after[left] >= 0 and (merged := parts[left] + parts[after[left]]) in scores:
                heapq.heappush(waiting, (-scores[merged], left, merged))
        if not waiting:
            return [part for part in parts if part]
        _, left, merged = heapq.heappop(waiting)
        right, offered = after[left], []
        if not parts[left] or right < 0 or parts[left] + parts[right] != merged:
            continue  # one of its sides was already merged with another piece
        if draw.random() >= amount:
            parts[left], parts[right], after[left] = merged, "", after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offered = [before[left], left]
