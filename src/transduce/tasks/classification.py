"""Classification: a text or a pair of texts, and its label (Devlin et al. 2019, 4.1)."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from transduce.checkpoint import RunFolder
from transduce.choose import Chooser, Facts
from transduce.choose_encoder import BEFORE_LABELLED, BEFORE_TRAINING_LABELLED
from transduce.config import Corpus, ModelSettings, Settings
from transduce.data.label_store import LabelStore, build_label_store, count_labels
from transduce.data.labelled import Labelled, labels_in, number_of, read_labelled
from transduce.decoding.classifier import TextClassifier, longest_of
from transduce.errors import DataError, SettingsError, VocabularyTooSmall
from transduce.evaluation.classification import score_labels
from transduce.evaluation.records import save_continuations, save_label_scores
from transduce.files import read_json, write_json
from transduce.finish import conclude
from transduce.log import Log
from transduce.machine import Machine
from transduce.tasks.base import Task
from transduce.tasks.start import begin, tokenizers_of, with_start
from transduce.text.tokenizer import Tokenizers
from transduce.text.training import train_tokenizer
from transduce.training.criteria import tell_labels
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


@dataclass(frozen=True, slots=True)
class PreparedLabels:
    """What training eats."""

    tokenizers: Tokenizers
    train: LabelStore
    valid: LabelStore


class ClassificationTask(Task[LabelledTexts, PreparedLabels]):
    """Labelled texts to a classifier, judged by accuracy."""

    name = "classification"
    kinds = ("bert-classifier",)
    before_text: ClassVar[tuple[Chooser, ...]] = BEFORE_LABELLED
    before_training: ClassVar[tuple[Chooser, ...]] = BEFORE_TRAINING_LABELLED
    begins = True
    use = "classify"
    criterion = staticmethod(tell_labels)

    def check(self, settings: Settings, model: ModelSettings) -> None:
        """Refuse data settings of other tasks, and labels that are one."""
        super().check(settings, _of_kind(settings).model)
        data = settings.data
        if data.demo:
            raise SettingsError(f"data.demo = {data.demo}: the built-in corpus is for task 'translation'")
        for corpus in (*data.train, *data.valid, *data.test):
            if corpus.path is None or corpus.weight != 1:
                raise SettingsError("task 'classification' takes path = \"...\" of label<TAB>text, without weights")
        if data.max_length < 8:
            raise SettingsError(f"data.max_length = {data.max_length}: must hold 8 tokens, the special ones among them")
        with_start(settings, self.kinds[0])
        if data.labels is not None and len(set(data.labels)) < max(2, len(data.labels)):
            raise SettingsError(f"data.labels = {list(data.labels)}: at least two, and none twice")

    def read(self, settings: Settings, log: Log) -> LabelledTexts:
        """Read all files; labels are those of the training text, or those that the settings name."""
        data = settings.data
        train = list(chain.from_iterable(read_labelled(_path(c)) for c in data.train))
        tests = {_path(c).name: list(read_labelled(_path(c))) for c in data.test}
        if data.valid:
            valid = list(chain.from_iterable(read_labelled(_path(c)) for c in data.valid))
        else:
            train, valid = _hold_out(train, settings.training.seed)
            log.say(f"no validation text given: {len(valid):,} texts are held out for it, drawn by seed")
        labels = data.labels or labels_in(train)
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
        log.say(
            f"{len(train):,} labelled texts to train on, {len(valid):,} to validate on; labels: {', '.join(labels)}"
        )
        return LabelledTexts(train, valid, tests, labels)

    def facts(self, asked: Settings, texts: LabelledTexts, machine: Machine) -> Facts:
        """The number of texts decides."""
        known = asked.with_values("data", labels=list(texts.labels))
        known = with_start(_of_kind(known).with_values("model", n_labels=len(texts.labels)), self.kinds[0])
        return Facts(known, known, machine, len(texts.train))

    def learn_vocabulary(self, texts: LabelledTexts, settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
        """One, from the training text, or that of the run to begin with."""
        if (known := tokenizers_of(settings)) is not None:
            return known
        lines = chain.from_iterable(example.texts for example in texts.train)
        return _learn(lines, settings, log, may_grow=may_grow)

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
            mark = _fingerprint(examples, tokenizers) if not number else ""
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
        folder.write_record("data.json", {"fingerprint": train.facts["fingerprint"], "sets": described})
        return PreparedLabels(tokenizers, train, LabelStore.open(tokens / "valid"))

    def find_prepared(self, folder: RunFolder, log: Log) -> PreparedLabels | None:
        """The stores of an earlier start."""
        tokens = folder.path / "tokens"
        if not (folder.path / "data.json").exists() or not folder.has_tokenizers:
            return None
        return PreparedLabels(folder.tokenizers(), LabelStore.open(tokens / "train"), LabelStore.open(tokens / "valid"))

    def begin(self, model: nn.Module, settings: Settings, log: Log) -> None:
        """With another run's weights, where asked for."""
        begin(model, settings, log)

    def feeder(self, prepared: PreparedLabels, settings: Settings, device: torch.device) -> LabelFeeder:
        """Batches of texts of like length."""
        return LabelFeeder(prepared.train, settings.training, device=device)

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
            criterion=tell_labels,
        )

    def tokenizers(self, prepared: PreparedLabels) -> Tokenizers:
        """The one vocabulary, for both sides."""
        return prepared.tokenizers

    def finish(self, folder: RunFolder, *, update: int, log: Log) -> None:
        """Score the held-out texts, show some, report."""
        classifier = TextClassifier.load(folder.path, device=folder.settings.training.device)
        tokens = folder.path / "tokens"
        names = {"valid": "valid"} | {name: f"test.{i}" for i, name in enumerate(read_json(tokens / "tests.json"))}
        for name, at in names.items():
            store = LabelStore.open(tokens / at)
            scores = score_labels(store.labels.tolist(), classifier.tell(store), classifier.labels)
            save_label_scores(folder, name, scores.to_json())
            log.say(f"{name}: {scores.lines()[0]}")
        samples = [(label, tuple(texts)) for label, texts in read_json(tokens / "samples.json")]
        told = classifier.classify([texts for _, texts in samples])
        shown = [
            (
                " | ".join(one.texts),
                f" → {one.label} ({one.probability:.0%}" + (")" if one.label == label else f"; is {label})"),
            )
            for (label, _), one in zip(samples, told, strict=True)
        ]
        save_continuations(folder, "valid", shown, update=update)
        conclude(folder, log)


