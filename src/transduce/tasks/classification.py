"""Classification: a text or a pair of texts, and its label (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from transduce.config import ModelSettings, Settings, resolved
from transduce.data.arrays import read_names
from transduce.data.labelled import Labelled
from transduce.data.sources import Sources, labelled_sources
from transduce.data.store import LabelStore
from transduce.decoding.classifier import TextClassifier, longest_of
from transduce.errors import SettingsError
from transduce.evaluation.finalize import finalize
from transduce.evaluation.metrics import score_labels
from transduce.evaluation.records import Wording, save_generated, save_set, shape_line
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json
from transduce.runs.folder import RunFolder
from transduce.tasks import labelled_text
from transduce.tasks.base import Task
from transduce.tasks.choices import Facts
from transduce.tasks.defaults import CLASSIFICATION
from transduce.tasks.labelled_text import LabelledTexts, PreparedLabels
from transduce.tasks.worst_batch import n_rows_of, tiled
from transduce.text.tokenizer import Tokenizers
from transduce.training.encoder_feed import LabelFeeder
from transduce.training.loss import predict_labels
from transduce.training.validate import Judge, Validator


class ClassificationTask(Task[LabelledTexts, PreparedLabels]):
    """Trains a classifier on labelled texts; evaluated by accuracy."""

    name = "classification"
    wording = Wording(
        title="A text classifier with the labels {labels}",
        does="predicts labels",
        command="transduce classify THIS_FOLDER < in.txt > labels.txt",
        python=(
            "from transduce import TextClassifier\n\n"
            'classifier = TextClassifier.load("THIS_FOLDER")\nprint(classifier.classify(["..."])[0].label)'
        ),
        samples="Texts",
        shape=lambda record: f"text classifier · {shape_line(record)}",
        limits=lambda record: (f"It reads the first {record.settings.data.max_length} tokens of a text.",),
    )
    evaluated_on = "--labels"
    reads = "labelled"
    defaults = CLASSIFICATION
    uses = frozenset({"data.max_length", "data.labels", "tokenizer.mask", "tokenizer.exact"})
    criterion = staticmethod(predict_labels)

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse data settings of other tasks, and fewer than two labels."""
        data = settings.data
        if data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus is for task 'translation'")
        for corpus in (*data.train, *data.valid, *data.test):
            if corpus.path is None or corpus.weight != 1:
                raise SettingsError("task 'classification' takes path = \"...\" of label<TAB>text, without weights")
        if data.max_length < 8:
            raise SettingsError(f"data.max_length = {data.max_length}: must be at least 8, special tokens included")
        if data.labels is not None and len(set(data.labels)) < max(2, len(data.labels)):
            raise SettingsError(f"data.labels = {list(data.labels)}: must be at least two, all different")

    def sources(self, settings: Settings) -> Sources[Labelled]:
        """Labelled texts."""
        return labelled_sources(settings.data)

    def read(
        self, settings: Settings, log: Log, sources: Sources[Labelled] | None = None, *, spool_in: Path | None = None
    ) -> LabelledTexts:
        """Labelled texts."""
        texts = labelled_text.read_labelled_texts(settings, log, sources, spool_in=spool_in)
        sizes = f"{texts.n_train:,} labelled texts to train on, {len(texts.valid):,} to validate on"
        log.say(f"{sizes}; labels: {', '.join(texts.labels)}")
        return texts

    def facts(self, asked: Settings, texts: LabelledTexts, machine: Machine) -> Facts:
        """The number of texts, and the labels."""
        known = asked.with_values("data", labels=list(texts.labels))
        known = known.with_values("model", n_labels=len(texts.labels))
        return Facts(known, known, machine, self.defaults, texts.n_train)

    def lines(self, texts: LabelledTexts, settings: Settings) -> tuple[Iterable[str], Iterable[str]]:
        """A sample of the texts, without their labels."""
        return texts.lines(), ()

    def count_tokens(self, texts: LabelledTexts, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of all texts, estimated."""
        return texts.count_tokens(tokenizers)

    def encode(
        self, folder: RunFolder, texts: LabelledTexts, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> PreparedLabels:
        """One store for each set."""
        return labelled_text.encode_labelled_texts(folder, texts, tokenizers, settings, log)

    def open_prepared(self, folder: RunFolder) -> PreparedLabels:
        """Both stores."""
        return labelled_text.open_prepared_labels(folder)

    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of files, labels and vocabulary."""
        return labelled_text.fingerprint(settings, tokenizers, digests)

    def feeder(self, prepared: PreparedLabels, settings: Settings, device: torch.device) -> LabelFeeder:
        """Batches of texts of similar length."""
        return LabelFeeder(prepared.train, settings.training, device=device)

    def longest(self, prepared: PreparedLabels, settings: Settings) -> PreparedLabels:
        """Texts of the maximum length."""
        length, store = longest_of(settings.model, settings.data.max_length), prepared.train
        n = n_rows_of(length, settings)
        ids = np.tile(tiled(store.ids, length), n)
        ends, zeros = np.full(n, length, dtype=np.int32), np.zeros(n, dtype=np.int32)
        return replace(prepared, train=LabelStore(ids, np.arange(n + 1) * length, ends, zeros, store.facts))

    def validator(
        self, model: nn.Module, prepared: PreparedLabels, settings: Settings, device: torch.device
    ) -> Validator:
        """The loss on the held-out texts, and the scores of the predicted labels."""
        return Validator(
            model,
            LabelFeeder(prepared.valid, settings.training, device=device).batches,
            smoothing=settings.training.label_smoothing,
            judge=_judge(prepared, settings),
            precision=settings.training.precision,
            criterion=predict_labels,
        )

    def tokenizers(self, prepared: PreparedLabels) -> Tokenizers:
        """The one vocabulary, for both sides."""
        return prepared.tokenizers

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Score the held-out texts, store samples, write the report."""
        classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        tokens = folder.path / "tokens"
        names = {"valid": "valid"} | {name: f"test.{i}" for i, name in enumerate(read_names(tokens / "tests.json"))}
        for name, at in names.items():
            store = LabelStore.open(tokens / at)
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
        finalize(folder, self.wording, log)


def _judge(prepared: PreparedLabels, settings: Settings) -> Judge:
    labels = resolved(settings.data.labels, "data.labels")
    longest = longest_of(settings.model, settings.data.max_length)

    def judge(model: nn.Module) -> dict[str, float]:
        classifier = TextClassifier(model, prepared.tokenizers.tgt, labels, longest=longest)
        scores = score_labels(prepared.valid.labels.tolist(), classifier.predict(prepared.valid), labels)
        return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, "matthews": scores.matthews}

    return judge
