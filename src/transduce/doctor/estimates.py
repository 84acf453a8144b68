"""Memory, disk space and time of a training: extrapolated from a trial, and findings if they are too large."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from transduce.config import Settings, resolved
from transduce.doctor.findings import Finding, size
from transduce.logging import Log, duration
from transduce.machine import Machine
from transduce.tasks.choices import bytes_per_token

TIMEOUT, FULL = "time ran out", "out of memory"  # why a trial ended early
ROOM = 0.8  # fraction of the free memory that a batch may take
JUDGED = 40  # validation rows that a trial translates
_LEAST = 64  # tokens of the smallest useful micro-batch
_DAY = 86_400.0
_PROCESS = 400 << 20  # bytes of a process without a model
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # optimizer state relative to the weights, roughly


@dataclass(frozen=True, slots=True)
class Point:
    """A measured batch of the longest rows.

    `share`: of the micro-batch. `slots`: positions, with padding. `peak`: bytes.
    """

    share: float
    slots: int
    peak: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of the worst batch in bytes, `measured` or extrapolated from smaller batches.

    `base`: without a batch. `bytes_per_micro_batch`: additional, for a whole one.
    """

    worst: int
    measured: bool
    base: int
    bytes_per_micro_batch: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of real updates.

    `share`: of a whole batch. `batches`: in an epoch of the sample. `peak`: bytes after batches of many sizes, which is
    more than any of them needs, as the allocator keeps some memory for each shape.
    """

    updates: int
    share: float
    targets_per_second: float
    seconds_per_update: float
    batches: int
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements of a trial. `died`: why it ended early. `points` and `speed` are those of one of `processes`."""

    parameters: int = 0
    device: str = "cpu"
    points: tuple[Point, ...] = ()
    speed: Speed | None = None
    checkpoint_bytes: int = 0
    weight_bytes: int = 0
    loss_seconds: float = 0.0
    judge_seconds: float = 0.0
    died: str = ""
    processes: int = 1

    @property
    def memory(self) -> Memory | None:
        """Memory of the whole micro-batch."""
        return extrapolate(self.points)

    @property
    def peak(self) -> int:
        """The largest known peak: of the worst batch, or of real updates of many sizes."""
        return max(self.memory.worst if self.memory else 0, self.speed.peak if self.speed else 0)


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a training. `preparing`: reading, vocabulary and encoding. `by`: the limit that ends it."""

    updates: int
    updates_per_epoch: float
    epoch: float
    preparing: float
    updating: float
    validating: float
    by: str

    @property
    def total(self) -> float:
        """Seconds until the last validation."""
        return self.preparing + self.updating + self.validating


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of one checkpoint, of the largest size of the run folder, and free at `place`."""

    checkpoint: int
    needed: int
    free: int
    place: str


def extrapolate(points: Sequence[Point]) -> Memory | None:
    """Extrapolate from the last point to a share of 1, with the slope of the regression line through all points.

    >>> extrapolate([Point(0.25, 100, 300, 1.0), Point(0.5, 200, 400, 1.0)]).worst
    600
    """
    if not points:
        return None
    last = points[-1]
    slots, peaks = np.array([(point.slots, point.peak) for point in points], float).T
    spread = slots - slots.mean()
    slope = max(0.0, float(spread @ peaks / (spread @ spread))) if spread.any() else 0.0
    whole = last.slots / last.share
    worst = last.peak if last.share == 1.0 else round(last.peak + slope * max(0.0, whole - last.slots))
    return Memory(worst, last.share == 1.0, round(last.peak - slope * last.slots), slope * whole)


