"""Print a diagnosis: measurements, a histogram of lengths, findings, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from transduce.config import resolved
from transduce.doctor.diagnose import Diagnosis
from transduce.doctor.estimates import tokens_at_once
from transduce.doctor.findings import about, size
from transduce.doctor.lengths import histogram
from transduce.logging import duration

_NOUNS = {"pairs": "pairs", "text": "lines", "labelled": "texts"}


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
        measured = f"{speed.seconds_an_update:.3g} s per update ({speed.updates} measured)"
        yield "speed", f"{speed.targets_a_second:,.0f} target tokens/s, {measured}"
    if time is not None:
        steps = {"preparing": time.preparing, "updates": time.updating, "validation": time.validating}
        parts = ", ".join(f"{name} {_long(seconds)}" for name, seconds in steps.items())
        epochs = f"{time.updates:,} updates, {time.updates / time.updates_an_epoch:.1f} epochs"
        yield "time", f"about {_long(time.epoch)} per epoch ({about(time.updates_an_epoch)} updates)"
        yield "", f"about {_long(time.total)} until training.{time.by} ({epochs}): {parts}"
    if disk is not None:
        kept = f"{settings.training.keep_checkpoints} checkpoints of {size(disk.checkpoint)}"
        yield "disk", f"at most {size(disk.needed)} at {disk.place} ({kept}), {size(disk.free)} free"


def _long(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)
