"""Plans of batches (every sentence once, within the budget, little padding), and their padded, shifted tensors."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.data.batch import collate, pad_sources
from transduce.data.batching import plan, share_out, split
from transduce.data.store import Example
from transduce.text.tokenizer import BOS, EOS, PAD

some_lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=150)
seeds = st.integers(-(2**63), 2**63 - 1)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    src, tgt = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
    return src, tgt


def like_captions(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like those of Multi30k: mean 16, standard deviation 5, correlation 0.85."""
    draw = np.random.default_rng(seed)
    common, own = draw.gamma(9.5, 1.52, size=n), draw.normal(0, 1.95, size=(2, n))
    src, tgt = (np.maximum(3, np.rint(common + noise + 2)).astype(np.int32) for noise in own)
    return src, tgt


def size(batch: np.ndarray, src: np.ndarray, tgt: np.ndarray) -> int:
    return int(max(src[batch].max(), tgt[batch].max())) * len(batch)


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@settings(max_examples=300, deadline=None)
@given(pairs=some_lengths, budget=st.integers(1, 400), seed=seeds, epoch=st.integers(0, 1000))
def test_every_sentence_occurs_once_within_the_budget(
    pairs: list[tuple[int, int]], budget: int, seed: int, epoch: int
) -> None:
    src, tgt = arrays(pairs)
    batches = plan(src, tgt, budget=budget, seed=seed, epoch=epoch)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(pairs)))
    assert all(len(batch) for batch in batches)
    for batch in batches:
        assert size(batch, src, tgt) <= budget or len(batch) == 1
    assert as_lists(plan(src, tgt, budget=budget, seed=seed, epoch=epoch)) == as_lists(batches)