def speed_of(
    points: Sequence[Point], *, share: float, updates: int, targets: float, seconds: float, batches: int, peak: int
) -> Speed:
    """The speed of whole updates, from the mean of smaller ones. Their fixed cost is counted once."""
    fixed = 0.0
    if share < 1.0 and len(points) >= 2:
        a, b = points[0], points[-1]
        fixed = max(0.0, a.seconds - a.slots * (b.seconds - a.seconds) / (b.slots - a.slots))
        fixed = min(fixed, 0.9 * seconds)
    seconds = fixed + (seconds - fixed) / share
    return Speed(updates, share, targets / share / seconds, seconds, batches, peak)


def tokens_at_once(settings: Settings, processes: int = 1) -> int:
    """Tokens of the largest micro-batch of one process, which gets a share of each batch."""
    batch = resolved(settings.training.batch_tokens, "training.batch_tokens")
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def estimate_time(
    settings: Settings, trial: Trial, *, scale: float, sampled: tuple[int, int], preparing: float
) -> Time | None:
    """Time of the training that the resolved settings describe; None if the trial has not measured the speed.

    `scale`: size of the training text relative to that of the trial. `sampled`: validation rows of the trial, and of
    the training. `preparing`: seconds before the first update.
    """
    speed, training = trial.speed, settings.training
    if speed is None:
        return None
    per_epoch = max(1.0, speed.batches * scale)
    n_tried, n_valid = sampled
    judged = min(training.valid_bleu_sentences, n_valid) / max(1, min(JUDGED, n_tried))
    once = trial.loss_seconds * n_valid / max(1, n_tried) + trial.judge_seconds * judged
    each, every = speed.seconds_per_update, resolved(training.valid_updates, "training.valid_updates")
    ends = {
        "max_updates": training.max_updates,
        "max_epochs": training.max_epochs and math.ceil(training.max_epochs * per_epoch),
        "max_minutes": training.max_minutes and int(training.max_minutes * 60 / (each + once / every)),
    }
    updates, by = min((max(1, int(end)), name) for name, end in ends.items() if end is not None)
    validating = once * math.ceil(updates / every)
    return Time(updates, per_epoch, per_epoch * each, preparing, updates * each, validating, by)


def estimate_disk(settings: Settings, trial: Trial, place: Path, *, n_tokens: float = 0, n_rows: float = 0) -> Disk:
    """Largest size of the run folder: checkpoints, one being written, weights, and encoded text."""
    training = settings.training
    checkpoints = (training.keep_checkpoints + 1) * trial.checkpoint_bytes
    snapshots = (training.average_n + 1) * trial.weight_bytes if training.average in ("last", "best") else 0
    token_bytes = 2 if (settings.tokenizer.vocab_size or 0) <= 1 << 16 else 4
    text = round(n_tokens * token_bytes + n_rows * 16)
    needed = checkpoints + snapshots + 2 * trial.weight_bytes + text + (4 << 20)
    where = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    return Disk(trial.checkpoint_bytes, needed, shutil.disk_usage(where).free, str(place))


def fitting_tokens(settings: Settings, trial: Trial, available: int) -> int | None:
    """The largest micro-batch whose worst case takes at most ROOM of the free memory; None if nothing was measured."""
    if (memory := trial.memory) is None:
        return None
    share = max(0.0, ROOM * available - memory.base) / max(1.0, memory.bytes_per_micro_batch)
    tokens = int(min(tokens_at_once(settings, trial.processes) * share, 1 << 24))
    return tokens // 256 * 256 if tokens >= 256 else tokens


