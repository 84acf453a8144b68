"""What a training will take: updates, time, disk. Pure functions of settings and of what was measured."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from transduce.config import Settings
from transduce.doctor.measuring import Trial

SNAPSHOTS = ("last", "best")
"""Averages that keep weights on the disk beside the checkpoints."""
ROOM = 0.8  # of the free memory that a batch may be advised to take


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds. `preparing`: reading, vocabulary, encoding; `validating` and `updating`: of the whole training."""

    updates: int
    updates_an_epoch: float
    epoch: float
    preparing: float
    updating: float
    validating: float
    by: str
    """The limit that ends it."""

    @property
    def total(self) -> float:
        """Until the last update is validated."""
        return self.preparing + self.updating + self.validating


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes: of one checkpoint, of all that a run has at most, and what is free where it goes."""

    checkpoint: int
    needed: int
    free: int
    place: str


def time_needed(
    settings: Settings, trial: Trial, *, scale: float, sampled: tuple[int, int], preparing: float
) -> Time | None:
    """Time of the training that the settings ask for. `scale`: how many times more text there is than was tried.

    `sampled`: validation rows of the trial, and of the whole; a judge's rows are as many as the settings say.
    """
    speed, training = trial.speed, settings.training
    if speed is None:
        return None
    an_epoch = max(1.0, speed.batches * scale)
    n_tried, n_valid = sampled
    judged = min(training.valid_bleu_sentences, n_valid) / max(1, min(JUDGED, n_tried))
    once = trial.loss_seconds * n_valid / max(1, n_tried) + trial.judge_seconds * judged
    each = speed.seconds_an_update
    every = training.valid_updates or 1
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


JUDGED = 40  # validation rows that a trial translates


def disk_needed(settings: Settings, trial: Trial, place: Path, *, n_tokens: float, n_rows: float) -> Disk:
    """Disk of the run folder at its fullest: checkpoints and one being written, weights, encoded text."""
    training = settings.training
    checkpoints = (training.keep_checkpoints + 1) * trial.checkpoint_bytes
    snapshots = (training.average_n + 1) * trial.weight_bytes if training.average in SNAPSHOTS else 0
    size = 2 if (settings.tokenizer.vocab_size or 0) <= 1 << 16 else 4
    text = round(n_tokens * size + n_rows * 16)
    needed = checkpoints + snapshots + 2 * trial.weight_bytes + text + (4 << 20)
    where = place
    while not where.exists() and where != where.parent:
        where = where.parent
    return Disk(trial.checkpoint_bytes, needed, shutil.disk_usage(where or os.curdir).free, str(place))
