"""The task masked: masked language modelling, with optional next-sentence prediction (BERT)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.architectures import BertSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import MaskedBatch, mask, word_starts
from transduce.data.encoding import encode_sentences
from transduce.data.preparation import Texts
from transduce.data.reading import Piece, read_pieces
from transduce.data.store import SentenceStore
from transduce.decoding.encoders import MaskFiller
from transduce.decoding.results import MaskedScore
from transduce.errors import DataError, SettingsError
from transduce.evaluation.run_record import save_generated, save_set
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.base import PLAIN, Prepared, Task, ToDraw, held_out_stores, prepare_sets
from transduce.text.special import MASK_PIECE, Vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import MaskedFeeder
from transduce.training.loss import Criterion, predict_masked_tokens
from transduce.training.validate import Judge, Validator

N_SAMPLES, SAMPLE_TOKENS = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTextEvaluation:
    """Options of the evaluation of a masked language model."""

    text: Path
    batch_tokens: int | None = None


class MaskedTask(Task[Texts[Piece], SentenceStore]):
    """Trains a masked language model on plain text with a sentence per line; evaluated by masked-token accuracy."""

    name = "masked"
    form = PLAIN
    store = SentenceStore
    evaluation = MaskedTextEvaluation

    def prepare(
        self, folder: RunFolder, texts: Texts[Piece], tokenizers: Tokenizers, log: Log
    ) -> Prepared[SentenceStore]:
        settings = folder.settings
        longest = resolved(settings.data.context, "data.context") - 3  # a row has three special tokens

        def encode(path: Path, records: Iterable[Piece], name: str) -> SentenceStore:
            store = encode_sentences(path, records, tokenizers.tgt, longest=longest, name=f"{name} text")
            if not masked_feeder(store, tokenizers.tgt, settings, torch.device("cpu")).plan(0):
                raise DataError(f"{name} text: it has nothing to predict")
            return store

        def describe(store: SentenceStore) -> dict[str, Any]:
            return {"documents": store.n_documents, "bytes": store.facts["bytes"], "tokens": len(store.ids)}

        return prepare_sets(self, folder, texts, tokenizers, log, encode=encode, describe=describe)

    def loss(self, settings: Settings) -> Criterion:
        return predict_masked_tokens

    def batches(self, prepared: Prepared[SentenceStore], settings: Settings, device: torch.device) -> MaskedFeeder:
        return masked_feeder(prepared.train, prepared.tokenizers.tgt, settings, device)

    def validate(
        self, model: nn.Module, prepared: Prepared[SentenceStore], settings: Settings, device: torch.device
    ) -> Validator:
        feeder = masked_feeder(prepared.valid, prepared.tokenizers.tgt, settings, device)
        return Validator(
            model,
            feeder.batches,
            smoothing=settings.training.label_smoothing,
            judge=masked_judge(feeder),
            precision=settings.training.precision,
            criterion=predict_masked_tokens,
        )

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> ToDraw:
        settings, stores = folder.settings, dict(held_out_stores(folder, self.store))
        filler = MaskFiller.load(folder.path, device=settings.training.device)
        for name, store in stores.items():
            score = _score(filler, masked_feeder(store, filler.vocabulary, settings, filler.device))
            save_set(folder, "masked_scores", name, score.to_json())
            log.say(f"{name}: {score.lines()[0]}")
        texts = _masked_samples(stores["valid"], filler.vocabulary)
        shown = []
        for filled in filler.fill(texts) if texts else ():
            predictions = ", ".join(f"{c.token} {c.probability:.0%}" for c in filled.masks[0])
            shown.append((filled.text, f" → {predictions}"))
        save_generated(folder, "valid", shown, update=update)
        return ()

    def evaluate(self, run: Path, options: MaskedTextEvaluation, *, device: str = "auto") -> MaskedScore:
        """Score predictions of masked tokens in a text, which is divided into rows as in training.

        The run's seed determines the masked tokens, so that scores are reproducible and, on the validation text, equal
        the scores in training. A text of a single document gets no next-sentence accuracy.
        """
        filler = MaskFiller.load(run, device=device)
        settings, training, context = filler.settings, filler.settings.training, filler.context
        pieces = read_pieces(options.text, settings.data.documents)
        store = encode_sentences(None, pieces, filler.vocabulary, longest=context - 3, name=str(options.text))
        budget = options.batch_tokens or training.micro_batch_tokens or training.batch_tokens
        budget = max(context, budget or settings.decoding.batch_tokens)
        settings = settings.with_values("data", context=context)
        settings = settings.with_values("training", batch_tokens=budget, micro_batch_tokens=budget)
        if store.n_documents < 2:
            settings = settings.with_values("model", next_sentence=False)
        return _score(filler, masked_feeder(store, filler.vocabulary, settings, filler.device))


def masked_feeder(
    store: SentenceStore, vocabulary: Vocabulary, settings: Settings, device: torch.device
) -> MaskedFeeder:
    """Return a feeder of rows with masked tokens. Rows are pairs of segments if the model predicts next sentences."""
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
        pairs=isinstance(settings.model, BertSettings) and settings.model.next_sentence,
    )


def masked_judge(feeder: MaskedFeeder) -> Judge:
    """Return the `Judge` of validation: masked-token accuracy and, for pairs of segments, next-sentence accuracy."""

    def counts(model: Any, batches: Iterable[MaskedBatch]) -> list[tuple[int, int, int, int]]:
        """Count, in each batch, correct and all masked tokens, then correct and all pairs."""
        device = next(model.parameters()).device
        counted = []
        for batch in (batch.to(device) for batch in batches):
            hidden, follows = model(*batch.inputs)
            right = int((model.logits(hidden).argmax(-1) == batch.targets).sum())
            followed = 0 if follows is None else int((follows.argmax(-1) == batch.labels).sum())
            counted.append((right, batch.n_targets, followed, 0 if follows is None else len(batch.labels)))
        return counted

    def score(outputs: Sequence[tuple[int, int, int, int]]) -> dict[str, float]:
        right, n, followed, n_pairs = map(sum, zip(*outputs, strict=True))
        scores = {"masked_accuracy": right / max(1, n)}
        return scores | ({"next_sentence_accuracy": followed / n_pairs} if n_pairs else {})

    return Judge(items=feeder.batches, outputs=counts, score=score)


def _score(filler: MaskFiller, feeder: MaskedFeeder) -> MaskedScore:
    validator = Validator(
        filler.model, feeder.batches, smoothing=0.0, judge=masked_judge(feeder), criterion=predict_masked_tokens
    )
    scores = validator()
    return MaskedScore(
        loss=scores["loss"] if feeder.pairs else scores["nll"],  # includes the loss on pairs
        nll=scores["nll"],
        masked_accuracy=scores["masked_accuracy"],
        next_sentence_accuracy=scores.get("next_sentence_accuracy") if feeder.pairs else None,
        n_hidden=sum(batch.n_targets for batch in feeder.batches()),
        n_tokens=len(feeder.store.ids),
        n_bytes=feeder.store.facts["bytes"],
    )


def _masked_samples(store: SentenceStore, vocabulary: Vocabulary) -> list[str]:
    n, texts = len(store.offsets) - 1, []
    for i in range(N_SAMPLES):
        words = vocabulary.decode(store.span(k := n * i // N_SAMPLES, k + 1)[:SAMPLE_TOKENS].tolist()).split()
        if len(words) > 3:
            position = 1 + (i * 5) % (len(words) - 2)
            texts.append(" ".join([*words[:position], MASK_PIECE, *words[position + 1 :]]))
    return list(dict.fromkeys(texts))
