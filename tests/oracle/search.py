"""Slow, simple reference searches: all possible outputs, and a beam search on lists without a cache.

The model is a function `next_log_probs(src_ids, prefix) -> list of V log-probabilities`.
"""

import math
from collections.abc import Callable, Sequence

PAD, UNK, BOS, EOS = 0, 1, 2, 3
NextLogProbs = Callable[[Sequence[int], Sequence[int]], list[float]]
Found = tuple[tuple[int, ...], float, float]  # ids without the end, log-probability, score


def all_outputs(next_log_probs: NextLogProbs, src: Sequence[int], *, max_length: int, alpha: float) -> list[Found]:
    """Every output of at most max_length tokens including the end, best first."""
    found: list[Found] = []

    def extend(prefix: tuple[int, ...], log_prob: float) -> None:
        length = len(prefix) + 1
        for token, more in enumerate(next_log_probs(src, prefix)):
            if token == EOS:
                found.append((prefix, log_prob + more, (log_prob + more) / length**alpha))
            elif token not in (PAD, UNK, BOS) and length < max_length:
                extend((*prefix, token), log_prob + more)

    extend((), 0.0)
    return sorted(found, key=lambda one: -one[2])


def beam_search(
    next_log_probs: NextLogProbs,
    src: Sequence[int],
    *,
    beam: int,
    max_length: int,
    alpha: float,
    n_best: int = 1,
    patience: float = 1.0,
    forced: Sequence[int] = (),
    no_repeat_ngram: int = 0,
) -> list[tuple[tuple[int, ...], float, float, bool]]:
    """The n_best of a beam search as `transduce.decoding.search.beam_search` defines it; the last field: finished."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[Found] = []
    for length in range(1, max_length + 1):
        options = [
            (log_prob + more, (*prefix, token))
            for log_prob, prefix in live
            for token, more in enumerate(next_log_probs(src, prefix))
            if token not in (PAD, UNK, BOS) and (length > len(forced) or token == forced[length - 1])
            if length <= len(forced) or not repeats((*prefix, token), no_repeat_ngram)
        ]
        options.sort(key=lambda one: -one[0])
        ended += [(ids[:-1], value, value / length**alpha) for value, ids in options[:beam] if ids[-1] == EOS]
        live = [one for one in options if one[1][-1] != EOS][:beam]
        ended.sort(key=lambda one: -one[2])
        if not live:
            return [(*one, True) for one in ended][:n_best]
        enough = len(ended) >= beam * patience and ended[0][2] >= live[0][0] / length**alpha
        if enough:
            break
        if len(ended) >= n_best and ended[n_best - 1][2] >= live[0][0] / max_length**alpha:
            break
    found = [(*one, True) for one in ended]
    if length == max_length and not enough:
        found += [(ids, value, value / length**alpha, False) for value, ids in live]
    return found[:n_best] if math.isfinite(found[0][1]) else []


def repeats(ids: Sequence[int], n: int) -> bool:
    """Whether the last n-gram of `ids` occurs before."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] if n else []
    return bool(grams) and grams[-1] in grams[:-1]
