"""The masked tokens of a text, and how well a model predicts them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.architectures import BertSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import MaskedBatch, TrainingBatch
from transduce.data.encoding import encode_sentences
from transduce.data.masking import mask, word_starts
from transduce.data.store import SentenceStore
from transduce.data.text import read_pieces
from transduce.decoding.mask_filler import MaskFiller
from transduce.decoding.results import MaskedScore
from transduce.errors import SettingsError
from transduce.text.special import Vocabulary
from transduce.training.encoder_feed import MaskedFeeder
from transduce.training.loss import predict_masked_tokens
from transduce.training.validate import Judge, Validator


def score_text(filler: MaskFiller, path: str | Path, *, batch_tokens: int | None = None) -> MaskedScore:
    """Score a model on masked tokens of the text of a file (`-`: standard input), split as in training.

    The masked tokens follow from the run's seed: figures are reproducible. Validation text gives the training's own
    figures. A single document has no next-sentence accuracy. Raises `DataError`.
    """
    data, training = filler.settings.data, filler.settings.training
    budget = batch_tokens or training.micro_batch_tokens or training.batch_tokens
    budget = max(filler.context, budget or filler.settings.decoding.batch_tokens)
    pieces = read_pieces(path, data.documents)
    store = encode_sentences(None, pieces, filler.vocabulary, longest=filler.context - 3, name=str(path))
    changes = {
        "data": data.model_copy(update={"context": filler.context}),
        "training": training.model_copy(update={"batch_tokens": budget, "micro_batch_tokens": budget}),
    }
    if store.n_documents < 2:
        changes["model"] = filler.settings.model.model_copy(update={"next_sentence": False})
    settings = filler.settings.model_copy(update=changes)
    return _score_masked(filler.model, masked_feeder(store, filler.vocabulary, settings, filler.device))


def judges_pairs(settings: Settings) -> bool:
    """Whether the model predicts next sentences."""
    return isinstance(settings.model, BertSettings) and settings.model.next_sentence


def masked_feeder(
    store: SentenceStore, vocabulary: Vocabulary, settings: Settings, device: torch.device
) -> MaskedFeeder:
    """Rows with masked tokens; pairs of segments if the model predicts next sentences."""
    data = settings.data
    starts: np.ndarray | None = None
    if data.whole_words:
        starts = word_starts(vocabulary.pieces(range(vocabulary.vocab_size)))
        if starts is None:
            raise SettingsError("data.whole_words = true: the pieces of this vocabulary do not mark the start of words")
    return MaskedFeeder(
        store,
        settings.training,
        device=device,
        context=resolved(data.context, "data.context"),
        masked=partial(mask, vocab_size=vocabulary.vocab_size, rate=data.masked, starts=starts),
        pairs=judges_pairs(settings),
    )


def masked_judge(feeder: MaskedFeeder) -> Judge:
    """Computes the accuracy on masked tokens and, with pairs, on next sentences."""

    def judge(model: nn.Module) -> dict[str, float]:
        right = n = followed = n_pairs = 0
        known: Any = model
        for batch in feeder.batches():
            assert isinstance(batch, MaskedBatch)
            hidden, follows = known(*batch.inputs)
            right += int((known.logits(hidden).argmax(-1) == batch.targets).sum())
            n += batch.n_targets
            if follows is not None:
                followed += int((follows.argmax(-1) == batch.labels).sum())
                n_pairs += len(batch.labels)
        scores = {"masked_accuracy": right / max(1, n)}
        return scores | ({"next_sentence_accuracy": followed / n_pairs} if n_pairs else {})

    return judge


def _score_masked(model: nn.Module, feeder: MaskedFeeder) -> MaskedScore:
    """Score a model on the masked tokens of the feeder's text."""
    n_hidden = 0

    def batches() -> Iterator[TrainingBatch]:
        nonlocal n_hidden
        for batch in feeder.batches():
            n_hidden += batch.n_targets
            yield batch

    found = Validator(model, batches, smoothing=0.0, judge=masked_judge(feeder), criterion=predict_masked_tokens)()
    return MaskedScore(
        loss=found["loss"] if feeder.pairs else found["nll"],  # includes the loss on pairs
        nll=found["nll"],
        masked_accuracy=found["masked_accuracy"],
        next_sentence_accuracy=found.get("next_sentence_accuracy") if feeder.pairs else None,
        n_hidden=n_hidden,
        n_tokens=len(feeder.store.ids),
        n_bytes=feeder.store.facts["bytes"],
    )
