"""IBM Model 1 compared with a plain implementation in dictionaries."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from transduce.data import lexicon
from transduce.data.lexicon import Lexicon, TokenPair, learn_lexicon


def oracle(pairs: list[TokenPair], n_iterations: int) -> dict[tuple[int | None, int], float]:
    known: dict[tuple[int | None, int], float] = defaultdict(lambda: 1.0)
    for _ in range(n_iterations):
        counts: dict[tuple[int | None, int], float] = defaultdict(float)
        for src, tgt in pairs:
            for t in tgt:
                total = sum(known[s, t] for s in (*src, None))
                for s in (*src, None):
                    counts[s, t] += known[s, t] / total
        totals: dict[int | None, float] = defaultdict(float)
        for (s, _), count in counts.items():
            totals[s] += count
        known = defaultdict(float, {(s, t): count / totals[s] for (s, t), count in counts.items()})
    return known


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_equal_those_of_a_plain_implementation(
    seed: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexicon, "_CHUNK", chunk)
    pick = random.Random(seed)
    pairs = [
        (pick.choices(range(9), k=pick.randrange(6)), pick.choices(range(7), k=pick.randrange(5))) for _ in range(40)
    ]
    pairs += [([], []), ([3], []), ([], [2])]
    seen: list[float] = []
    found = learn_lexicon(pairs, n_src=9, n_tgt=7, n_iterations=4, progress=seen.append)
    theirs = oracle(pairs, 4)
    ours = {
        (None if s == 9 else int(s), int(t)): p for s, t, p in zip(found.src, found.tgt, found.probability, strict=True)
    }
    assert ours.keys() == {key for key, p in theirs.items() if p > 0}
    assert all(p == pytest.approx(theirs[key], rel=1e-9) for key, p in ours.items())
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0)


def test_it_finds_which_word_translates_which() -> None:
    words, pick = range(12), random.Random(1)
    sentences = [pick.sample(words, 4) for _ in range(300)]
    pairs = [(src, [20 + word for word in reversed(src)]) for src in sentences]
    best = learn_lexicon(pairs, n_src=12, n_tgt=40).best(12, 1, fill=0)
    assert best[:, 0].tolist() == [20 + word for word in words]


def test_the_best_tokens_of_each_source_token() -> None:
    columns = [(0, 5, 0.2), (0, 6, 0.7), (0, 7, 0.1), (2, 5, 0.5), (2, 9, 0.5), (3, 8, 1.0)]
    src, tgt, probability = (np.array(column) for column in zip(*columns, strict=True))
    found = Lexicon(src, tgt, probability).best(3, 2, fill=4)
    assert found.tolist() == [[6, 5], [4, 4], [5, 9]], "ties go to the lower id, and 3 is the empty source token"
    assert found.dtype == np.int32


def test_no_pairs_give_no_lexicon() -> None:
    found = learn_lexicon([], n_src=3, n_tgt=3)
    assert found.best(3, 2, fill=1).tolist() == [[1, 1]] * 3
