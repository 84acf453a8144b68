"""Pairs of segments: which ones follow each other, how often, how they are framed and truncated."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.batching import FOLLOWS, RANDOM, PairPlan, fit, plan_pairs
from transduce.data.store import pack
from transduce.text.special import BOS, EOS

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=2, max_size=8)


def planned(documents: list[list[int]], *, room: int = 20, seed: int = 1, epoch: int = 0) -> list[PairPlan]:
    starts = np.cumsum([0, *map(len, documents)])
    return plan_pairs(np.array([n for d in documents for n in d]), starts, room=room, seed=seed, epoch=epoch)


@given(DOCUMENTS, st.integers(2, 64), st.integers(0, 9))
def test_invariants_of_pair_plans(documents: list[list[int]], room: int, epoch: int) -> None:
    plans = planned(documents, room=room, epoch=epoch)
    assert plans == planned(documents, room=room, epoch=epoch)
    owner = [number for number, d in enumerate(documents) for _ in d]
    assert [plan.number for plan in plans] == list(range(len(plans)))
    last = 0
    for plan in plans:
        (a, a_end), (b, b_end) = plan.a, plan.b
        assert a < a_end and b < b_end
        assert len({owner[i] for i in range(a, a_end)}) == 1 and len({owner[i] for i in range(b, b_end)}) == 1
        assert (owner[a] == owner[b]) == (plan.label == FOLLOWS)
        if plan.label == FOLLOWS:
            assert b == a_end
        assert a >= last  # no sentence begins two pairs
        last = a + 1
    covered = {i for p in plans for i in (*range(*p.a), *(range(*p.b) if p.label == FOLLOWS else ()))}
    assert covered == set(range(len(owner)))  # every sentence is in a pair, as A or as B that follows it


def test_half_of_the_pairs_follow_and_epochs_differ() -> None:
    documents = [[10] * 40 for _ in range(100)]
    plans = [plan for epoch in range(4) for plan in planned(documents, room=60, epoch=epoch)]
    n = len(plans)
    follows = sum(plan.label == FOLLOWS for plan in plans)
    assert abs(follows - n / 2) < 5 * math.sqrt(n / 4)
    assert planned(documents, epoch=0) != planned(documents, epoch=1)
    assert planned(documents, seed=1) != planned(documents, seed=2)
    others = np.bincount([plan.b[0] // 40 for plan in plans if plan.label == RANDOM], minlength=100)
    assert others.min() > 0  # any document may be the other


def test_pack_adds_special_tokens_and_segments() -> None:
    assert pack([7]).ids.tolist() == [BOS, 7, EOS] and pack([7]).segments.tolist() == [0, 0, 0]
    two = pack(np.array([7, 8]), np.array([9]))
    assert two.ids.tolist() == [BOS, 7, 8, EOS, 9, EOS] and two.segments.tolist() == [0, 0, 0, 0, 1, 1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 50), st.integers(0, 99))
def test_the_longer_segment_is_cut_first(n_a: int, n_b: int, room: int, seed: int) -> None:
    a, b = fit(n_a, n_b, room, np.random.default_rng(seed))
    left_a, left_b = a.stop - a.start, b.stop - b.start
    assert a.start >= 0 and a.stop <= n_a and b.start >= 0 and b.stop <= n_b
    assert left_a + left_b == min(n_a + n_b, room)
    assert left_a >= 1 and left_b >= 1
    if left_a < n_a and left_b < n_b:
        assert abs(left_a - left_b) <= 1
