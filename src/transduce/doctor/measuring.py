"""Memory and speed, measured by a trial in a child process and extrapolated to the whole training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from transduce.config import Settings
from transduce.process import child_environment

SPARE = 1.5  # seconds before its time limit at which a trial stops
TIMEOUT = "time ran out"
FULL = "out of memory"
_MEMORY_ERRORS = ("memory", "bad_alloc", "doesnotfit", "could not create a primitive", "failed to map segment")
"""In the last lines of a process that ran out of memory: of Python, PyTorch, oneDNN, the loader and ourselves."""
_CLASS = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: |$)")


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

    `base`: without a batch. `a_share`: additional bytes for a whole micro-batch.
    """

    worst: int
    measured: bool
    base: int
    a_share: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of real updates.

    `share`: of a whole batch. `batches`: in an epoch of the sample. `peak`: bytes after batches of many sizes, which is
    more than any of them needs, as the allocator keeps some memory for each shape.
    """

    updates: int
    share: float
    targets_a_second: float
    seconds_an_update: float
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


def tokens_at_once(settings: Settings, processes: int) -> int:
    """Tokens of the largest micro-batch of one process, which gets a share of each batch."""
    batch = settings.training.batch_tokens or 1
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def measure(folder: Path, *, seconds: float, processes: int = 1) -> Trial:
    """Run a trial on the prepared run folder `folder`, as one of so many processes.

    It is killed after `seconds`; what it has measured until then is used.
    """
    until = time.time() + max(0.5 * seconds, seconds - SPARE)
    command = [sys.executable, "-m", "transduce.doctor.trial", str(folder), str(until), str(processes)]
    environment = child_environment()
    if processes > 1:  # as `launch` distributes the cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, check=False)
        out, died = done.stdout, why_it_died(done.returncode, done.stderr.decode("utf-8", errors="replace"))
    except subprocess.TimeoutExpired as error:
        out, died = error.stdout or b"", TIMEOUT
    whole = [line for line in out.splitlines(keepends=True) if line[:1] == b"{" and line[-1:] == b"\n"]
    found = TypeAdapter(Trial).validate_json(whole[-1]) if whole else Trial(processes=processes)
    return found if died == TIMEOUT and found.speed else replace(found, died=died)


def why_it_died(code: int, err: str) -> str:
    """The reason why a trial ended early, from its exit code and its last lines, without names of classes.

    >>> why_it_died(1, "MemoryError"), why_it_died(1, "a.b.SomeError: the disk is gone"), why_it_died(3, "")
    ('out of memory', 'the disk is gone', 'exit code 3')
    """
    if not code:
        return ""
    lines = err.strip().splitlines()
    if code == -9 or any(mark in line.lower() for line in lines[-3:] for mark in _MEMORY_ERRORS):  # -9: OOM killer
        return FULL
    return (_CLASS.sub("", lines[-1]) if lines else "") or f"exit code {code}"


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
