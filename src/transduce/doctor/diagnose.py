"""Check the text, the memory and the time of a training before it starts: `transduce.diagnose`, `transduce doctor`."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.clean import RATIO, TOO_LONG
from transduce.data.reading import Sample, Sources, sorted_labels, take_sample
from transduce.distributed.group import check_devices
from transduce.doctor.checks import Finding, Level, note_or_warning, percent, run_checks, texts_of
from transduce.doctor.resources import FULL, Trial, measure, size, tokens_at_once
from transduce.errors import UserError, message_of
from transduce.logging import Log, duration
from transduce.machine import Machine, this_machine
from transduce.runs.folder import RunFolder
from transduce.tasks.base import AnyTask
from transduce.tasks.finetune import Start, extend_vocabulary, find_start
from transduce.tasks.resolve import check, name_languages, resolve
from transduce.text.special import Vocabulary
from transduce.text.tokenizer import Tokenizers

SECONDS = 10.0  # default duration of the timed updates in seconds
TRAINED, HELD_OUT = 12_000, 1_000  # numbers of records in the trial's training and validation text
ENCODED = 2_000  # records of each set that are searched for unknown characters
ROOM = 0.8  # fraction of the free memory that a training may use without a warning
FEWEST_TOKENS = 64  # tokens in the smallest useful micro-batch
_DAY = 86_400.0
_QUIET = Log(quiet=True)


@dataclass(frozen=True, slots=True)
class Time:
    """Predicted duration of a training without its validations. `by`: the limit that ends the training."""

    updates: int
    epochs: float
    seconds: float
    by: str


@dataclass(slots=True)
class Diagnosis:
    """Findings and measurements. A field is None if an obstacle or lack of time prevented its measurement.

    `settings`: resolved settings of the training. `available`: free memory in bytes. `corpora`: number of records by
    corpus or held-out set.
    """

    findings: list[Finding] = field(default_factory=list)
    corpora: dict[str, int] = field(default_factory=dict)
    machine: str = ""
    available: int = 0
    settings: Settings | None = None
    trial: Trial | None = None
    time: Time | None = None

    @property
    def ready(self) -> bool:
        return not self.obstacles

    @property
    def obstacles(self) -> list[Finding]:
        return self.of_level("obstacle")

    def of_level(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == level]

    def to_json(self) -> dict[str, Any]:
        settings = self.settings and self.settings.model_dump(mode="json")
        return {"ready": self.ready, **asdict(replace(self, settings=None)), "settings": settings}

    def lines(self) -> list[str]:
        """Format for people; the last line is the verdict."""
        rows = [("data", f"{name}: {total:,}") for name, total in self.corpora.items()]
        rows += [("machine", self.machine), *self._measured()]
        rows += [("note", finding.line) for finding in self.of_level("note")]
        lines = [f"{name:<10}{text}" for name, text in rows if text]
        problems = (*self.of_level("warning"), *self.obstacles)
        lines += ["", *(f"{finding.level}: {finding.line}" for finding in problems)]
        n = len(self.obstacles)
        return [*lines, "ready" if self.ready else f"not ready: {n} obstacle{'s' if n > 1 else ''}"]

    def _measured(self) -> Iterator[tuple[str, str]]:
        trial, settings, time = self.trial, self.settings, self.time
        if trial is None or settings is None:
            return
        preset = f"{settings.model.preset}, " if settings.model.preset else ""
        yield "model", f"{preset}{trial.parameters:,} parameters, vocabulary {settings.tokenizer.vocab_size or 0:,}"
        if trial.peak is not None:
            yield "memory", f"{size(trial.peak)} for the largest update, {size(self.available)} free"
        if trial.seconds_per_update is not None:
            each = f"{trial.seconds_per_update:.3g} s per update ({trial.updates} measured)"
            yield "speed", f"{trial.targets_per_second:,.0f} target tokens/s, {each}"
        if time is not None:
            until = f"training.{time.by} ({time.updates:,} updates, {time.epochs:.1f} epochs)"
            yield "time", f"about {duration(time.seconds)} until {until}, without validations"


def diagnose(settings: Settings, *, log: Log | None = None, seconds: float = SECONDS, processes: int = 1) -> Diagnosis:
    """Check text and machine before a training. Problems are returned as findings, not raised. Leaves no files.

    If there are no obstacles, a child process measures a few updates.

    Args:
        settings: The settings of the training.
        log: Log for progress; none by default.
        seconds: Duration of the timed updates.
        processes: Number of processes that train together on this machine.

    Raises:
        SettingsError: The source consists of vectors instead of text.
    """
    settings.model.require_text("the doctor")
    diagnosis, log = Diagnosis(), log or _QUIET
    try:
        start = find_start(settings)
        if start is not None:
            settings = start.settings
        task = check(settings)
        machine = this_machine(settings.training.device).shared(1, processes)  # counts the threads of all processes
        check_devices(torch.device(machine.device), processes)
        diagnosis.machine, diagnosis.available = machine.describe(), machine.memory
        settings = name_languages(settings, task, log)
        log.say("reading the text ...")
        sample = take_sample(task.form.sources(settings))
        diagnosis.corpora = {corpus.name: corpus.total for corpus in (*sample.train, *sample.valid, *sample.tests)}
        diagnosis.findings += run_checks(sample, settings.data, task.form.name)
        if diagnosis.ready:
            _try_training(diagnosis, task, settings, sample, start=start, machine=machine, log=log, seconds=seconds)
    except UserError as error:
        diagnosis.findings.append(Finding("settings", "obstacle", message_of(error)))
    return diagnosis


def _try_training(
    diagnosis: Diagnosis,
    task: AnyTask,
    asked: Settings,
    sample: Sample[Any],
    *,
    start: Start | None,
    machine: Machine,
    log: Log,
    seconds: float,
) -> None:
    """Complete `diagnosis`: resolve settings, train a vocabulary, run some updates in a temporary run folder."""
    asked, sources, n_records = _for_trial(asked, sample, task)
    scale = sample.total / n_records
    texts = task.form.read_texts(asked, _QUIET, sources)
    known = None if start is None else extend_vocabulary(start, texts.lines(), _QUIET).tokenizers
    settings, tokenizers = resolve(task, asked, texts, machine, _QUIET, known=known, scale=scale)
    diagnosis.findings += _unknown_characters(sample, tokenizers, coverage=settings.tokenizer.character_coverage)
    log.say("trying some updates ...")
    with tempfile.TemporaryDirectory(prefix="transduce-doctor-") as temporary:
        with RunFolder.create(Path(temporary) / "run", settings, "") as run:
            prepared = task.prepare(run, texts, tokenizers, _QUIET)
        diagnosis.findings += _too_long(prepared.train.facts)
        trial = measure(run.path, seconds=seconds, processes=machine.n_sharing)
    diagnosis.settings, diagnosis.trial = settings, trial
    diagnosis.findings += memory_findings(settings, trial, diagnosis.available, machine.n_sharing)
    if trial.seconds_per_update is not None:
        weights = [corpus.weight for corpus in asked.data.train] or [1.0]
        weighted = sum(weight * corpus.total for weight, corpus in zip(weights, sample.train, strict=True))
        time = time_of(settings, trial.updates_per_epoch * weighted / n_records, trial.seconds_per_update)
        diagnosis.time = time
        diagnosis.findings += time_findings(settings, time)


def _for_trial(asked: Settings, sample: Sample[Any], task: AnyTask) -> tuple[Settings, Sources[Any], int]:
    """Return settings and sources for training on a part of the sample, and the number of its training records."""
    train = tuple(corpus.some(round(TRAINED * corpus.total / sample.total)) for corpus in sample.train)
    valid = tuple(held.some(HELD_OUT // len(sample.valid)) for held in sample.valid)
    if task.form.name == "labelled" and asked.data.labels is None:  # a part of the text may lack a rare label
        held_out = (window for corpus in sample.valid for window in corpus.kept)
        everything = chain(sample.records(), () if sample.is_whole else chain.from_iterable(held_out))
        asked = asked.with_values("data", labels=list(sorted_labels(example.label for example in everything)))
    return asked, Sources(train, valid), sum(1 for source in train for _ in source.read())


def _too_long(facts: Any) -> Iterator[Finding]:
    """Report the share of pairs that training drops because they are too long."""
    cleaning = facts.get("cleaning", {"dropped": []})
    for tally in cleaning["dropped"]:
        if tally["reason"] in (TOO_LONG, RATIO):
            share = tally["count"] / cleaning["read"]
            text = f"{percent(share)} of the pairs are dropped: {tally['reason']}"
            advice = "data.max_length and data.max_ratio allow more"
            yield note_or_warning(share > 0.02, "lengths", text, advice, {"share": round(share, 4)})


def _unknown_characters(sample: Sample[Any], tokenizers: Tokenizers, *, coverage: float) -> Iterator[Finding]:
    """Report characters of the training text and of the held-out sets that the vocabulary lacks."""
    tokenizers = tokenizers.unframed()
    for corpus in (*sample.train, *sample.valid, *sample.tests):
        sides = zip(*(texts_of(record) for record in corpus.some(ENCODED).read()), strict=True)
        for texts, vocabulary in zip(sides, (tokenizers.src, tokenizers.tgt), strict=False):
            yield from _unknown(corpus.name, texts, vocabulary, coverage=coverage)


def _unknown(name: str, texts: Sequence[str], vocabulary: Vocabulary, *, coverage: float) -> Iterator[Finding]:
    encoded = vocabulary.encode_batch(list(texts))
    affected = [text for text, ids in zip(texts, encoded, strict=True) if not vocabulary.unreadable_ids.isdisjoint(ids)]
    if not affected:
        return
    missing = Counter(part for text in affected for part in vocabulary.unknown(text))
    shown = " ".join(f"{part} (U+{ord(part[0]):04X})" if len(part) == 1 else part for part, _ in missing.most_common(8))
    share = len(affected) / len(texts)
    text = f"{percent(share)} of the lines of {name} have characters that are not in the vocabulary: {shown}"
    advice = "clean these lines, or train the vocabulary on text that has them"
    if coverage < 1:
        advice = "tokenizer.character_coverage = 1 includes all characters of the training text"
    yield note_or_warning(share > 0.005, "vocabulary", text, advice, {"share": round(share, 5)})


def memory_findings(settings: Settings, trial: Trial, available: int, processes: int = 1) -> Iterator[Finding]:
    """Check that the largest batch fits into the free memory."""
    micro = tokens_at_once(settings, processes)
    fits = micro // 2
    if trial.peak is not None:
        fits = min(fits, int(micro * max(0.0, ROOM * available - trial.base) / max(1, trial.peak - trial.base)))
    advice = f"training.micro_batch_tokens = {fits} splits updates into parts that fit, with the same gradient"
    if fits < max(FEWEST_TOKENS, settings.data.context or 0):
        smallest = next(iter(settings.model.presets), None)
        named = "" if smallest in (None, settings.model.preset) else f" (model.preset = {smallest})"
        advice = f"use a smaller model{named} or shorter texts"
    if trial.died == FULL:
        yield Finding("memory", "obstacle", f"the trial ran out of memory, with batches of {micro:,} tokens", advice)
    elif trial.died:
        advice = "memory or speed is unknown; try again when the machine is less busy, or use a smaller model"
        yield Finding("memory", "warning", f"the trial ended too early: {trial.died}", advice)
    if trial.peak is not None and trial.peak > ROOM * available:
        text = f"an update with {micro:,} tokens at once takes {size(trial.peak)} of the {size(available)} free"
        yield Finding("memory", "obstacle" if trial.peak > available else "warning", text, advice)


def time_of(settings: Settings, updates_per_epoch: float, seconds_per_update: float) -> Time:
    """Predict the duration until the first limit of the settings is reached."""
    training, per_epoch = settings.training, max(1.0, updates_per_epoch)
    ends = {
        "max_updates": training.max_updates,
        "max_epochs": training.max_epochs and math.ceil(training.max_epochs * per_epoch),
        "max_minutes": training.max_minutes and int(training.max_minutes * 60 / seconds_per_update),
    }
    updates, by = min((max(1, int(end)), name) for name, end in ends.items() if end is not None)
    return Time(updates, updates / per_epoch, updates * seconds_per_update, by)


def time_findings(settings: Settings, time: Time) -> Iterator[Finding]:
    """Warn if training takes more than a week, ends before it has seen all text, or is mostly warmup."""
    if time.seconds > 7 * _DAY:
        text, advice = f"training will take {time.seconds / _DAY:.0f} days", "limit it with training.max_minutes"
        yield Finding("time", "warning", text, advice)
    if time.epochs < 0.9 and time.by == "max_minutes":
        text = f"{duration(time.seconds)} of updates are {time.epochs:.2f} epochs: training will not see all text"
        yield Finding("time", "warning", text, "raise training.max_minutes, or use a smaller model")
    warmup = resolved(settings.training.warmup_updates, "training.warmup_updates")
    if warmup > 0.5 * time.updates:
        text = f"training.warmup_updates = {warmup:,} of only about {time.updates:,} updates"
        yield Finding("time", "warning", text, "lower it, so that the learning rate reaches its peak earlier")
