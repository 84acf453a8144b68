"""Masking as a function of (seed, epoch, row), and rows of an epoch."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.batch import mask, word_starts
from transduce.data.batching import generator, offset_of, plan_rows, row_end, row_starts
from transduce.text.special import MASK, PAD

VOCAB = 50
ROWS = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def draw(place: int = 0, epoch: int = 0, seed: int = 1) -> np.random.Generator:
    return generator(seed, epoch, place, use="masking")


@given(ROWS, st.integers(0, 2**40), st.floats(0.01, 0.9), st.booleans())
def test_invariants_of_masked_rows(row: list[int], place: int, rate: float, whole: bool) -> None:
    starts = np.arange(VOCAB) % 3 == 0 if whole else None
    ids = np.array(row, dtype=np.int64)
    found = mask(ids, draw(place), vocab_size=VOCAB, rate=rate, starts=starts)
    again = mask(ids, draw(place), vocab_size=VOCAB, rate=rate, starts=starts)
    assert np.array_equal(found.ids, again.ids) and np.array_equal(found.targets, again.targets)
    asked = found.targets != PAD
    assert np.array_equal(found.targets[asked], ids[asked])
    assert np.array_equal(found.ids[~asked], ids[~asked])
    assert (ids[asked] > MASK).all() and (found.ids[asked] >= MASK).all() and (found.ids < VOCAB).all()
    n_ordinary = int((ids > MASK).sum())
    if not n_ordinary:
        assert not asked.any()
    elif not whole:
        assert max(1, math.floor(n_ordinary * rate)) <= asked.sum() <= max(1, math.floor(n_ordinary * rate) + 1)
    else:
        assert asked.any()
    assert ids.tolist() == row  # the row itself is unchanged


def test_mask_random_and_unchanged_fractions_match_the_paper() -> None:
    """Counts of 200,000 tokens are within five standard deviations."""
    rows, length = 2000, 100
    ids = np.random.default_rng(0).integers(MASK + 1, 1000, (rows, length))
    counts: Counter[str] = Counter()
    places = np.zeros(length)
    for i, row in enumerate(ids):
        found = mask(row, draw(i), vocab_size=1000)
        asked = found.targets != PAD
        places += asked
        counts["asked"] += int(asked.sum())
        counts["mask"] += int((found.ids[asked] == MASK).sum())
        counts["same"] += int((found.ids[asked] == row[asked]).sum())
    n = counts["asked"]
    assert n == rows * length * 0.15
    for key, share in (("mask", 0.8), ("same", 0.1)):
        assert abs(counts[key] - n * share) < 5 * math.sqrt(n * share * (1 - share)), key
    expected = rows * 0.15
    chi_square = float(((places - expected) ** 2 / (expected * 0.85)).sum())
    assert abs(chi_square - length) < 5 * math.sqrt(2 * length)  # all positions are equally likely


def test_a_fractional_number_of_tokens_is_rounded_at_random() -> None:
    row = np.arange(10, 19)  # 9 tokens, 1.35 wanted
    n = [int((mask(row, draw(i), vocab_size=50).targets != PAD).sum()) for i in range(3000)]
    assert set(n) == {1, 2} and abs(np.mean(n) - 1.35) < 0.05


def test_random_tokens_are_drawn_from_all_ordinary_ones() -> None:
    row = np.full(100, 10)
    seen = Counter(int(t) for i in range(3000) for t in mask(row, draw(i), vocab_size=20, rate=0.5).ids if t != 10)
    assert set(seen) == set(range(MASK, 20)) - {10}
    others = [seen[t] for t in range(MASK + 1, 20) if t != 10]
    assert max(others) - min(others) < 8 * math.sqrt(np.mean(others))


def test_seed_epoch_and_place_each_change_the_masked_tokens() -> None:
    row = np.arange(10, 49)
    ways = [dict(), dict(seed=2), dict(epoch=1), dict(place=1)]
    assert len({mask(row, draw(**way), vocab_size=50).targets.tobytes() for way in ways}) == 4


def test_whole_word_masking_masks_all_pieces_of_a_word() -> None:
    starts = np.zeros(VOCAB, dtype=bool)
    starts[10:20] = True
    row = np.array([2, 10, 30, 31, 11, 12, 32, 3, 33, 13, 34, 35, 36, 3])
    words = [[1, 2, 3], [4], [5, 6], [8], [9, 10, 11, 12]]
    seen: Counter[int] = Counter()
    for i in range(400):
        found = mask(row, draw(i), vocab_size=VOCAB, rate=0.4, starts=starts)
        asked = found.targets != PAD
        for number, word in enumerate(words):
            assert asked[word].all() or not asked[word].any()
            seen[number] += int(asked[word].all())
        assert 1 <= asked.sum() <= 5
    assert min(seen.values()) > 40


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<pad>", "▁a", "b", "▁"], [False, True, False, True]),
        (["[PAD]", "a", "##b"], [True, True, False]),
        (["x", "Ġy"], [False, True]),
        (["a", "b"], None),
    ],
)
def test_word_starts(pieces: list[str], expected: list[bool] | None) -> None:
    found = word_starts(pieces)
    assert found is None if expected is None else found is not None and found.tolist() == expected


@given(
    n_tokens=st.integers(0, 200),
    context=st.integers(1, 40),
    n_rows=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 50),
)
def test_rows_are_contiguous_and_contain_every_target_once(
    n_tokens: int, context: int, n_rows: int, seed: int, epoch: int
) -> None:
    offset = offset_of(context, seed=seed, epoch=epoch)
    batches = plan_rows(n_tokens, context=context, n_rows=n_rows, seed=seed, epoch=epoch)
    spans = [
        (int(start), row_end(int(start), n_tokens, context=context, offset=offset))
        for batch in batches
        for start in batch
    ]
    assert all(0 < end - start <= context for start, end in spans)
    targets = sorted(i for start, end in spans for i in range(start, end))
    assert targets == list(range(1, n_tokens))
    assert sum(end - start < context for start, end in spans) <= 2, "only the first and the last may be short"
    sizes = [len(batch) for batch in batches]
    assert all(0 < size <= n_rows for size in sizes) and (not sizes or max(sizes) - min(sizes) <= 1)


def test_cuts_and_order_differ_between_epochs() -> None:
    size = {"context": 16, "n_rows": 4}
    epochs = [np.concatenate(plan_rows(1000, seed=3, epoch=epoch, **size)) for epoch in range(20)]
    again = [np.concatenate(plan_rows(1000, seed=3, epoch=epoch, **size)) for epoch in range(20)]
    assert all(map(np.array_equal, epochs, again))
    assert len({int(starts.max()) % 16 for starts in epochs}) > 5
    assert all(not np.array_equal(one, np.sort(one)) for one in epochs)
    assert all(not np.array_equal(one, two) for one, two in pairwise(epochs))


def test_rows_in_order_begin_at_the_start() -> None:
    assert row_starts(10, context=4, offset=0).tolist() == [1, 5, 9]
    assert row_starts(10, context=4, offset=3).tolist() == [1, 4, 8]
    assert row_starts(1, context=4, offset=3).tolist() == []
