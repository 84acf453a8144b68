"""Classification: a text or a pair of texts, and its label (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import nn

from transduce.config import ModelSettings, Settings
from transduce.data.arrays import check_ids, check_lengths
from transduce.data.corpus import distinct
from transduce.data.label_store import LabelStore, build_label_store, count_labels
from transduce.data.labelled import Labelled, labels_in, number_of
from transduce.data.leaks import SeenCheck, watch
from transduce.data.sources import Sources, labelled_sources
from transduce.data.stored import read_names
from transduce.data.text_store import fingerprint_of_text
from transduce.decoding.classifier import TextClassifier, longest_of
from transduce.errors import DataError, SettingsError
from transduce.evaluation.classification import score_labels
from transduce.evaluation.finalize import finalize
from transduce.evaluation.records import save_generated, save_task_scores
from transduce.evaluation.wording import Wording, shape_line
from transduce.logging import Log
from transduce.machine import Machine
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Task
from transduce.tasks.choices import Facts
from transduce.tasks.defaults import CLASSIFICATION
from transduce.tasks.plain_text import told_leaks
from transduce.tasks.worst_batch import n_rows_of, tiled
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.criteria import predict_labels
from transduce.training.encoder_feed import LabelFeeder
from transduce.training.validate import Judge, Validator

HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 2_000
N_SAMPLES = 24


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """What the files hold. `valid` is drawn from the training text where no file is given for it."""

    train: list[Labelled]
    valid: list[Labelled]
    tests: dict[str, list[Labelled]]
    labels: tuple[str, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PreparedLabels:
    """What training eats."""

    tokenizers: Tokenizers
    train: LabelStore
    valid: LabelStore


class ClassificationTask(Task[LabelledTexts, PreparedLabels]):
    """Labelled texts to a classifier, judged by accuracy."""

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
        """Refuse data settings of other tasks, and labels that are one."""
        data = settings.data
        if data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus is for task 'translation'")
        for corpus in (*data.train, *data.valid, *data.test):
            if corpus.path is None or corpus.weight != 1:
                raise SettingsError("task 'classification' takes path = \"...\" of label<TAB>text, without weights")
        if data.max_length < 8:
            raise SettingsError(f"data.max_length = {data.max_length}: must hold 8 tokens, the special ones among them")
        if data.labels is not None and len(set(data.labels)) < max(2, len(data.labels)):
            raise SettingsError(f"data.labels = {list(data.labels)}: at least two, and none twice")

    def sources(self, settings: Settings) -> Sources[Labelled]:
        """Labelled texts."""
        return labelled_sources(settings.data)

    def read(self, settings: Settings, log: Log, sources: Sources[Labelled] | None = None) -> LabelledTexts:
        """Read all files; labels are those of the training text, or those that the settings name."""
        data, sources = settings.data, sources or self.sources(settings)
        train = list(chain.from_iterable(source.read() for source in sources.train))
        digests = tuple(source.digest() for source in sources.train)
        labels = data.labels or labels_in(train)  # of all of it: the only text with a label may be held out
        names = distinct([source.name for source in sources.tests])
        tests = {name: list(source.read()) for name, source in zip(names, sources.tests, strict=True)}
        if sources.valid:
            valid = list(chain.from_iterable(source.read() for source in sources.valid))
        else:
            if not _n_held_out(train):
                files = ", ".join(source.name for source in sources.train)
                raise DataError(f"{files}: {len(train)} labelled texts are too few to hold some out; give data.valid")
            train, valid = _hold_out(train, settings.training.seed)
            log.say(f"no validation text given: {len(valid):,} texts are held out for it, drawn by seed")
        if len(labels) < 2:
            raise DataError(
                f"the training text has one label only, {labels[0] if labels else 'none'!r}: nothing to tell"
            )
        for name, found in {"training": train, "validation": valid, **tests}.items():
            if not found:
                raise DataError(f"{name} text: there is no text")
            for example in found:
                number_of(example, labels)
            if len(found[0].texts) != len(train[0].texts):
                raise DataError(
                    f"{name} text has {len(found[0].texts)} texts a line, training text {len(train[0].texts)}"
                )
        for label in sorted(set(labels) - {example.label for example in train}):
            log.warn(f"label {label!r} stands in no training text: it will not be learned")
        log.say(
            f"{len(train):,} labelled texts to train on, {len(valid):,} to validate on; labels: {', '.join(labels)}"
        )
        return LabelledTexts(train, valid, tests, labels, digests)

    def facts(self, asked: Settings, texts: LabelledTexts, machine: Machine) -> Facts:
        """The number of texts decides."""
        known = asked.with_values("data", labels=list(texts.labels))
        known = known.with_values("model", n_labels=len(texts.labels))
        return Facts(known, known, machine, self.defaults, len(texts.train))

    def lines(self, texts: LabelledTexts, settings: Settings) -> tuple[Iterator[str], Iterator[str]]:
        """The texts without their labels."""
        return chain.from_iterable(example.texts for example in texts.train), iter(())

    def count_tokens(self, texts: LabelledTexts, tokenizers: Tokenizers, settings: Settings) -> int:
        """Tokens of all texts, estimated."""
        some = texts.train[:: max(1, len(texts.train) // 2000)]
        ids = tokenizers.tgt.encode_batch([text for example in some for text in example.texts])
        return round((sum(map(len, ids)) / len(some) + 1 + len(some[0].texts)) * len(texts.train))

    def encode(
        self, folder: RunFolder, texts: LabelledTexts, tokenizers: Tokenizers, settings: Settings, log: Log
    ) -> PreparedLabels:
        """One store a set."""
        tokens, sets = folder.path / "tokens", {"train": texts.train, "valid": texts.valid, **texts.tests}
        tokens.mkdir(exist_ok=True)
        longest, described = longest_of(settings.model, settings.data.max_length), []
        for number, (name, examples) in enumerate(sets.items()):
            mark = "" if number else self.fingerprint(settings, tokenizers, texts.digests)
            at = tokens / (name if number < 2 else f"test.{number - 2}")
            store = build_label_store(at, examples, texts.labels, tokenizers.tgt, longest=longest, fingerprint=mark)
            files = sorted({Path(example.place[0]).name for example in examples})
            counts = count_labels(store, texts.labels)
            described.append(
                {
                    "name": name,
                    "files": files,
                    "texts": len(store),
                    "tokens": int(store.lengths.sum()),
                    "labels": counts,
                }
            )
            if cut := store.facts["longest"]:
                log.say(f"{name}: {cut:,} texts fill or exceed data.max_length = {longest} tokens and are cut there")
        write_json(tokens / "tests.json", list(texts.tests))
        write_json(tokens / "samples.json", [[e.label, list(e.texts)] for e in texts.valid[:N_SAMPLES]])
        folder.save_tokenizers(tokenizers)
        train = LabelStore.open(tokens / "train")
        held_out = {name: examples for name, examples in sets.items() if name != "train"}
        checks = [SeenCheck(name, map(_whole, examples), unit="texts") for name, examples in held_out.items()]
        for _ in watch(texts.train, _whole, checks):
            pass
        report = {"fingerprint": train.facts["fingerprint"], "sets": described, "leaks": told_leaks(checks, log)}
        folder.write_record("data.json", report)
        return PreparedLabels(tokenizers, train, LabelStore.open(tokens / "valid"))

    def open_prepared(self, folder: RunFolder) -> PreparedLabels:
        """Both stores."""
        tokens = folder.path / "tokens"
        tokenizers, labels = load_tokenizers(folder), folder.settings.data.labels or ()
        stores = {name: LabelStore.open(tokens / name) for name in ("train", "valid")}
        for name, store in stores.items():
            check_ids(tokens / name / "ids.npy", store.ids, tokenizers.n_tgt)
            check_ids(tokens / name / "labels.npy", store.labels, len(labels))
            longest = longest_of(folder.settings.model, folder.settings.data.max_length)
            check_lengths(tokens / name / "offsets.npy", store.offsets, longest)
        return PreparedLabels(tokenizers, **stores)

    def fingerprint(self, settings: Settings, tokenizers: Tokenizers, digests: Sequence[bytes]) -> str:
        """Of files, labels and vocabulary."""
        data = settings.data
        marks = (f"held out: {not data.valid}", f"labels: {data.labels}", f"seed: {settings.training.seed}")
        return fingerprint_of_text(digests, tokenizers.tgt, *marks)

    def feeder(self, prepared: PreparedLabels, settings: Settings, device: torch.device) -> LabelFeeder:
        """Batches of texts of like length."""
        return LabelFeeder(prepared.train, settings.training, device=device)

    def longest(self, prepared: PreparedLabels, settings: Settings) -> PreparedLabels:
        """Texts of the length at which they are cut."""
        length, store = longest_of(settings.model, settings.data.max_length), prepared.train
        n = n_rows_of(length, settings)
        ids = np.tile(tiled(store.ids, length), n)
        ends, zeros = np.full(n, length, dtype=np.int32), np.zeros(n, dtype=np.int32)
        return replace(prepared, train=LabelStore(ids, np.arange(n + 1) * length, ends, zeros, store.facts))

    def validator(
        self, model: nn.Module, prepared: PreparedLabels, settings: Settings, device: torch.device
    ) -> Validator:
        """The loss on the held-out texts, and the scores of the labels told."""
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
        """Score the held-out texts, show some, report."""
        classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        tokens = folder.path / "tokens"
        names = {"valid": "valid"} | {name: f"test.{i}" for i, name in enumerate(read_names(tokens / "tests.json"))}
        for name, at in names.items():
            store = LabelStore.open(tokens / at)
            scores = score_labels(store.labels.tolist(), classifier.tell(store), classifier.labels)
            save_task_scores(folder, "label_scores", name, scores.to_json())
            log.say(f"{name}: {scores.lines()[0]}")
        with expecting(tokens / "samples.json"):
            samples = [(str(label), tuple(map(str, texts))) for label, texts in read_json(tokens / "samples.json")]
            if not all(1 <= len(texts) <= 2 for _, texts in samples):
                raise ValueError("one text or two")
        told = classifier.classify([texts for _, texts in samples])
        shown = [
            (
                " | ".join(one.texts),
                f" → {one.label} ({one.probability:.0%}" + (")" if one.label == label else f"; is {label})"),
            )
            for (label, _), one in zip(samples, told, strict=True)
        ]
        save_generated(folder, "valid", shown, update=update)
        finalize(folder, self.wording, log)


def _whole(example: Labelled) -> str:
    """What stands for an example when texts are compared."""
    return " ".join(example.texts)


def _n_held_out(examples: Sequence[Labelled]) -> int:
    return min(HELD_OUT_MOST, round(len(examples) * HELD_OUT_SHARE))


def _hold_out(examples: list[Labelled], seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """The rest, and what is held out."""
    held = set(random.Random(seed).sample(range(len(examples)), _n_held_out(examples)))
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]


def _judge(prepared: PreparedLabels, settings: Settings) -> Judge:
    labels = settings.data.labels
    assert labels is not None, "chosen first"
    longest = longest_of(settings.model, settings.data.max_length)

    def judge(model: nn.Module) -> dict[str, float]:
        classifier = TextClassifier(model, prepared.tokenizers.tgt, labels, longest=longest)
        scores = score_labels(prepared.valid.labels.tolist(), classifier.tell(prepared.valid), labels)
        return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, "matthews": scores.matthews}

    return judge
