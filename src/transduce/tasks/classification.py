"""Classification: a text or a pair of texts, and its label (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import LabelBatch
from transduce.data.corpus import Labelled, number_of, read_labelled
from transduce.data.encoding import encode_labelled
from transduce.data.preparation import LabelledTexts, read_labelled_texts
from transduce.data.sources import labelled_sources
from transduce.data.store import LabelStore
from transduce.decoding.classifier import TextClassifier, longest_of
from transduce.errors import DataError, SettingsError
from transduce.evaluation.metrics import LabelScores, score_labels
from transduce.evaluation.options import LabelEvaluation
from transduce.evaluation.result_files import Wording, save_generated, save_set
from transduce.evaluation.scored_models import ScoredClassifier
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import TRIED, Prepared, Validation, n_rows_for
from transduce.tasks.defaults import MODEL, TRAINING, Defaults, Facts, Size, choose_vocab_size, for_vectors
from transduce.tasks.monolingual import OneSidedTask
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers
from transduce.training.encoder_feed import LabelFeeder
from transduce.training.loss import Criterion, predict_labels
from transduce.training.validate import Judge

N_SAMPLES = 24  # texts that the report shows
_OF_ANY_MODEL = frozenset({"kind", "dropout", "n_labels"})
"""Model settings that say nothing about how a text is read."""


BERT_CLASSIFICATION = Defaults(
    (
        Size(most=5_000, vocab_size=4_000, preset=("bert-tiny", "bert-tiny"), dropout=0.3, batch=(1024, 1024),
             epochs=20, minutes=(5, 3)),
        Size(most=200_000, vocab_size=8_000, preset=("bert-tiny", "bert-tiny"), dropout=0.3, batch=(2048, 4096),
             epochs=8, minutes=(15, 5)),
        Size(most=math.inf, vocab_size=16_000, preset=("bert-mini", "bert-mini"), dropout=0.1, batch=(4096, 16_384),
             epochs=3, minutes=(120, 30)),
    ),
    {
        **MODEL,
        "tokenizer.vocab_size": lambda facts: (
            None if facts.settings.model.reads_vectors else choose_vocab_size(facts)
        ),
        "model.pooling": for_vectors("mean", "vectors have no [CLS]"),
    },
    {**TRAINING, "training.stop_by": ("accuracy", "the goal of the run")},
)  # fmt: skip
CLASSIFICATION = replace(
    BERT_CLASSIFICATION,
    sizes=(
        Size(most=20_000, vocab_size=4_000, preset=("cnn", "cnn"), dropout=0.3, batch=(1024, 1024), epochs=20,
             minutes=(5, 3)),
        *BERT_CLASSIFICATION.sizes[1:],
    ),
)  # fmt: skip
"""Of single texts, unless the user has chosen the model: a CNN learns more from little text than attention does."""


class ClassificationTask(OneSidedTask[LabelledTexts, LabelStore]):
    """Trains a classifier on labelled texts; evaluated by accuracy."""

    name = "classification"
    wording = Wording(
        title="A classifier of {text}s with the labels {labels}",
        does="predicts labels",
        command="transduce classify THIS_FOLDER {input} > labels.txt",
        python="TextClassifier.load(FOLDER).classify([{example}])[0].label",
        samples="Predictions",
        shape="classifier of {text}s · {model}",
        limits=("It reads the first {max_length} {tokens} of a {text}.",),
    )
    scored_model = ScoredClassifier
    reads = "labelled"
    unit = "labelled texts"
    sources = staticmethod(labelled_sources)
    read_texts = staticmethod(read_labelled_texts)
    leak_unit = "texts"
    defaults = CLASSIFICATION
    store = LabelStore
    uses = frozenset({"data.max_length", "data.labels", "tokenizer.mask", "tokenizer.exact"})

    def check(self, settings: Settings, model: ModelSettings) -> None:
        super().check(settings, model)
        data = settings.data
        if data.max_length < 8:
            raise SettingsError(f"data.max_length = {data.max_length}: must be at least 8, special tokens included")
        tokenizer = settings.tokenizer
        for key in tokenizer.model_fields_set - {"start"} if model.reads_vectors else ():
            if getattr(tokenizer, key) != type(tokenizer).model_fields[key].default:
                raise SettingsError(f"tokenizer.{key} has no effect with model.source = 'vectors'; leave it out")
        if data.labels is not None and len(set(data.labels)) < max(2, len(data.labels)):
            raise SettingsError(f"data.labels = {list(data.labels)}: must be at least two, all different")

    def facts(self, asked: Settings, texts: LabelledTexts, machine: Machine) -> Facts:
        """The number of texts, and the labels. Pairs of texts, and models that the user describes, are BERT's."""
        known = asked.with_values("data", labels=list(texts.labels))
        known = known.with_values("model", n_labels=len(texts.labels))
        is_pair, is_described = len(texts.sample[0]) > 1, asked.model.model_fields_set - _OF_ANY_MODEL
        defaults = BERT_CLASSIFICATION if is_pair or is_described else self.defaults
        return replace(super().facts(known, texts, machine), sizes=defaults.sizes)

    def count_tokens(self, texts: LabelledTexts, tokenizers: Tokenizers) -> int:
        some = texts.sample[:: max(1, len(texts.sample) // min(TRIED, tokenizers.tgt.chunk))]
        ids = tokenizers.tgt.encode_batch([text for example in some for text in example])
        return round((sum(map(len, ids)) / len(some) + 1 + len(some[0])) * texts.train.size)

    def encode_set(
        self, folder: Path, records: Iterable[Labelled], vocabulary: Vocabulary, settings: Settings, *, name: str
    ) -> LabelStore:
        labels, longest = _labels(settings), longest_of(settings.model, settings.data.max_length)
        return encode_labelled(folder, records, labels, vocabulary, longest=longest, name=name)

    def check_set(self, store: LabelStore, name: str, vocabulary: Vocabulary, settings: Settings, log: Log) -> None:
        if cut := store.facts["longest"]:
            longest = longest_of(settings.model, settings.data.max_length)
            limit = "data.max_length" if longest == settings.data.max_length else "model.max_positions"
            log.say(
                f"{name}: {cut:,} texts fill or exceed {limit} = {longest}; the rest is cut off; raise it to read more"
            )

    def text_of(self, record: Labelled) -> str:
        return " ".join(record.texts)

    def describe(self, store: LabelStore, settings: Settings) -> dict[str, Any]:
        counts = {label: int(np.count_nonzero(store.labels == i)) for i, label in enumerate(_labels(settings))}
        return {"texts": len(store), "tokens": int(store.lengths.sum()), "labels": counts}

    def save_samples(self, tokens: Path, texts: LabelledTexts) -> None:
        samples = [[e.label, list(e.texts)] for e in islice(texts.valid.read(), N_SAMPLES)]
        write_json(tokens / "samples.json", samples)

    def criterion(self, settings: Settings) -> Criterion:
        return predict_labels

    def feeder(self, prepared: Prepared[LabelStore], settings: Settings, device: torch.device) -> LabelFeeder:
        return LabelFeeder(prepared.train, settings.training, device=device)

    def longest_rows(self, prepared: Prepared[LabelStore], settings: Settings) -> Prepared[LabelStore]:
        length, store = longest_of(settings.model, settings.data.max_length), prepared.train
        n = n_rows_for(length, settings)
        ids = np.tile(np.resize(store.ids[:length], length), n)
        ends, zeros = np.full(n, length, dtype=np.int32), np.zeros(n, dtype=np.int32)
        return replace(prepared, train=LabelStore(ids, np.arange(n + 1) * length, ends, zeros, store.facts))

    def validation(self, prepared: Prepared[LabelStore], settings: Settings, device: torch.device) -> Validation:
        feeder = LabelFeeder(prepared.valid, settings.training, device=device)
        return Validation(feeder.batches, judge=_judge(feeder, _labels(settings)))

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        tokens = folder.path / "tokens"
        for name, store in self.held_out_stores(folder):
            scores = score_labels(store.labels.tolist(), classifier.predict(store), classifier.labels)
            save_set(folder, "label_scores", name, scores.to_json())
            log.say(f"{name}: {scores.lines()[0]}")
        with expecting(tokens / "samples.json"):
            samples = [(str(label), tuple(map(str, texts))) for label, texts in read_json(tokens / "samples.json")]
            if not all(1 <= len(texts) <= 2 for _, texts in samples):
                raise ValueError("one text or two")
        predictions = classifier.classify([texts for _, texts in samples])
        shown = [
            (
                " | ".join(one.texts),
                f" → {one.label} ({one.probability:.0%}" + (")" if one.label == label else f"; is {label})"),
            )
            for (label, _), one in zip(samples, predictions, strict=True)
        ]
        save_generated(folder, "valid", shown, update=update)

    def evaluate(self, run: Path, options: LabelEvaluation, *, device: str = "auto") -> LabelScores:
        classifier = TextClassifier.load(run, device=device)
        examples = list(read_labelled(options.labels, classifier.vocabulary))
        if not examples:
            raise DataError(f"{options.labels}: there is no text")
        truth = [number_of(example, classifier.labels) for example in examples]
        predicted = [classifier.labels.index(one.label) for one in classifier.classify([e.texts for e in examples])]
        return score_labels(truth, predicted, classifier.labels)


def _labels(settings: Settings) -> Sequence[str]:
    return resolved(settings.data.labels, "data.labels")


def _judge(feeder: LabelFeeder, labels: Sequence[str]) -> Judge:
    """Of the feeder's batches, so that a text has the same neighbours whatever the number of ranks."""

    def predict(model: nn.Module, batches: Iterable[LabelBatch]) -> list[tuple[list[int], list[int]]]:
        device = next(model.parameters()).device
        on_device = (batch.to(device) for batch in batches)
        return [(batch.targets.tolist(), model(*batch.inputs).argmax(-1).tolist()) for batch in on_device]

    def score(outputs: Sequence[tuple[list[int], list[int]]]) -> dict[str, float]:
        truth, predicted = (list(chain(*of_batches)) for of_batches in zip(*outputs, strict=True))
        scores = score_labels(truth, predicted, labels)
        return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, "matthews": scores.matthews}

    return Judge(items=feeder.batches, outputs=predict, score=score)
