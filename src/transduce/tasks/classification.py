"""The task classification: predict the label of a text or of a pair of texts (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.batch import LabelBatch
from transduce.data.encoding import encode_labelled
from transduce.data.preparation import LabelledTexts
from transduce.data.reading import Labelled, number_of, read_labelled
from transduce.data.store import LabelStore
from transduce.decoding.encoders import TextClassifier, longest_of
from transduce.errors import DataError
from transduce.evaluation.metrics import LabelScores, score_labels
from transduce.evaluation.run_record import save_generated, save_set
from transduce.logging import Log
from transduce.runs.atomic import read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import LABELLED, Prepared, Task, ToDraw, held_out_stores, prepare_sets
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import LabelFeeder
from transduce.training.loss import Criterion, predict_labels
from transduce.training.validate import Judge, Validator

N_SAMPLES = 24  # texts that the report shows


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEvaluation:
    """Options of the evaluation of a classifier. `labels`: a file with label<TAB>text lines."""

    labels: Path


class ClassificationTask(Task[LabelledTexts, LabelStore]):
    """Trains a classifier on labelled texts; evaluated by accuracy."""

    name = "classification"
    form = LABELLED
    store = LabelStore
    evaluation = LabelEvaluation

    def prepare(
        self, folder: RunFolder, texts: LabelledTexts, tokenizers: Tokenizers, log: Log
    ) -> Prepared[LabelStore]:
        settings = folder.settings
        labels, max_length = _labels(settings), settings.data.max_length
        longest = longest_of(settings.model, max_length)

        def encode(path: Path, records: Iterable[Labelled], name: str) -> LabelStore:
            store = encode_labelled(path, records, labels, tokenizers.tgt, longest=longest, name=f"{name} text")
            if n_cut := store.facts["longest"]:
                limit = f"{'data.max_length' if longest == max_length else 'model.max_positions'} = {longest}"
                log.say(f"{name}: {n_cut:,} texts fill or exceed {limit}; the rest is cut off; raise it to read more")
            return store

        def describe(store: LabelStore) -> dict[str, Any]:
            counts = {label: int(np.count_nonzero(store.labels == i)) for i, label in enumerate(labels)}
            return {"texts": len(store), "tokens": int(store.lengths.sum()), "labels": counts}

        tokens = folder.path / "tokens"
        tokens.mkdir(exist_ok=True)
        samples = [[example.label, list(example.texts)] for example in islice(texts.valid.read(), N_SAMPLES)]
        write_json(tokens / "samples.json", samples)
        return prepare_sets(self, folder, texts, tokenizers, log, encode=encode, describe=describe)

    def loss(self, settings: Settings) -> Criterion:
        return predict_labels

    def batches(self, prepared: Prepared[LabelStore], settings: Settings, device: torch.device) -> LabelFeeder:
        return LabelFeeder(prepared.train, settings.training, device=device)

    def validate(
        self, model: nn.Module, prepared: Prepared[LabelStore], settings: Settings, device: torch.device
    ) -> Validator:
        feeder = LabelFeeder(prepared.valid, settings.training, device=device)
        return Validator(
            model,
            feeder.batches,
            smoothing=settings.training.label_smoothing,
            judge=_judge(feeder, _labels(settings)),
            precision=settings.training.precision,
            criterion=predict_labels,
        )

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> ToDraw:
        classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        for name, store in held_out_stores(folder, self.store):
            scores = score_labels(store.labels.tolist(), classifier.predict(store), classifier.labels)
            save_set(folder, "label_scores", name, scores.to_json())
            log.say(f"{name}: {scores.lines()[0]}")
        sealed = read_json(folder.path / "tokens" / "samples.json")
        samples = [(label, tuple(texts)) for label, texts in sealed]
        predictions = classifier.classify([texts for _, texts in samples])
        shown = [
            (
                " | ".join(predicted.texts),
                f" → {predicted.label} ({predicted.probability:.0%}"
                + (")" if predicted.label == label else f"; is {label})"),
            )
            for (label, _), predicted in zip(samples, predictions, strict=True)
        ]
        save_generated(folder, "valid", shown, update=update)
        return ()

    def evaluate(self, run: Path, options: LabelEvaluation, *, device: str = "auto") -> LabelScores:
        classifier = TextClassifier.load(run, device=device)
        examples = list(read_labelled(options.labels, classifier.vocabulary))
        if not examples:
            raise DataError(f"{options.labels}: there is no text")
        truth = [number_of(example, classifier.labels) for example in examples]
        predictions = classifier.classify([example.texts for example in examples])
        predicted = [classifier.labels.index(prediction.label) for prediction in predictions]
        return score_labels(truth, predicted, classifier.labels)


def _labels(settings: Settings) -> Sequence[str]:
    return resolved(settings.data.labels, "data.labels")


def _judge(feeder: LabelFeeder, labels: Sequence[str]) -> Judge:
    """Return the `Judge` that scores a classifier in validation: accuracy, macro F1 and Matthews correlation."""

    def predict(model: nn.Module, batches: Iterable[LabelBatch]) -> list[tuple[list[int], list[int]]]:
        device = next(model.parameters()).device
        on_device = (batch.to(device) for batch in batches)
        return [(batch.targets.tolist(), model(*batch.inputs).argmax(-1).tolist()) for batch in on_device]

    def score(outputs: Sequence[tuple[list[int], list[int]]]) -> dict[str, float]:
        truth, predicted = (list(chain(*of_batches)) for of_batches in zip(*outputs, strict=True))
        scores = score_labels(truth, predicted, labels)
        return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, "matthews": scores.matthews}

    return Judge(items=feeder.batches, outputs=predict, score=score)
