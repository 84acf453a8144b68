"""Rows of text, masked rows and labelled rows: every token once per epoch, exact resume, any micro-batches."""

from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from toys import CPU, assert_ranks_share_the_update, same_feed, settings
from transduce.config.architectures import BertSettings, model_settings
from transduce.data.batch import LabelBatch, MaskedBatch, TrainingBatch, mask
from transduce.data.store import LabelStore, SentenceStore, TextStore
from transduce.errors import DataError
from transduce.models.registry import build_model
from transduce.text.special import BOS, EOS, MASK, PAD
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import DataPosition, LabelFeeder, LengthFeeder, MaskedFeeder, RowFeeder
from transduce.training.loss import predict_labels, predict_masked_tokens
from transduce.training.step import Updater

VOCAB, CONTEXT = 40, 16
MODEL = {
    "kind": "bert",
    **BertSettings.presets["bert-tiny"],
    "d_model": 16,
    "d_ff": 24,
    "n_heads": 2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def sentences(n: int = 60, *, longest: int = 9) -> SentenceStore:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, longest + 1, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    documents = np.array([0, 1, *range(6, n, 7), n])
    return SentenceStore(draw.integers(MASK + 1, VOCAB, offsets[-1]).astype(np.uint16), offsets, documents, {})


def labelled(n: int = 50) -> LabelStore:
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, 14, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = draw.integers(MASK + 1, VOCAB, offsets[-1])
    return LabelStore(ids, offsets, (lengths // 2 + 1).astype(np.int32), draw.integers(0, 3, n), {})


def masked(pairs: bool = False, **more: Any) -> MaskedFeeder:
    asked = settings(**{"batch_tokens": 128, "micro_batch_tokens": 48, **more}).training
    masked = partial(mask, vocab_size=VOCAB, rate=0.3)
    return MaskedFeeder(sentences(), asked, device=CPU, context=CONTEXT, masked=masked, pairs=pairs)


def with_labels(**more: Any) -> LabelFeeder:
    asked = settings(**{"batch_tokens": 128, "micro_batch_tokens": 48, **more}).training
    return LabelFeeder(labelled(), asked, device=CPU)


FEEDERS = {"masked": masked, "pairs": lambda **more: masked(True, **more), "labels": with_labels}
ALL_FEEDERS = FEEDERS | {"rows": lambda **more: row_feeder(store(), **more)}


@pytest.mark.parametrize("make", ALL_FEEDERS.values(), ids=ALL_FEEDERS)
def test_a_resumed_feeder_yields_identical_batches(make: Any) -> None:
    whole = list(islice(make().feeds(DataPosition()), 25))
    assert max(feed.after.epoch for feed in whole) > 1
    for stop in (1, 7, 24):
        assert same_feed(next(make().feeds(whole[stop - 1].after)), whole[stop])
    assert not same_feed(next(make(seed=9).feeds(DataPosition())), whole[0])


@pytest.mark.parametrize("make", ALL_FEEDERS.values(), ids=ALL_FEEDERS)
def test_two_ranks_share_the_update_of_one_process(make: Any) -> None:
    assert_ranks_share_the_update(make, 2)


@pytest.mark.parametrize("make", FEEDERS.values(), ids=FEEDERS)
def test_batches_respect_the_budget_and_lengths_are_correct(make: Any) -> None:
    feeder: LengthFeeder = make()
    for feed in islice(feeder.feeds(DataPosition()), 12):
        (lengths,) = feeder._lengths(feed.position.epoch)
        widths = lengths[feed.indices]
        rows = [int((row != PAD).sum()) for batch in feed.batches for row in batch.inputs[0]]
        assert sorted(rows) == sorted(widths.tolist()) and max(rows) <= CONTEXT
        for batch in feed.batches:
            assert isinstance(batch, TrainingBatch)
            assert batch.inputs[0].numel() <= 48 or len(batch.inputs[0]) == 1
        assert feed.n_tokens == sum(rows) and feed.n_targets == sum(batch.n_targets for batch in feed.batches)


@pytest.mark.parametrize("pairs", [False, True])
def test_texts_are_those_of_a_batch_although_the_next_epoch_is_planned(pairs: bool) -> None:
    feeder = masked(pairs)
    *_, last = (feed for feed in islice(feeder.feeds(DataPosition()), 25) if feed.after == DataPosition(1))
    shown = Mock(spec=Tokenizers, tgt=Mock(decode=lambda ids: " ".join(map(str, ids))))
    texts = {" ".join(feeder.texts(int(i), shown, epoch=last.position.epoch)) for i in last.indices}
    for batch in last.batches:
        assert isinstance(batch, MaskedBatch)
        ids = batch.ids.clone()
        ids.view(-1)[batch.places] = batch.targets
        rows = [" ".join(str(i) for i in row if i not in (PAD, BOS)) for row in ids.tolist()]
        assert all(any(part.strip() in text for text in texts) for row in rows for part in row.split(f" {EOS}"))


def test_an_epoch_has_every_token_once_and_epochs_are_cut_differently() -> None:
    feeder = masked()
    rows_of: list[list[list[int]]] = []
    for epoch in range(4):
        rows = []
        for batch in feeder.batches(epoch):
            assert isinstance(batch, MaskedBatch)
            ids = batch.ids.clone()
            ids.view(-1)[batch.places] = batch.targets
            assert (batch.segments == 0).all() and not batch.labels.any()
            for row in ids.tolist():
                text = [i for i in row if i != PAD]
                assert text[0] == BOS and text[-1] == EOS and BOS not in text[1:]
                rows.append(text[1:-1])
        assert sorted(i for row in rows for i in row) == sorted(feeder.store.ids.tolist())
        rows_of.append(sorted(rows))
    assert any(rows != rows_of[0] for rows in rows_of)


def test_pairs_have_special_tokens_and_about_half_are_consecutive() -> None:
    feeder, labels = masked(True), []
    for batch in (b for epoch in range(12) for b in feeder.batches(epoch)):
        assert isinstance(batch, MaskedBatch)
        for row, kinds in zip(batch.ids.tolist(), batch.segments.tolist(), strict=True):
            assert row[0] == BOS and row.count(EOS) == 2
            first = row.index(EOS)
            assert kinds[: first + 1] == [0] * (first + 1) and 1 in kinds
            assert all(kind == 1 for i, kind in zip(row[first + 1 :], kinds[first + 1 :], strict=True) if i != PAD)
        labels += batch.labels.tolist()
    assert 0.35 < np.mean(labels) < 0.75


def test_labels_stay_with_their_texts() -> None:
    feeder = with_labels()
    seen = []
    for batch in feeder.batches():
        assert isinstance(batch, LabelBatch)
        seen += [
            (tuple(i for i in row if i), label)
            for row, label in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)
        ]
    store = feeder.store
    assert sorted(seen) == sorted((tuple(store[i].ids.tolist()), int(store.labels[i])) for i in range(len(store)))


@pytest.mark.parametrize(
    ("make", "criterion", "options"),
    [
        (FEEDERS["masked"], predict_masked_tokens, {}),
        (FEEDERS["pairs"], predict_masked_tokens, {"next_sentence": True}),
        (FEEDERS["labels"], predict_labels, {"kind": "bert-classifier", "n_labels": 3}),
    ],
)
def test_the_update_does_not_depend_on_its_micro_batches(make: Any, criterion: Any, options: dict[str, Any]) -> None:
    found = []
    for micro in (32, 128):
        torch.manual_seed(0)
        values = {**MODEL, **options}
        if values["kind"] == "bert-classifier":
            values.pop("output_bias", None)
        model = build_model(model_settings(**values), n_src=VOCAB, n_tgt=VOCAB)
        asked = settings(optimizer="adamw", lr=0.01).training
        updater = Updater(model, asked, device=CPU, precision="float32", criterion=criterion)
        feed = max(islice(make(micro_batch_tokens=micro).feeds(DataPosition()), 6), key=lambda feed: len(feed.indices))
        result = updater.update(feed.batches, 1.0)
        found.append((result.loss_sum, result.grad_norm, result.n_targets, len(feed.batches)))
    (loss, norm, n, n_parts), (other_loss, other_norm, other_n, one) = found
    assert n == other_n and n_parts > one == 1
    assert loss == pytest.approx(other_loss, rel=1e-5) and norm == pytest.approx(other_norm, rel=1e-4)


def test_the_losses_equal_their_definitions() -> None:
    torch.manual_seed(0)
    model = build_model(model_settings(**{**MODEL, "next_sentence": True}), n_src=VOCAB, n_tgt=VOCAB).eval()
    feed = next(masked(True, micro_batch_tokens=128).feeds(DataPosition()))
    (batch,) = feed.batches
    with torch.no_grad():
        loss, nll, _ = predict_masked_tokens(model, batch, smoothing=0.0)
        hidden, follows = model(*batch.inputs)
    expected = -model.logits(hidden).log_softmax(-1)[torch.arange(batch.n_targets), batch.targets].sum()
    next_one = torch.nn.functional.cross_entropy(follows, batch.labels)
    assert float(nll) == pytest.approx(float(expected), rel=1e-5)
    assert float(loss) / batch.n_targets == pytest.approx(float(expected / batch.n_targets + next_one), rel=1e-5)


def test_missing_text_is_an_error() -> None:
    empty = LabelStore(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), {})
    no_text = TextStore(np.zeros(0, dtype=np.uint16), {"documents": 0, "bytes": 0})
    for feeder in (LabelFeeder(empty, settings().training, device=CPU), row_feeder(no_text)):
        with pytest.raises(DataError, match="no text"):
            feeder.plan(0)


TEXT_CONTEXT = 8


def store(n_documents: int = 5, longest: int = 30) -> TextStore:
    draw = np.random.default_rng(1)
    ids: list[int] = []
    for _ in range(n_documents):
        ids += [BOS, *draw.integers(4, 24, size=draw.integers(1, longest)).tolist(), EOS]
    return TextStore(np.array(ids, dtype=np.uint16), {"documents": n_documents, "bytes": 100})


def row_feeder(text: TextStore, *, separate: bool = False, **training: object) -> RowFeeder:
    asked = settings(**{"batch_tokens": 32, "micro_batch_tokens": 16, **training}).training
    return RowFeeder(text, asked, device=CPU, context=TEXT_CONTEXT, separate=separate)


def test_every_token_but_the_first_is_a_target_once_per_epoch() -> None:
    text = store()
    feeds = list(islice(row_feeder(text).feeds(DataPosition()), 60))
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
        islice(row_feeder(text).feeds(DataPosition()), 9),
        islice(row_feeder(text, micro_batch_tokens=32).feeds(DataPosition()), 9),
        strict=True,
    ):
        assert len(feed.batches) >= len(whole.batches) == 1
        assert all(batch.targets.numel() <= 16 for batch in feed.batches)
        assert sum(batch.n_targets for batch in feed.batches) == whole.n_targets
        assert sorted(t for b in feed.batches for t in b.targets.flatten().tolist() if t) == sorted(
            t for t in whole.batches[0].targets.flatten().tolist() if t
        )


def test_validation_reads_all_in_order() -> None:
    text = store()
    rows = [row for batch in row_feeder(text).in_order() for row in batch.targets.tolist()]
    targets = [token for row in rows for token in row if token != PAD]
    assert targets == [int(i) for i in text.ids if i != BOS]
    assert all(len(row) <= TEXT_CONTEXT for row in rows)


def test_documents_are_numbered_within_their_row() -> None:
    for feed in islice(row_feeder(store(), separate=True).feeds(DataPosition()), 9):
        for batch in feed.batches:
            ids, documents = batch.inputs
            assert torch.equal(documents, (ids == BOS).cumsum(1))