@settings(max_examples=300, deadline=None)
@given(pairs=some_lengths.filter(bool), budget=st.integers(1, 400), data=st.data())
def test_micro_batches_divide_a_batch_within_the_budget(
    pairs: list[tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    src, tgt = arrays(pairs)
    chosen = st.lists(st.integers(0, len(pairs) - 1), unique=True)
    indices = np.array(data.draw(chosen), dtype=np.int64)
    parts = split(indices, src, tgt, budget=budget)
    assert sorted(i for part in parts for i in part.tolist()) == sorted(indices.tolist())
    assert all(len(part) and (size(part, src, tgt) <= budget or len(part) == 1) for part in parts)
    if len(indices) and size(indices, src, tgt) <= budget:
        assert as_lists(parts) == [indices.tolist()]
    assert len(parts) == fewest_parts(np.maximum(src, tgt)[indices].tolist(), budget)


def fewest_parts(longer: list[int], budget: int) -> int:
    """Simple implementation: from the longest down, fill each part as far as possible."""
    rest, n = sorted(longer, reverse=True), 0
    while rest:
        rest = rest[max(1, budget // rest[0]) :]
        n += 1
    return n


def test_micro_batches_have_similar_sizes() -> None:
    lengths = np.full(481, 17)
    assert [len(part) for part in split(np.arange(481), lengths, lengths, budget=4096)] == [161, 160, 160]


@pytest.mark.parametrize("budget", [2048, 4096, 8192])
def test_plans_have_little_padding(budget: int) -> None:
    src, tgt = like_captions(29_000)
    assert 15 < src.mean() < 18 and 0.8 < np.corrcoef(src, tgt)[0, 1] < 0.9
    for epoch in range(3):
        batches = plan(src, tgt, budget=budget, seed=1, epoch=epoch)
        slots = sum(len(b) * (int(src[b].max()) + int(tgt[b].max())) for b in batches)
        assert 0.95 * slots < src.sum() + tgt.sum()
        least = (src.sum() + tgt.sum()) / 2 / budget
        assert len(batches) < 1.2 * least + 2  # the budget is used


def again(one: list[np.ndarray], other: list[np.ndarray], n: int) -> float:
    """The probability that two sentences of the same batch in `one` are also in the same batch in `other`."""
    where = np.empty((2, n), dtype=np.int64)
    for row, batches in zip(where, (one, other), strict=True):
        for number, batch in enumerate(batches):
            row[batch] = number
    both, alone = (np.unique(key, return_counts=True)[1] for key in (where[0] * n + where[1], where[0]))
    return float((both * (both - 1.0)).sum() / (alone * (alone - 1.0)).sum())


def test_composition_and_order_change_with_epoch_and_seed() -> None:
    src, tgt = like_captions(29_000)
    plans = [plan(src, tgt, budget=4096, seed=seed, epoch=epoch) for seed, epoch in ((1, 0), (1, 1), (1, 2), (2, 0))]
    for one, other in pairwise(plans):
        assert again(one, other, 29_000) < 0.7
        same = {tuple(sorted(batch)) for batch in one} & {tuple(sorted(batch)) for batch in other}
        assert len(same) < 0.05 * len(one)
    mean_lengths = np.array([src[batch].mean() for batch in plans[0]])
    assert abs(np.corrcoef(mean_lengths[1:], mean_lengths[:-1])[0, 1]) < 0.3  # no curriculum


def test_sentences_of_equal_length_are_shuffled() -> None:
    lengths = np.full(4000, 10)
    one, other = (plan(lengths, lengths, budget=1000, seed=1, epoch=epoch) for epoch in (0, 1))
    assert again(one, other, 4000) < 0.05


def test_weights_repeat_or_skip_sentences() -> None:
    src, tgt = like_captions(1000)
    weights = np.repeat([1.0, 2.0, 0.25, 2.5], 250)
    counts = np.zeros((8, 1000), dtype=int)
    for epoch in range(8):
        batches = plan(src, tgt, budget=2000, seed=3, epoch=epoch, weights=weights)
        assert all(size(batch, src, tgt) <= 2000 for batch in batches)
        np.add.at(counts[epoch], np.concatenate(batches), 1)
        again_ = plan(src, tgt, budget=2000, seed=3, epoch=epoch, weights=weights)
        assert as_lists(again_) == as_lists(batches)
    assert (counts[:, :250] == 1).all() and (counts[:, 250:500] == 2).all()
    quarter, more = counts[:, 500:750], counts[:, 750:]
    assert set(quarter.sum(1)) <= {62, 63} and (quarter.sum(0) == 2).all()  # each in two of eight epochs
    assert (more.sum(1) == 625).all() and (more.sum(0) == 20).all()
    assert not (quarter[0] & quarter[1]).any()


def test_weights_of_one_change_nothing() -> None:
    src, tgt = like_captions(500)
    plain, weighted = (plan(src, tgt, budget=900, seed=1, epoch=2, weights=w) for w in (None, np.ones(500)))
    assert as_lists(plain) == as_lists(weighted)


def test_the_type_of_the_lengths_does_not_matter() -> None:
    """16-bit lengths do not overflow."""
    src, tgt = np.full(300, 300, dtype=np.int16), np.full(300, 200, dtype=np.int16)
    batches = plan(src, tgt, budget=60_000, seed=1, epoch=0)
    assert 51_000 <= max(size(batch, src, tgt) for batch in batches) <= 60_000 and len(batches) <= 3


sides = st.integers(1, 60).flatmap(lambda n: st.tuples(*[st.lists(st.integers(1, 90), min_size=n, max_size=n)] * 2))


@settings(deadline=None)
@given(sides, st.integers(1, 9))
def test_shares_cover_the_batch_and_are_balanced(lengths: tuple[list[int], list[int]], n: int) -> None:
    src, tgt = map(np.array, lengths)
    longer = np.maximum(src, tgt)
    shares = share_out(src, tgt, n)
    assert len(shares) == n
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(src)))  # each sentence once, whatever n is
    assert all(map(np.array_equal, shares, share_out(src, tgt, n)))
    largest = max(len(share) * int(longer[share].max()) for share in shares if len(share))
    assert largest == fairest(sorted(longer.tolist()), n)


def fairest(longer: list[int], n: int) -> int:
    """Brute force: the smallest possible largest share when cutting the sentences, in order, into at most n parts."""
    best = [[0.0] * (n + 1)] + [[np.inf] * (n + 1) for _ in longer]
    for end in range(1, len(longer) + 1):
        for parts in range(1, n + 1):
            best[end][parts] = min(max(best[start][parts - 1], (end - start) * longer[end - 1]) for start in range(end))
            best[end][parts] = min(best[end][parts], best[end][parts - 1])
    return int(best[-1][n])


sentences = st.lists(st.integers(1, 65_535), max_size=9)


def slow(rows: list[list[int]]) -> list[list[int]]:
    width = max((len(row) for row in rows), default=0)
    return [row + [PAD] * (width - len(row)) for row in rows]


@settings(max_examples=200, deadline=None)
@given(pairs=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=6), as_arrays=st.booleans())
def test_collate_equals_a_simple_implementation(pairs: list[tuple[list[int], list[int]]], as_arrays: bool) -> None:
    give = (lambda ids: np.array(ids, dtype=np.uint16)) if as_arrays else list
    batch = collate([Example(src=give(src), tgt=give(tgt)) for src, tgt in pairs])
    assert batch.src.tolist() == slow([[*src, EOS] for src, _ in pairs])
    assert batch.tgt_in.tolist() == slow([[BOS, *tgt] for _, tgt in pairs])
    assert batch.tgt_out.tolist() == slow([[*tgt, EOS] for _, tgt in pairs])
    assert batch.n_targets == sum(len(tgt) + 1 for _, tgt in pairs) == int((batch.tgt_out != PAD).sum())
    assert {t.dtype for t in (batch.src, batch.tgt_in, batch.tgt_out)} == {torch.int64}
    assert torch.equal(pad_sources([give(src) for src, _ in pairs]), batch.src)


def test_a_batch_is_frozen_and_not_copied_on_the_same_device() -> None:
    batch = collate([Example(src=[5], tgt=[6, 7])])
    assert batch.to("cpu") is batch
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.n_targets = 3  # type: ignore[misc]


def test_empty_sources_are_padded() -> None:
    assert pad_sources([]).shape == (0, 1)
    assert pad_sources([[]]).tolist() == [[EOS]]


def test_a_batch_does_not_share_memory_with_the_store() -> None:
    ids = np.array([5, 6], dtype=np.int64)
    batch = collate([Example(src=ids, tgt=ids)])
    batch.src.zero_()
    assert ids.tolist() == [5, 6]


@pytest.mark.gpu
def test_to_the_gpu_and_back() -> None:
    batch = collate([Example(src=[5, 6], tgt=[7]), Example(src=[5], tgt=[8, 9])])
    sent = batch.to("cuda")
    torch.cuda.synchronize()
    assert sent.src.is_cuda and sent.n_targets == batch.n_targets
    for name in ("src", "tgt_in", "tgt_out"):
        assert torch.equal(getattr(sent, name).cpu(), getattr(batch, name))
