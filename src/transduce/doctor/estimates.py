"""Memory, disk space and time of a training: estimates, and findings if they are too large. Pure functions."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from transduce.config import Settings
from transduce.doctor.findings import Finding, size
from transduce.doctor.measuring import FULL, TIMEOUT, Trial, tokens_at_once
from transduce.logging import duration

ROOM = 0.8  # fraction of the free memory that a batch may take
JUDGED = 40  # validation rows that a trial translates
SNAPSHOTS = ("last", "best")
"""Averages that store weights in addition to the checkpoints."""
_LEAST = 64  # tokens of the smallest useful micro-batch
_DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a training. `preparing`: reading, vocabulary and encoding. `by`: the limit that ends it."""

    updates: int
    updates_an_epoch: float
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


def estimate_time(
    settings: Settings, trial: Trial, *, scale: float, sampled: tuple[int, int], preparing: float
) -> Time | None:
    """Time of the training that the settings describe.

    Args:
        settings: The resolved settings.
        trial: Measurements on the sample.
        scale: Size of the training text relative to the sample.
        sampled: Validation rows of the trial, and of the training.
        preparing: Seconds before the first update.
    """
    speed, training = trial.speed, settings.training
    if speed is None:
        return None
    an_epoch = max(1.0, speed.batches * scale)
    n_tried, n_valid = sampled
    judged = min(training.valid_bleu_sentences, n_valid) / max(1, min(JUDGED, n_tried))
    once = trial.loss_seconds * n_valid / max(1, n_tried) + trial.judge_seconds * judged
    each, every = speed.seconds_an_update, training.valid_updates or 1
    ends = {
        "max_updates": training.max_updates,
        "max_epochs": training.max_epochs and math.ceil(training.max_epochs * an_epoch),
        "max_minutes": training.max_minutes and int(training.max_minutes * 60 / (each + once / every)),
    }
    known = {name: int(end) for name, end in ends.items() if end is not None}
    by = min(known, key=lambda name: known[name])
    updates = max(1, known[by])
    validating = once * math.ceil(updates / every)
    return Time(updates, an_epoch, an_epoch * each, preparing, updates * each, validating, by)


def estimate_disk(settings: Settings, trial: Trial, place: Path, *, n_tokens: float, n_rows: float) -> Disk:
    """Largest size of the run folder: checkpoints, one being written, weights, and encoded text."""
    training = settings.training
    checkpoints = (training.keep_checkpoints + 1) * trial.checkpoint_bytes
    snapshots = (training.average_n + 1) * trial.weight_bytes if training.average in SNAPSHOTS else 0
    token_bytes = 2 if (settings.tokenizer.vocab_size or 0) <= 1 << 16 else 4
    text = round(n_tokens * token_bytes + n_rows * 16)
    needed = checkpoints + snapshots + 2 * trial.weight_bytes + text + (4 << 20)
    where = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    return Disk(trial.checkpoint_bytes, needed, shutil.disk_usage(where).free, str(place))


def fitting_tokens(settings: Settings, trial: Trial, available: int) -> int | None:
    """The largest micro-batch whose worst case takes at most ROOM of the free memory; None if nothing was measured."""
    if (memory := trial.memory) is None:
        return None
    share = max(0.0, ROOM * available - memory.base) / max(1.0, memory.a_share)
    tokens = min(tokens_at_once(settings, trial.processes) * share, 1 << 24)
    return int(tokens) // 256 * 256 if tokens >= 256 else int(tokens)


def memory_findings(settings: Settings, trial: Trial, available: int) -> list[Finding]:
    """Whether the worst batch fits into the free memory."""
    memory, micro = trial.memory, tokens_at_once(settings, trial.processes)
    if memory is None:
        return [_unmeasured(trial)]
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
    if trial.peak > available or trial.died == FULL:
        prefix = "the trial ran out of memory: " if trial.died == FULL else ""
        return [Finding("memory", "obstacle", prefix + text, advice, figures)]
    if trial.died:
        return [Finding("memory", "warning", f"the trial ended too early: {trial.died}", "", figures)]
    return [Finding("memory", "warning", f"{text}, which is close to the limit", advice, figures)]


def _unmeasured(trial: Trial) -> Finding:
    if trial.died == FULL:
        advice = (
            "use a smaller model (--set model.preset=tiny), smaller batches (--set training.batch_tokens=N) or shorter "
            "texts (--set data.max_length=N)"
        )
        return Finding("memory", "obstacle", "the model does not fit: the trial ran out of memory", advice)
    advice = "memory and speed are unknown" + "; try again when the machine is less busy" * (trial.died == TIMEOUT)
    return Finding("memory", "warning", f"the trial ended too early: {trial.died or 'nothing was measured'}", advice)


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
    found = []
    epochs = time.updates / time.updates_an_epoch
    if time.total > 7 * _DAY:
        text = f"training will take {time.total / _DAY:.0f} days"
        found.append(Finding("time", "warning", text, "limit it with --set training.max_minutes=N"))
    if epochs < 0.9 and time.by == "max_minutes":
        text = f"{duration(time.updating)} of updates are {epochs:.2f} epochs: training will not see all text"
        found.append(Finding("time", "warning", text, "raise training.max_minutes, or use a smaller model"))
    warmup = settings.training.warmup_updates or 0
    if warmup > 0.5 * time.updates:
        text = f"training.warmup_updates = {warmup:,} of only about {time.updates:,} updates"
        advice = "lower it, so that the learning rate reaches its peak earlier"
        found.append(Finding("time", "warning", text, advice))
    return found
