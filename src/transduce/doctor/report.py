"""A diagnosis, and how it is printed: measurements, a histogram of lengths, findings, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from transduce.config import Settings, resolved
from transduce.doctor.estimates import Disk, Time, Trial, fitting_tokens, tokens_at_once
from transduce.doctor.findings import Finding, Level, about, size
from transduce.doctor.lengths import Lengths, histogram
from transduce.doctor.sampling import Part, Sample
from transduce.errors import UserError
from transduce.logging import duration

_NOUNS = {"pairs": "pairs", "text": "lines", "labelled": "texts"}


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. `remaining`: seconds at its speed so far, if known."""

    path: str
    update: int = 0
    epochs: float = 0.0
    progress: float = 0.0
    seconds: float = 0.0
    remaining: float | None = None
    finished: str = ""
    busy: bool = False

    @property
    def line(self) -> str:
        """A line for people."""
        if self.finished:
            return f"{self.path} is finished: update {self.update:,}, epoch {self.epochs:.1f} ({self.finished})"
        if not self.update:
            where = "has no checkpoint yet; the same command resumes it"
        else:
            left = "" if self.remaining is None else f", {duration(self.remaining)} left at its speed so far"
            where = f"is at update {self.update:,}, epoch {self.epochs:.2f}, {self.progress:.0%}{left}"
        return f"{self.path} {where}{'; another process is training in it' if self.busy else ''}"


@dataclass(slots=True)
class Diagnosis:
    """Findings and measurements. None: could not be measured, or was not needed.

    `settings` are the resolved settings of the training. `seconds`: how long the diagnosis took.
    """

    findings: tuple[Finding, ...] = ()
    sample: Sample | None = None
    seconds: float = 0.0
    machine: str = ""
    available: int = 0
    settings: Settings | None = None
    lengths: tuple[Lengths, ...] = ()
    trial: Trial | None = None
    time: Time | None = None
    disk: Disk | None = None
    progress: Progress | None = None

    @property
    def ready(self) -> bool:
        """Whether there is no obstacle."""
        return not self.obstacles

    @property
    def obstacles(self) -> tuple[Finding, ...]:
        """Findings that must be corrected first."""
        return self.of_level("obstacle")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that may matter."""
        return self.of_level("warning")

    def of_level(self, level: Level) -> tuple[Finding, ...]:
        """Findings of one level."""
        return tuple(one for one in self.findings if one.level == level)

    @property
    def is_finished(self) -> bool:
        """Whether the run folder contains a finished run."""
        return self.progress is not None and bool(self.progress.finished)

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """What the trial could not measure."""
        if self.is_finished:
            return ()
        trial = self.trial or Trial()
        known = {"memory": trial.memory, "speed": trial.speed, "time": self.time, "disk": self.disk}
        return tuple(name for name, value in known.items() if value is None)

    @property
    def fitting_tokens(self) -> int | None:
        """The largest micro-batch that fits into memory, in tokens."""
        if self.trial is None or self.settings is None:
            return None
        return fitting_tokens(self.settings, self.trial, self.available)

    def add(self, *findings: Finding) -> None:
        """Append findings."""
        self.findings += findings

    @contextmanager
    def collecting(self, check: str) -> Iterator[None]:
        """Inside, an error of the user becomes an obstacle."""
        try:
            yield
        except UserError as error:
            self.add(Finding(check, "obstacle", " ".join(str(error).split())))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sample, memory = self.sample, self.trial and self.trial.memory
        values = asdict(replace(self, sample=None, settings=None))
        del values["sample"]
        return values | {
            "ready": self.ready,
            "data": sample
            and {
                "kind": sample.form,
                "corpora": list(map(_described, sample.parts)),
                "held_out": list(map(_described, sample.held)),
                "looked_at": sample.n_rows,
            },
            "memory": memory and asdict(memory),
            "fitting_tokens": self.fitting_tokens,
            "time": self.time and values["time"] | {"total": self.time.total},
            "run": values.pop("progress"),
            "settings": self.settings and self.settings.model_dump(mode="json"),
            "seconds": round(self.seconds, 2),
        }


def _described(part: Part) -> dict[str, Any]:
    return {key: getattr(part, key) for key in ("name", "files", "counts", "total", "counted", "how")}


def format_diagnosis(diagnosis: Diagnosis) -> list[str]:
    """All lines; the last is the verdict."""
    notes = [("" if i else "notes", one.line) for i, one in enumerate(diagnosis.of_level("note"))]
    rows = [*_data(diagnosis), *_measured(diagnosis), *notes]
    lines = [f"{name:<10}{text}".rstrip() for name, text in rows]
    for level, found in (("warning", diagnosis.warnings), ("obstacle", diagnosis.obstacles)):
        lines += ["", *(f"{level}: {one.line}" for one in found)] if found else []
    n = len(diagnosis.obstacles)
    verdict = "ready" if diagnosis.ready else f"not ready: {n} obstacle{'s' if n > 1 else ''}"
    if diagnosis.ready and diagnosis.unmeasured:
        verdict += f", but not measured: {', '.join(diagnosis.unmeasured)}"
    return [*lines, "", f"{verdict} ({diagnosis.seconds:.0f} s)"]


def _data(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Names and texts of rows."""
    if diagnosis.progress is not None:
        yield "run", diagnosis.progress.line
    if (sample := diagnosis.sample) is not None:
        for part in sample.parts:
            total = f"{part.total:,}" if part.counted else about(part.total)
            yield "data", f"{part.name}: {total} {_NOUNS[sample.form]} ({part.how})"
        for part in sample.held:
            yield "held out", f"{part.name}: {part.total:,}"
    for i, line in enumerate(histogram(diagnosis.lengths)):
        yield "" if i else "tokens", line
    if diagnosis.machine:
        yield "machine", diagnosis.machine


