"""Memory and speed, from a trial in a child process; and what follows from them for the whole training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transduce
from transduce.config import Settings
from transduce.process import child_environment

SPARE = 1.5  # seconds before its end in which a trial stops by itself
OVER = "its time was over"
FULL = "out of memory"
_MARKS = ("memory", "bad_alloc", "doesnotfit", "could not create a primitive", "failed to map segment")
"""Of the last lines of a process whose memory was at an end: Python's, PyTorch's, oneDNN's, the loader's, our own."""
_CLASS = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: |$)")


@dataclass(frozen=True, slots=True)
class Point:
    """What a batch of the longest rows took. `share`: of the micro-batch; `slots`: positions, padding counted."""

    share: float
    slots: int
    peak: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak of the worst batch in bytes: `measured`, or continued from smaller ones. `base`: without a batch."""

    worst: int
    measured: bool
    base: int
    a_share: float
    """Bytes more that the whole micro-batch takes."""

    def share_for(self, room: float) -> float:
        """How much of the micro-batch has its peak within `room` bytes; 0 where not even none has."""
        if room <= self.base:
            return 0.0
        return (room - self.base) / self.a_share if self.a_share > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Speed:
    """Of real updates: targets a second, and seconds that a whole update takes. `batches`: of the sample's epoch.

    `peak`: bytes after batches of many sizes, which is more than any of them takes: some is kept for each shape.
    """

    updates: int
    share: float
    targets_a_second: float
    seconds_an_update: float
    batches: int
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """All that a trial told. `died`: why it ended too early, if it did."""

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
    """That train together: `points` and `speed.peak` are of one of them."""

    @property
    def memory(self) -> Memory | None:
        """What the points say of the whole micro-batch."""
        return extrapolated(self.points)

    @property
    def peak(self) -> int:
        """The most that is known to be needed: the worst batch's, or what real updates of many sizes have held."""
        return max(self.memory.worst if self.memory else 0, self.speed.peak if self.speed else 0)


def extrapolated(points: Sequence[Point]) -> Memory | None:
    """From the last point on, along the straight line that is nearest to all, to a share of 1.

    The peak grows with the positions of a batch, in steps: the memory of a process is taken in large pieces.

    >>> extrapolated([Point(0.25, 100, 300, 1.0), Point(0.5, 200, 400, 1.0)]).worst
    600
    """
    if not points:
        return None
    last, n = points[-1], len(points)
    slots, peaks = (sum(getattr(point, name) for point in points) / n for name in ("slots", "peak"))
    spread = sum((point.slots - slots) ** 2 for point in points)
    if not spread:
        return Memory(last.peak, last.share == 1.0, last.peak, 0.0)
    a_slot = max(0.0, sum((point.slots - slots) * (point.peak - peaks) for point in points) / spread)
    whole = last.slots / last.share
    worst = last.peak if last.share == 1.0 else round(last.peak + a_slot * max(0.0, whole - last.slots))
    return Memory(worst, last.share == 1.0, round(last.peak - a_slot * last.slots), a_slot * whole)


def tokens_at_once(settings: Settings, processes: int) -> int:
    """Tokens of the largest micro-batch of one process: of a batch each has its share."""
    batch = settings.training.batch_tokens or 1
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def measure(folder: Path, *, seconds: float, processes: int = 1) -> Trial:
    """Run a trial on what lies prepared in the run folder `folder`, as the first of so many processes would.

    It is ended after `seconds`, and what it has told until then counts.
    """
    until = time.time() + max(0.5 * seconds, seconds - SPARE)
    command = [sys.executable, "-m", "transduce.doctor.trial", str(folder), str(until), str(processes)]
    here = str(Path(transduce.__file__).parents[1])  # the child is of the same package, however this one was found
    environment = {
        **child_environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH")))),
    }
    if processes > 1:  # as `launch` shares out the cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    err = b""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, check=False)
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        out, code = error.stdout or b"", None
    facts = [json.loads(line) for line in out.splitlines(keepends=True) if line[:1] == b"{" and line[-1:] == b"\n"]
    died = ""
    if code is None:
        died = "" if any("speed" in fact for fact in facts) else OVER
    elif not any("done" in fact for fact in facts):
        died = why_it_died(code, err.decode("utf-8", errors="replace"))
    return told(facts, died=died, processes=processes)


def why_it_died(code: int, err: str) -> str:
    """Of a trial that ended with `code` before it was done, by its last words; no names of classes.

    >>> why_it_died(1, "MemoryError"), why_it_died(1, "a.b.SomeError: the disk is gone"), why_it_died(3, "")
    ('out of memory', 'the disk is gone', 'it ended with code 3')
    """
    lines = err.strip().splitlines()
    if code == -9 or any(mark in line.lower() for line in lines[-3:] for mark in _MARKS):  # -9: the kernel's way
        return FULL
    return (_CLASS.sub("", lines[-1]) if lines else "") or f"it ended with code {code}"


def told(facts: Sequence[dict[str, Any]], *, died: str = "", processes: int = 1) -> Trial:
    """What the lines of a trial say."""
    merged = {key: value for fact in facts for key, value in fact.items() if key != "memory"}
    points = tuple(Point(**fact["memory"]) for fact in facts if "memory" in fact)
    saved, validation = merged.get("saved", {}), merged.get("validation", {})
    return Trial(
        parameters=merged.get("parameters", 0),
        device=merged.get("device", "cpu"),
        points=points,
        speed=_speed(merged["speed"], points) if "speed" in merged else None,
        checkpoint_bytes=saved.get("checkpoint", 0),
        weight_bytes=saved.get("weights", 0),
        loss_seconds=validation.get("loss", 0.0),
        judge_seconds=validation.get("judge", 0.0),
        died=died,
        processes=processes,
    )


def _speed(found: dict[str, Any], points: Sequence[Point]) -> Speed:
    """Of whole updates: where smaller ones were measured, what an update takes however small it is counts once."""
    share, seconds = found["share"], found["seconds"]
    if share < 1.0 and len(points) >= 2:
        a, b = points[0], points[-1]
        fixed = max(0.0, a.seconds - a.slots * (b.seconds - a.seconds) / (b.slots - a.slots))
        fixed = min(fixed, 0.9 * seconds)
        seconds = fixed + (seconds - fixed) / share
    else:
        seconds /= share
    targets = found["targets"] / share
    return Speed(found["updates"], share, targets / seconds, seconds, found["batches"], found.get("peak", 0))
