import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

import numpy as np
import pytest
import torch

from toys import CPU, assert_ranks_share_the_update, pairs, same_feed, settings
from transduce.config.settings import TokenizerSettings
from transduce.data.batch import Batch
from transduce.data.store import Example, TokenStore
from transduce.errors import DataError
from transduce.text.tokenizer import UNK, Tokenizers
from transduce.text.training import train_tokenizers
from transduce.training.feed import DataPosition, PairFeeder, SubwordSampling, ahead


def feeder(n: int = 60, **training: object) -> PairFeeder:
    return PairFeeder(pairs(n, seed=1), settings(**training).training, device=CPU)


def test_feeds_from_any_position_equal_those_from_the_start() -> None:
    """Over more than two epochs: from each `after` on, the same feeds follow."""
    feeds = list(islice(feeder().feeds(DataPosition()), 12))
    assert feeds[-1].after.epoch >= 2
    for number, feed in enumerate(feeds[:-1]):
        assert same_feed(next(feeder().feeds(feed.after)), feeds[number + 1])


def test_a_share_of_an_epoch_is_a_position_in_the_plan_of_any_batch_size() -> None:
    for feed in islice(feeder().feeds(DataPosition()), 12):
        assert feeder().position_after(feed.epochs) == feed.after
        there = feeder(batch_tokens=64).position_after(feed.epochs)
        assert there.epoch == feed.after.epoch
        n_small, n = (len(one.plan(there.epoch)) for one in (feeder(batch_tokens=64), feeder()))
        assert there.index / n_small == pytest.approx(feed.after.index / n, abs=1 / n_small)


def test_an_epoch_contains_every_pair_once_and_ends_on_a_whole_number() -> None:
    feeds = list(takewhile(lambda feed: feed.epochs <= 1.0, feeder().feeds(DataPosition())))
    seen = np.concatenate([feed.indices for feed in feeds])
    assert sorted(seen.tolist()) == list(range(60))
    assert feeds[-1].epochs == 1.0
    assert feeds[-1].after == DataPosition(1, 0)


def test_micro_batches_cover_the_batch_within_their_budget() -> None:
    store = pairs(60, seed=1)
    for feed in islice(feeder(batch_tokens=128, micro_batch_tokens=40).feeds(DataPosition()), 6):
        assert len(feed.batches) > 1 or max(feed.batches[0].src.numel(), feed.batches[0].tgt_out.numel()) <= 40
        for batch in feed.batches:
            assert max(batch.src.numel(), batch.tgt_out.numel()) <= 40
        rows = sorted(tuple(row[row > 3].tolist()) for batch in feed.batches for row in batch.src)
        assert rows == sorted(tuple(store[int(i)][0].tolist()) for i in feed.indices)


def test_counts_are_those_of_the_tensors() -> None:
    feed = next(feeder().feeds(DataPosition()))
    assert feed.n_targets == sum(int((batch.tgt_out != 0).sum()) for batch in feed.batches)
    assert feed.n_targets == sum(batch.n_targets for batch in feed.batches)
    assert feed.n_tokens == sum(int((t != 0).sum()) for batch in feed.batches for t in (batch.src, batch.tgt_out))
    assert feed.n_slots == sum(batch.src.numel() + batch.tgt_in.numel() for batch in feed.batches)


def test_validation_reads_every_pair_once_and_always_the_same() -> None:
    held_out = feeder()
    one, two = list(held_out.batches()), list(held_out.batches())
    assert sum(len(batch.src) for batch in one) == 60
    assert all(torch.equal(a.src, b.src) for a, b in zip(one, two, strict=True))


def test_a_rank_reads_its_own_pairs_only() -> None:
    ranks = [feeder(), feeder()]
    for rank, one in enumerate(ranks):
        one.rank, one.n_ranks, read = rank, 2, list[int]()
        one._example = lambda i, load=one._example, read=read: read.append(int(i)) or load(i)  # type: ignore[method-assign]
        feed = next(one.feeds(DataPosition()))
        assert len(read) == sum(batch.n_rows for batch in feed.batches) < len(feed.indices)


def test_missing_pairs_are_an_error() -> None:
    empty = PairFeeder(TokenStore.from_lists([], []), settings().training, device=CPU)
    with pytest.raises(DataError, match="no sentence pair"):
        next(empty.feeds(DataPosition()))


def test_batches_come_from_a_thread_in_order_and_the_thread_ends() -> None:
    before = threading.active_count()
    with ahead(feeder().feeds(DataPosition()), n=2) as feeds:
        made_ahead = list(islice(feeds, 7))
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert all(map(same_feed, made_ahead, islice(feeder().feeds(DataPosition()), 7)))


