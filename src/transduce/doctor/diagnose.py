"""Check the text, the memory and the time of a training before it starts: `transduce.diagnose`, `transduce doctor`.

It reads the text, runs a few updates in a child process, and keeps nothing.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.check_sample import Sample, take_sample
from transduce.data.clean import RATIO, TOO_LONG
from transduce.data.corpus import sorted_labels
from transduce.data.sources import Sources
from transduce.distributed.group import check_devices
from transduce.doctor.checks import run_checks, texts_of
from transduce.doctor.cluster import GPUS, PUBLISHED, ROOM_ON_GPU, Cluster, Forecast, forecast_settings
from transduce.doctor.findings import Finding, Level, note_or_warning, percent, size
from transduce.doctor.resources import tokens_at_once
from transduce.doctor.trial import FULL, Trial, measure
from transduce.errors import SettingsError, UserError, message_of
from transduce.logging import Log, duration
from transduce.machine import Machine, this_machine
from transduce.runs.folder import RunFolder
from transduce.tasks.finetune import Start, extend_vocabulary, find_start
from transduce.tasks.registry import AnyTask
from transduce.tasks.resolve import check, resolve
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

SECONDS = 10.0  # of real updates in the trial
TRAINED, HELD_OUT = 12_000, 1_000  # records of the trial
ENCODED = 2_000  # records in which unknown characters are searched
ROOM = 0.8  # fraction of the free memory that a training may take without a warning
FEWEST_TOKENS = 64  # of the smallest useful micro-batch
SHORT = 0.05  # seconds of an update on GPUs, below which a forecast is too optimistic
_DAY = 86_400.0
_QUIET = Log(quiet=True)


@dataclass(frozen=True, slots=True)
class Time:
    """Duration of all updates, without validations. `by`: the limit of the settings that ends the training."""

    updates: int
    epochs: float
    seconds: float
    by: str


@dataclass(slots=True)
class Diagnosis:
    """Findings and measurements. None: was not measured, because of an obstacle or for lack of time.

    `settings`: the resolved settings of the training. `available`: bytes of free memory. `corpora`: the number of
    records of each corpus and held-out set.
    """

    findings: list[Finding] = field(default_factory=list)
    corpora: dict[str, int] = field(default_factory=dict)
    machine: str = ""
    available: int = 0
    settings: Settings | None = None
    trial: Trial | None = None
    time: Time | None = None
    cluster: Cluster | None = None
    forecast: Forecast | None = None

    @property
    def ready(self) -> bool:
        """Whether there is no obstacle."""
        return not self.obstacles

    @property
    def obstacles(self) -> list[Finding]:
        """Findings that must be corrected first."""
        return self.of_level("obstacle")

    @property
    def warnings(self) -> list[Finding]:
        """Findings that may matter."""
        return self.of_level("warning")

    def of_level(self, level: Level) -> list[Finding]:
        """Findings of one level."""
        return [one for one in self.findings if one.level == level]

    @contextmanager
    def collecting(self, check: str) -> Iterator[None]:
        """Inside, an error of the user becomes an obstacle."""
        try:
            yield
        except UserError as error:
            self.findings.append(Finding(check, "obstacle", message_of(error)))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "ready": self.ready,
            "findings": [asdict(one) for one in self.findings],
            "corpora": self.corpora,
            "machine": self.machine,
            "available": self.available,
            "trial": self.trial and asdict(self.trial),
            "time": self.time and asdict(self.time),
            "cluster": self.cluster and asdict(self.cluster),
            "forecast": self.forecast and asdict(self.forecast),
            "settings": self.settings and self.settings.model_dump(mode="json"),
        }


def diagnose(
    settings: Settings,
    *,
    log: Log | None = None,
    seconds: float = SECONDS,
    processes: int = 1,
    cluster: Cluster | None = None,
) -> Diagnosis:
    """Check the text and the machine before a training. Problems are returned as findings, not raised.

    Args:
        settings: The settings of the training.
        log: Where progress is printed; default: nowhere.
        seconds: Duration of the updates that are timed.
        processes: Number of processes that train together on this machine.
        cluster: GPUs that are not here, for which speed and memory are predicted.

    Returns:
        The findings and measurements. No file is kept or changed. Nothing is measured where there are obstacles.

    Raises `SettingsError` for a source of vectors.
    """
    if settings.model.reads_vectors:
        raise SettingsError(
            "model.source = 'vectors': the doctor checks text; a dry run of the training checks vectors"
        )
    found, log = Diagnosis(), log or _QUIET
    with found.collecting("settings"):
        start = find_start(settings)
        if start is not None:
            settings = start.settings
        task = check(settings)
        machine = this_machine(settings.training.device).shared(1, processes)  # threads of all processes
        check_devices(torch.device(machine.device), processes)
        found.machine, found.available = machine.describe(), machine.memory
        log.say("reading the text ...")
        sample = take_sample(task.sources(settings))
        found.corpora = {one.name: one.total for one in (*sample.train, *sample.valid, *sample.tests)}
        found.findings += run_checks(sample, settings.data, task.reads)
        if found.ready:
            _try_training(found, task, settings, sample, start=start, machine=machine, log=log, seconds=seconds)
        if cluster is not None and found.settings is not None:
            found.cluster, found.forecast = cluster, forecast_settings(found.settings, cluster)
    return found


def _try_training(
    found: Diagnosis,
    task: AnyTask,
    asked: Settings,
    sample: Sample[Any],
    *,
    start: Start | None,
    machine: Machine,
    log: Log,
    seconds: float,
) -> None:
    """Resolve the settings, learn a vocabulary and make some updates on the sample in a temporary run folder."""
    asked, sources, n_records = _for_trial(asked, sample, task)
    scale = sample.total / n_records
    texts = task.read(asked, _QUIET, sources)
    extended: Tokenizers | None = None
    if start is not None:
        extended = extend_vocabulary(start, *task.lines(texts), _QUIET).tokenizers
    settings, tokenizers = resolve(task, asked, texts, machine, _QUIET, known=extended, scale=scale)
    found.findings += _unknown_characters(sample, tokenizers, coverage=settings.tokenizer.character_coverage)
    log.say("trying some updates ...")
    with tempfile.TemporaryDirectory(prefix="transduce-doctor-") as temporary:
        with RunFolder.create(Path(temporary) / "run", settings, "") as run:
            prepared = task.encode(run, texts, tokenizers, settings, _QUIET)
        found.findings += _too_long(prepared.train.facts)
        trial = measure(run.path, seconds=seconds, processes=machine.n_sharing)
    found.settings, found.trial = settings, trial
    found.findings += memory_findings(settings, trial, found.available, machine.n_sharing)
    if trial.seconds_per_update is not None:
        weights = [corpus.weight for corpus in asked.data.train] or [1.0]
        weighted = sum(weight * one.total for weight, one in zip(weights, sample.train, strict=True))
        found.time = time_of(settings, trial.updates_per_epoch * weighted / n_records, trial.seconds_per_update)
        found.findings += time_findings(settings, found.time)


def _for_trial(asked: Settings, sample: Sample[Any], task: AnyTask) -> tuple[Settings, Sources[Any], int]:
    """Settings and sources for a training on a part of the sample; and the number of its training records."""
    train = tuple(corpus.some(round(TRAINED * corpus.total / sample.total)) for corpus in sample.train)
    valid = tuple(held.some(HELD_OUT // len(sample.valid)) for held in sample.valid)
    if task.reads == "labelled" and asked.data.labels is None:  # a part of the text may lack a rare label
        held_out = (window for one in sample.valid for window in one.kept)
        everything = chain(sample.records(), () if sample.is_whole else chain.from_iterable(held_out))
        asked = asked.with_values("data", labels=list(sorted_labels(example.label for example in everything)))
    return asked, Sources(train, valid), sum(1 for source in train for _ in source.read())


def _too_long(facts: Any) -> Iterator[Finding]:
    """Pairs of the trial that training would drop for their length."""
    cleaning = facts.get("cleaning", {"dropped": []})
    for tally in cleaning["dropped"]:
        if tally["reason"] in (TOO_LONG, RATIO):
            share = tally["count"] / cleaning["read"]
            text = f"{percent(share)} of the pairs are dropped: {tally['reason']}"
            advice = "data.max_length and data.max_ratio allow more"
            yield note_or_warning(share > 0.02, "lengths", text, advice, {"share": round(share, 4)})


def _unknown_characters(sample: Sample[Any], tokenizers: Tokenizers, *, coverage: float) -> Iterator[Finding]:
    """Characters of the training text and of the held-out sets that are not in the vocabulary."""
    for corpus in (*sample.train, *sample.valid, *sample.tests):
        records = [texts_of(record) for record in corpus.some(ENCODED).read()]
        for texts, vocabulary in zip(zip(*records, strict=True), (tokenizers.src, tokenizers.tgt), strict=False):
            yield from _unknown(corpus.name, texts, vocabulary, coverage=coverage)


def _unknown(name: str, texts: Sequence[str], vocabulary: Vocabulary, *, coverage: float) -> Iterator[Finding]:
    encoded = vocabulary.encode_batch(list(texts))
    hit = [text for text, ids in zip(texts, encoded, strict=True) if UNK in ids]
    if not hit:
        return
    missing = Counter(part for text in hit for part in vocabulary.unknown(text))
    shown = " ".join(f"{part} (U+{ord(part[0]):04X})" if len(part) == 1 else part for part, _ in missing.most_common(8))
    share = len(hit) / len(texts)
    text = f"{percent(share)} of the lines of {name} have characters that are not in the vocabulary: {shown}"
    advice = "clean these lines, or train the vocabulary on text that has them"
    if coverage < 1:
        advice = "tokenizer.character_coverage = 1 includes all characters of the training text"
    yield note_or_warning(share > 0.005, "vocabulary", text, advice, {"share": round(share, 5)})


def memory_findings(settings: Settings, trial: Trial, available: int, processes: int = 1) -> Iterator[Finding]:
    """Whether the largest batch fits into the free memory."""
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
    """The duration until the first of the limits of the settings."""
    training, per_epoch = settings.training, max(1.0, updates_per_epoch)
    ends = {
        "max_updates": training.max_updates,
        "max_epochs": training.max_epochs and math.ceil(training.max_epochs * per_epoch),
        "max_minutes": training.max_minutes and int(training.max_minutes * 60 / seconds_per_update),
    }
    updates, by = min((max(1, int(end)), name) for name, end in ends.items() if end is not None)
    return Time(updates, updates / per_epoch, updates * seconds_per_update, by)


def time_findings(settings: Settings, time: Time) -> Iterator[Finding]:
    """Whether training takes more than a week, ends before it has seen all text, or is mostly warmup."""
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


def format_diagnosis(diagnosis: Diagnosis) -> list[str]:
    """All lines; the last is the verdict."""
    rows = [("data", f"{name}: {total:,}") for name, total in diagnosis.corpora.items()]
    rows += [("machine", diagnosis.machine), *_measured(diagnosis)]
    rows += [("note", one.line) for one in diagnosis.of_level("note")]
    lines = [f"{name:<10}{text}" for name, text in rows if text]
    lines += ["", *(f"{one.level}: {one.line}" for one in (*diagnosis.warnings, *diagnosis.obstacles))]
    n = len(diagnosis.obstacles)
    return [*lines, "ready" if diagnosis.ready else f"not ready: {n} obstacle{'s' if n > 1 else ''}"]


def _measured(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    trial, settings, time = diagnosis.trial, diagnosis.settings, diagnosis.time
    if trial is None or settings is None:
        return
    preset = f"{settings.model.preset}, " if settings.model.preset else ""
    yield "model", f"{preset}{trial.parameters:,} parameters, vocabulary {settings.tokenizer.vocab_size or 0:,}"
    if trial.peak is not None:
        yield "memory", f"{size(trial.peak)} for the largest update, {size(diagnosis.available)} free"
    if trial.seconds_per_update is not None:
        each = f"{trial.seconds_per_update:.3g} s per update ({trial.updates} measured)"
        yield "speed", f"{trial.targets_per_second:,.0f} target tokens/s, {each}"
    if time is not None:
        until = f"training.{time.by} ({time.updates:,} updates, {time.epochs:.1f} epochs)"
        yield "time", f"about {duration(time.seconds)} until {until}, without validations"
    if (forecast := diagnosis.forecast) is not None and diagnosis.cluster is not None:
        each = f"{forecast.seconds_per_update:.3g} s per update of {settings.training.batch_tokens:,} target tokens"
        yield "forecast", f"on {diagnosis.cluster}: {forecast.tokens_per_second:,.0f} target tokens/s, {each}"
        low, high = PUBLISHED
        yield "", f"from operations and bytes; published trainings took {low:.2f} to {high:.2f} times the forecast"
        if time is not None and time.by != "max_minutes":
            yield "", f"about {duration(forecast.seconds_per_update * time.updates)} for {time.updates:,} updates"
        if forecast.seconds_per_update < SHORT:
            yield "", "so short an update takes longer: the time to start kernels and exchanges is not counted"
        memory = GPUS[diagnosis.cluster.gpu].memory
        fits = "" if forecast.memory < ROOM_ON_GPU * memory else f", of which {ROOM_ON_GPU:.0%} can be used: too much"
        yield "", f"{size(forecast.memory)} of the {size(memory)} of each GPU{fits}"
        yield "", f"a model of up to {forecast.largest / 1e9:.1f} billion parameters fits"
