"""Segmentations drawn at random from a SentencePiece model, for subword regularisation."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import sentencepiece

_SMOOTHING = 0.2  # alpha of sampling from all segmentations of a sentence (Kudo 2018, section 3.2)
_SAMPLING = threading.Lock()  # the library has one random state for all


def kind_of(sp: Any) -> str:
    """unigram, bpe or char, told by what the model can do: the library does not say."""
    try:
        sp.nbest_encode("a", nbest_size=2)
        return "unigram"
    except RuntimeError:
        pass
    try:
        _draw(sp, ["a"], 0.1, 0, int)
        return "bpe"
    except RuntimeError:
        return "char"


def resegmented(
    sp: Any, texts: Sequence[str], *, kind: str, amount: float, seed: int, out_type: type = int
) -> dict[int, list[Any]]:
    """Random segmentations of some of the texts, by place: a function of the arguments alone.

    `amount` is, for a unigram model, the share of texts that are segmented at random (Kudo 2018), for BPE the share of
    merges dropped in every text (Provilkov et al. 2020). Characters have one segmentation only.
    """
    if amount <= 0 or kind == "char" or not texts:
        return {}
    share, alpha = (amount, _SMOOTHING) if kind == "unigram" else (1.0, amount)
    draw = random.Random(seed)
    chosen = [i for i in range(len(texts)) if draw.random() < share]
    found = _draw(sp, [texts[i] for i in chosen], alpha, draw.getrandbits(31), out_type)
    return dict(zip(chosen, found, strict=True))


def _draw(sp: Any, texts: list[str], alpha: float, seed: int, out_type: type) -> list[list[Any]]:
    with _SAMPLING:  # one thread: with more, which of them draws for which text is not determined
        sentencepiece.set_random_generator_seed(seed)
        return sp.encode(texts, out_type=out_type, enable_sampling=True, nbest_size=-1, alpha=alpha, num_threads=1)