def test_an_error_in_the_thread_is_raised_where_the_item_would_have_come() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise DataError("line 2")

    with ahead(failing(), n=2) as items:
        assert next(items) == 1
        with pytest.raises(DataError, match="line 2"):
            next(items)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_finite_iterator_ends(n: int) -> None:
    with ahead(iter(range(5)), n=n) as items:
        assert list(items) == [0, 1, 2, 3, 4]


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "pack", "boxes")


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    draw = np.random.default_rng(0)
    lines = [" ".join(draw.choice(WORDS, size=8)) for _ in range(200)]
    return train_tokenizers(lines, lines, TokenizerSettings(), vocab_size=80)


def text_feeder(tokenizers: Tokenizers, sampling: SubwordSampling | None, *, extra: str = "") -> PairFeeder:
    draw = np.random.default_rng(5)
    texts = [" ".join(draw.choice(WORDS, size=6)) + extra for _ in range(40)]
    ids = [tokenizers.src.encode(text) for text in texts]
    return PairFeeder(TokenStore.from_lists(ids, ids), settings().training, device=CPU, segment=sampling)


def texts_of(tokenizers: Tokenizers, batches: tuple[Batch, ...], name: str) -> list[str]:
    return sorted(tokenizers.src.decode(row.tolist()) for batch in batches for row in getattr(batch, name))


def test_sampled_pieces_decode_to_the_same_text_and_depend_on_the_epoch_only(tokenizers: Tokenizers) -> None:
    sampling = SubwordSampling(tokenizers, amount=1.0, seed=7, max_length=256)
    plain, one, two = (text_feeder(tokenizers, s) for s in (None, sampling, sampling))
    feeds, again, best = (list(islice(f.feeds(DataPosition()), 30)) for f in (one, two, plain))
    assert all(map(same_feed, feeds, again)), "the same position, the same pieces"
    for sampled, feed in zip(feeds, best, strict=True):
        for name in ("src", "tgt_out"):
            assert texts_of(tokenizers, sampled.batches, name) == texts_of(tokenizers, feed.batches, name)
    epochs: list[set[tuple[int, ...]]] = [set(), set()]
    for feed, place in ((f, DataPosition(f.after.epoch - (f.after.index == 0))) for f in feeds):
        if place.epoch < 2:
            epochs[place.epoch] |= {tuple(row[row > 3].tolist()) for batch in feed.batches for row in batch.src}
    assert len(epochs[0] & epochs[1]) < 30, "a new epoch must draw anew"
    assert sum(f.n_targets for f in feeds) > sum(f.n_targets for f in best), "sampled pieces are shorter"


def test_a_position_resumes_sampled_pieces_too(tokenizers: Tokenizers) -> None:
    sampling = SubwordSampling(tokenizers, amount=0.5, seed=7, max_length=256)
    feeds = list(islice(text_feeder(tokenizers, sampling).feeds(DataPosition()), 8))
    for number, feed in enumerate(feeds[:-1]):
        assert same_feed(next(text_feeder(tokenizers, sampling).feeds(feed.after)), feeds[number + 1])


def test_sentences_with_unknown_or_too_many_pieces_are_not_sampled(tokenizers: Tokenizers, tmp_path: Path) -> None:
    sampling = SubwordSampling(tokenizers, amount=1.0, seed=7, max_length=256)
    unknown = tokenizers.src.encode("the lazy ж dogs")
    assert UNK in unknown
    assert sampling([Example(unknown, unknown)], DataPosition()) == [Example(unknown, unknown)]
    known = tokenizers.src.encode("seven wizards pack boxes over dogs")
    lengths = []
    for index in range(20):
        (drawn,) = sampling([Example(known, known)], DataPosition(0, index))
        lengths.append(len(drawn.src))
        for max_length, expected in ((len(drawn.src), drawn.src), (len(drawn.src) - 1, known)):
            short = replace(sampling, max_length=max_length)
            assert short([Example(known, known)], DataPosition(0, index))[0].src == expected
    assert max(lengths) > len(known)


@pytest.mark.parametrize("n_ranks", [2, 3, 7])
def test_several_ranks_share_the_update_of_one_process(n_ranks: int) -> None:
    """Also of few sentences, of which some get none."""
    few = partial(feeder, 30, batch_tokens=40, micro_batch_tokens=20)
    fewest = assert_ranks_share_the_update(few, n_ranks, n_sides=2)
    assert fewest == 0 or n_ranks < 7