def memory_findings(settings: Settings, trial: Trial, available: int) -> list[Finding]:
    """Whether the worst batch fits into the free memory."""
    memory, micro = trial.memory, tokens_at_once(settings, trial.processes)
    if memory is None and trial.died == FULL:
        advice = "use a smaller model (--set model.preset=tiny) or smaller batches (--set training.batch_tokens=N)"
        return [Finding("memory", "obstacle", "the model does not fit: the trial ran out of memory", advice)]
    too_early = f"the trial ended too early: {trial.died or 'nothing was measured'}"
    if memory is None:
        advice = "memory and speed are unknown; try again when the machine is less busy"
        return [Finding("memory", "warning", too_early, advice)]
    if trial.peak <= ROOM * available and not trial.died:
        return []
    figures = {"worst": memory.worst, "measured": memory.measured, "available": available, "peak": trial.peak}
    takes = "takes" if memory.measured else "will take about"
    text = f"the worst batch of {micro:,} tokens {takes} {size(memory.worst)} of the {size(available)} free"
    if trial.peak > memory.worst and trial.speed is not None:
        updates = trial.speed.updates
        text = f"{updates} updates with batches of many sizes took {size(trial.peak)} of the {size(available)} free"
    fits = fitting_tokens(settings, trial, available) or 0
    if fits >= micro:  # it took more than seemed to be needed
        fits = int(trial.points[-1].share * micro * 0.8)
    advice = f"--set training.micro_batch_tokens={fits} splits updates into parts that fit, with the same gradient"
    if fits < max(_LEAST, settings.data.context or 0):
        advice = "even a small batch does not fit: use a smaller model (--set model.preset=tiny) or shorter texts"
    if trial.died == FULL:
        return [Finding("memory", "obstacle", f"the trial ran out of memory: {text}", advice, figures)]
    if trial.peak > available:
        return [Finding("memory", "obstacle", text, advice, figures)]
    if trial.died:
        return [Finding("memory", "warning", too_early, "", figures)]
    return [Finding("memory", "warning", f"{text}, which is close to the limit", advice, figures)]


def disk_findings(disk: Disk) -> list[Finding]:
    """Whether the run folder fits onto its disk."""
    if disk.needed <= disk.free:
        return []
    text = f"the run needs {size(disk.needed)} at {disk.place}, where {size(disk.free)} are free"
    advice = "free space, use another folder (--run), or keep fewer checkpoints (--set training.keep_checkpoints=1)"
    return [Finding("disk", "obstacle", text, advice, {"needed": disk.needed, "free": disk.free})]


def time_findings(settings: Settings, time: Time | None) -> list[Finding]:
    """Whether training takes more than a week, ends before it has seen all text, or is mostly warmup."""
    if time is None:
        return []
    found, epochs = [], time.updates / time.updates_per_epoch
    if time.total > 7 * _DAY:
        found.append((f"training will take {time.total / _DAY:.0f} days", "limit it with --set training.max_minutes=N"))
    if epochs < 0.9 and time.by == "max_minutes":
        text = f"{duration(time.updating)} of updates are {epochs:.2f} epochs: training will not see all text"
        found.append((text, "raise training.max_minutes, or use a smaller model"))
    warmup = resolved(settings.training.warmup_updates, "training.warmup_updates")
    if warmup > 0.5 * time.updates:
        text = f"training.warmup_updates = {warmup:,} of only about {time.updates:,} updates"
        found.append((text, "lower it, so that the learning rate reaches its peak earlier"))
    return [Finding("time", "warning", *parts) for parts in found]


def warn_of_resources(settings: Settings, model: nn.Module, place: Path, machine: Machine, log: Log) -> None:
    """Warn of too little memory or disk space before a training, by a rough estimate without a trial."""
    training, vocab_size = settings.training, settings.tokenizer.vocab_size or 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    saved = weights * (1.0 + _STATES[resolved(training.optimizer, "training.optimizer")] + (training.average == "ema"))
    micro = tokens_at_once(settings)
    needed = round(saved + weights) + micro * bytes_per_token(settings.model, vocab_size) + _PROCESS  # with gradients
    if needed > machine.memory:
        log.warn(
            f"training will take about {size(needed)} of memory, and {size(machine.memory)} are free; "
            f"use --set training.micro_batch_tokens={max(64, micro // 2)} or a smaller model"
        )
    trial = Trial(checkpoint_bytes=round(saved), weight_bytes=weights)
    for one in disk_findings(estimate_disk(settings, trial, place)):
        log.warn(one.line)