def _of_kind(settings: Settings) -> Settings:
    """A preset's kind is that of a masked model: the same sizes make a classifier."""
    given = "kind" in settings.model.model_fields_set
    return settings if given else settings.with_values("model", kind=ClassificationTask.kinds[0])


def _path(corpus: Corpus) -> Path:
    assert corpus.path is not None, "checked before"
    return corpus.path


def _hold_out(examples: list[Labelled], seed: int) -> tuple[list[Labelled], list[Labelled]]:
    """The rest, and what is held out."""
    n = min(HELD_OUT_MOST, round(len(examples) * HELD_OUT_SHARE))
    if not n:
        raise DataError(f"{len(examples)} labelled texts are too few to hold some out; give data.valid")
    held = set(random.Random(seed).sample(range(len(examples)), n))
    return [e for i, e in enumerate(examples) if i not in held], [examples[i] for i in sorted(held)]


def _learn(lines: chain[str], settings: Settings, log: Log, *, may_grow: bool) -> Tokenizers:
    size, texts = settings.tokenizer.vocab_size, list(lines)
    assert size is not None, "chosen first"
    try:
        both = train_tokenizer(texts, settings.tokenizer, vocab_size=size, seed=settings.training.seed)
    except VocabularyTooSmall as error:
        if not may_grow:
            raise
        size = error.needed + error.needed // 2
        log.say(f"the text has so many characters that its vocabulary grows to {size:,} pieces")
        larger = settings.with_values("tokenizer", vocab_size=size).tokenizer
        both = train_tokenizer(texts, larger, vocab_size=size, seed=settings.training.seed)
    for note in both.notes:
        log.say(note)
    return Tokenizers(both, both)


def _fingerprint(examples: Sequence[Labelled], tokenizers: Tokenizers) -> str:
    total = hashlib.sha256(hashlib.sha256(tokenizers.tgt.model).digest())
    for example in examples:
        total.update("\t".join((example.label, *example.texts)).encode() + b"\n")
    return total.hexdigest()


def _judge(prepared: PreparedLabels, settings: Settings) -> Judge:
    labels = settings.data.labels
    assert labels is not None, "chosen first"
    longest = longest_of(settings.model, settings.data.max_length)

    def judge(model: nn.Module) -> dict[str, float]:
        classifier = TextClassifier(model, prepared.tokenizers.tgt, labels, longest=longest)
        scores = score_labels(prepared.valid.labels.tolist(), classifier.tell(prepared.valid), labels)
        return {"accuracy": scores.accuracy, "macro_f1": scores.macro_f1, "matthews": scores.matthews}

    return judge
