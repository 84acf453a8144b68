"""Rows of a store become batches: shifted, padded, every token a target once per epoch, exact resume."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from toys import CPU, assert_ranks_share_the_update, same_feed, settings
from transduce.data.batch import TrainingBatch
from transduce.data.store import TextStore
from transduce.errors import DataError
from transduce.text.tokenizer import BOS, EOS, PAD
from transduce.training.feed import DataPosition, RowFeeder

CONTEXT = 8


def store(n_documents: int = 5, longest: int = 30) -> TextStore:
    draw = np.random.default_rng(1)
    ids: list[int] = []
    for _ in range(n_documents):
        ids += [BOS, *draw.integers(4, 24, size=draw.integers(1, longest)).tolist(), EOS]
    return TextStore(np.array(ids, dtype=np.uint16), {"documents": n_documents, "bytes": 100})


def feeder(text: TextStore, *, separate: bool = False, **training: object) -> RowFeeder:
    asked = settings(**{"batch_tokens": 32, "micro_batch_tokens": 16, **training}).training
    return RowFeeder(text, asked, device=CPU, context=CONTEXT, separate=separate)


def test_every_token_but_the_first_is_a_target_once_per_epoch() -> None:
    text = store()
    feeds = list(islice(feeder(text).feeds(DataPosition()), 60))
    for epoch in (0, 1, 2):
        mine = [f for f in feeds if (f.after.epoch - (f.after.index == 0)) == epoch]
        asked: list[tuple[int, ...]] = []
        for batch in (batch for feed in mine for batch in feed.batches):
            assert isinstance(batch, TrainingBatch)
            (ids,) = batch.inputs
            assert batch.n_targets == int((batch.targets != PAD).sum())
            for row, targets in zip(ids.tolist(), batch.targets.tolist(), strict=True):
                asked += [(*row[: t + 1][-2:], target) for t, target in enumerate(targets) if target != PAD]
        targets = sorted(token for *_, token in asked)
        assert targets == sorted(int(i) for i in text.ids if i != BOS)
        bigrams = {(int(a), int(b)) for a, b in zip(text.ids[:-1], text.ids[1:], strict=True)}
        assert {(known[-2], known[-1]) for known in asked} <= bigrams
        assert sum(feed.n_targets for feed in mine) == text.n_tokens
        assert mine[-1].epochs == epoch + 1


def test_micro_batches_add_up_to_the_update() -> None:
    text = store()
    for feed, whole in zip(
        islice(feeder(text).feeds(DataPosition()), 9),
        islice(feeder(text, micro_batch_tokens=32).feeds(DataPosition()), 9),
        strict=True,
    ):
        assert len(feed.batches) >= len(whole.batches) == 1
        assert all(batch.targets.numel() <= 16 for batch in feed.batches)
        assert sum(batch.n_targets for batch in feed.batches) == whole.n_targets
        assert sorted(t for b in feed.batches for t in b.targets.flatten().tolist() if t) == sorted(
            t for t in whole.batches[0].targets.flatten().tolist() if t
        )


def test_a_position_resumes_exactly() -> None:
    text = store()
    feeds = list(islice(feeder(text).feeds(DataPosition()), 30))
    for number, feed in enumerate(feeds[:-1]):
        assert same_feed(next(feeder(text).feeds(feed.after)), feeds[number + 1])
    other = next(feeder(text, seed=4).feeds(DataPosition()))
    assert not same_feed(other, feeds[0])


def test_validation_reads_all_in_order() -> None:
    text = store()
    rows = [row for batch in feeder(text).in_order() for row in batch.targets.tolist()]
    targets = [token for row in rows for token in row if token != PAD]
    assert targets == [int(i) for i in text.ids if i != BOS]
    assert all(len(row) <= CONTEXT for row in rows)


def test_documents_are_numbered_within_their_row() -> None:
    for feed in islice(feeder(store(), separate=True).feeds(DataPosition()), 9):
        for batch in feed.batches:
            ids, documents = batch.inputs
            assert torch.equal(documents, (ids == BOS).cumsum(1))


def test_a_store_without_text_has_no_batches() -> None:
    empty = TextStore(np.zeros(0, dtype=np.uint16), {"documents": 0, "bytes": 0})
    with pytest.raises(DataError, match="no text"):
        feeder(empty).plan(0)


def test_two_ranks_share_the_update_of_one_process() -> None:
    assert_ranks_share_the_update(lambda: feeder(store()), 2)
