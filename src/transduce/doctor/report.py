"""Print a diagnosis: measurements, a histogram of lengths, findings, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transduce.doctor.diagnose import Diagnosis
from transduce.doctor.findings import about, size
from transduce.doctor.measuring import Trial, tokens_at_once
from transduce.doctor.text_checks import EDGES, Lengths
from transduce.logging import duration

_BAR = 24
_NOUNS = {"pairs": "pairs", "text": "lines", "labelled": "texts"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def format_diagnosis(diagnosis: Diagnosis) -> list[str]:
    """All lines; the last is the verdict."""
    lines = [*_data(diagnosis), *_measured(diagnosis)]
    notes = [one.line for one in diagnosis.findings if one.level == "note"]
    lines += [_row("" if i else "notes", note) for i, note in enumerate(notes)]
    for level in ("warning", "obstacle"):
        found = [f"{level}: {one.line}" for one in diagnosis.findings if one.level == level]
        lines += ["", *found] if found else []
    n = len(diagnosis.obstacles)
    verdict = "ready" if diagnosis.ready else f"not ready: {n} obstacle{'s' if n > 1 else ''}"
    if diagnosis.ready and (lacking := diagnosis.unmeasured):
        verdict += f", but not measured: {', '.join(lacking)}"
    return [*lines, "", f"{verdict} ({diagnosis.seconds:.0f} s)"]


def histogram(sides: Sequence[Lengths]) -> list[str]:
    """Lengths in tokens, one column per side."""
    if not sides:
        return []
    used = [i for i in range(len(EDGES) + 1) if any(side.counts[i] for side in sides)]
    heads = [f"{side.side}: median {side.median}, longest {side.longest}" for side in sides]
    lines = [" " * 12 + "  ".join(f"{head:<{_BAR + 7}}" for head in heads).rstrip()]
    largest = max(max(side.counts) / max(1, sum(side.counts)) for side in sides)
    for i in range(used[0], used[-1] + 1):
        begin = EDGES[i - 1] + 1 if i else 0
        name = f"{begin:>4} - {EDGES[i]:<4}" if i < len(EDGES) else f"{begin:>4} +     "
        shares = [side.counts[i] / max(1, sum(side.counts)) for side in sides]
        cells = [f"{_bar(share / largest):<{_BAR}} {share:>4.0%}  " for share in shares]
        lines.append(f"{name} " + "  ".join(cells).rstrip())
    return lines


def _bar(share: float) -> str:
    full, rest = divmod(round(share * _BAR * 8), 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "") or ("▏" if share else "")


def _data(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.progress is not None:
        yield _row("run", diagnosis.progress.line)
    sample = diagnosis.sample
    if sample is not None:
        for part in sample.parts:
            total = f"{part.total:,}" if part.counted else about(part.total)
            yield _row("data", f"{part.name}: {total} {_NOUNS[sample.form]} ({part.how})")
        for part in sample.held:
            yield _row("held out", f"{part.name}: {part.total:,}")
        for i, line in enumerate(histogram(diagnosis.lengths)):
            yield _row("" if i else "tokens", line)


def _measured(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.machine:
        yield _row("machine", diagnosis.machine)
    trial, settings, time, disk = diagnosis.trial, diagnosis.settings, diagnosis.time, diagnosis.disk
    if trial is None or settings is None:
        return
    if trial.parameters:
        preset = f"{settings.model.preset}, " if settings.model.preset else ""
        yield _row("model", f"{preset}{trial.parameters:,} weights, vocabulary {settings.tokenizer.vocab_size or 0:,}")
    yield from _memory(diagnosis, trial)
    if (speed := trial.speed) is not None:
        measured = f"{speed.seconds_an_update:.3g} s per update ({speed.updates} measured)"
        yield _row("speed", f"{speed.targets_a_second:,.0f} target tokens/s, {measured}")
    if time is not None:
        yield _row("time", f"about {_long(time.epoch)} per epoch ({about(time.updates_an_epoch)} updates)")
        parts = (
            f"preparing {_long(time.preparing)}, updates {_long(time.updating)}, validation {_long(time.validating)}"
        )
        epochs = f"{time.updates:,} updates, {time.updates / time.updates_an_epoch:.1f} epochs"
        yield _row("", f"about {_long(time.total)} until training.{time.by} ({epochs}): {parts}")
    if disk is not None:
        kept = f"{settings.training.keep_checkpoints} checkpoints of {size(disk.checkpoint)}"
        yield _row("disk", f"at most {size(disk.needed)} at {disk.place} ({kept}), {size(disk.free)} free")


def _memory(diagnosis: Diagnosis, trial: Trial) -> Iterator[str]:
    memory, settings = trial.memory, diagnosis.settings
    if memory is None or settings is None:
        return
    micro = tokens_at_once(settings, trial.processes)
    how = "measured" if memory.measured else f"extrapolated from {trial.points[-1].share:.0%} of it"
    each = "" if trial.processes == 1 else f" for each of {trial.processes} processes"
    fits = diagnosis.fitting_tokens
    room = "" if fits is None else f"; up to {fits:,} tokens at once fit"
    worst = f"{size(memory.worst)} for the worst batch of {micro:,} tokens ({how})"
    yield _row("memory", f"{worst}, {size(diagnosis.available)} free{each}{room}")
    if trial.speed is not None and trial.peak > 1.1 * memory.worst:
        updates = f"{trial.speed.updates} updates with batches of many sizes"
        yield _row("", f"{size(trial.peak)} after {updates}; more updates take somewhat more")


def _long(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _row(name: str, text: str) -> str:
    return f"{name:<10}{text}".rstrip()