def _measured(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    trial, settings, time, disk = diagnosis.trial, diagnosis.settings, diagnosis.time, diagnosis.disk
    if trial is None or settings is None:
        return
    if trial.parameters:
        preset = f"{settings.model.preset}, " if settings.model.preset else ""
        vocab_size = resolved(settings.tokenizer.vocab_size, "tokenizer.vocab_size")
        yield "model", f"{preset}{trial.parameters:,} parameters, vocabulary {vocab_size:,}"
    if (memory := trial.memory) is not None:
        how = "measured" if memory.measured else f"extrapolated from {trial.points[-1].share:.0%} of it"
        each = "" if trial.processes == 1 else f" for each of {trial.processes} processes"
        worst = f"the worst batch of {tokens_at_once(settings, trial.processes):,} tokens ({how})"
        free = f"{size(diagnosis.available)} free{each}; up to {diagnosis.fitting_tokens:,} tokens at once fit"
        yield "memory", f"{size(memory.worst)} for {worst}, {free}"
        if trial.speed is not None and trial.peak > 1.1 * memory.worst:
            updates = f"{trial.speed.updates} updates with batches of many sizes"
            yield "", f"{size(trial.peak)} after {updates}; more updates take somewhat more"
    if (speed := trial.speed) is not None:
        measured = f"{speed.seconds_per_update:.3g} s per update ({speed.updates} measured)"
        yield "speed", f"{speed.targets_per_second:,.0f} target tokens/s, {measured}"
    if time is not None:
        steps = {"preparing": time.preparing, "updates": time.updating, "validation": time.validating}
        parts = ", ".join(f"{name} {_long(seconds)}" for name, seconds in steps.items())
        epochs = f"{time.updates:,} updates, {time.updates / time.updates_per_epoch:.1f} epochs"
        yield "time", f"about {_long(time.epoch)} per epoch ({about(time.updates_per_epoch)} updates)"
        yield "", f"about {_long(time.total)} until training.{time.by} ({epochs}): {parts}"
    if disk is not None:
        kept = f"{settings.training.keep_checkpoints} checkpoints of {size(disk.checkpoint)}"
        yield "disk", f"at most {size(disk.needed)} at {disk.place} ({kept}), {size(disk.free)} free"


def _long(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)
