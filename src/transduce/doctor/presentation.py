"""A diagnosis for people: a few lines, a histogram, and the verdict last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transduce.doctor.diagnosis import Diagnosis
from transduce.doctor.findings import Finding, about
from transduce.doctor.measuring import Trial, tokens_at_once
from transduce.doctor.resources import size
from transduce.doctor.sampling import Part, Sample
from transduce.doctor.tokens import EDGES, Lengths
from transduce.logging import duration

_BAR = 24
_NOUNS = {"pairs": "pairs", "text": "lines", "labelled": "texts"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """All that there is to say, the verdict last."""
    lines = [line for part in (_data, _machine, _notes) for line in part(diagnosis)]
    for level, mark in (("warning", "warning: "), ("obstacle", "obstacle: ")):
        found = [one for one in diagnosis.findings if one.level == level]
        lines += [""] * bool(found) + [f"{mark}{one.line}" for one in found]
    n = len(diagnosis.obstacles)
    verdict = "ready" if diagnosis.ready else f"not ready: {n} obstacle{'s' if n > 1 else ''}"
    if diagnosis.ready and (lacking := diagnosis.unmeasured):
        verdict += f" as far as was seen; not measured: {', '.join(lacking)}"
    return [*lines, "", f"{verdict} ({diagnosis.seconds:.0f} s)"]


def histogram(sides: Sequence[Lengths]) -> list[str]:
    """How many texts have how many tokens, a column a side."""
    if not sides:
        return []
    used = [i for i in range(len(EDGES) + 1) if any(side.counts[i] for side in sides)]
    heads = [f"{side.side}: median {side.median}, longest {side.longest}" for side in sides]
    lines = [" " * 12 + "  ".join(f"{head:<{_BAR + 7}}" for head in heads).rstrip()]
    largest = max(max(side.counts) / max(1, sum(side.counts)) for side in sides)
    for i in range(used[0], used[-1] + 1):
        begin = EDGES[i - 1] + 1 if i else 0
        name = f"{begin:>4} - {EDGES[i]:<4}" if i < len(EDGES) else f"{begin:>4} on    "
        cells = []
        for side in sides:
            share = side.counts[i] / max(1, sum(side.counts))
            cells.append(f"{_bar(share / largest):<{_BAR}} {share:>4.0%}  ")
        lines.append(f"{name} " + "  ".join(cells).rstrip())
    return lines


def _bar(share: float) -> str:
    """A bar of blocks, in eighths."""
    eighths = round(share * _BAR * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "") or ("▏" if share else "")


def _data(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.progress is not None:
        yield _row("run", diagnosis.progress.line)
    sample = diagnosis.sample
    if sample is None:
        return
    for part in sample.parts:
        yield _row("data", _told(part, sample))
    for part in sample.held:
        yield _row("held out", f"{part.name}: {part.total:,}")
    yield from (_row("tokens", line) if not i else f"{'':<10}{line}" for i, line in enumerate(_hist(diagnosis)))


def _hist(diagnosis: Diagnosis) -> list[str]:
    return [line.rstrip() for line in histogram(diagnosis.lengths)]


def _told(part: Part, sample: Sample) -> str:
    total = f"{part.total:,}" if part.counted else about(part.total)
    return f"{part.name}: {total} {_NOUNS[sample.form]} ({part.how})"


def _machine(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.machine:
        yield _row("machine", diagnosis.machine)
    trial, settings, time, disk = diagnosis.trial, diagnosis.settings, diagnosis.time, diagnosis.disk
    if trial is None or settings is None:
        return
    if trial.parameters:
        preset = f"{settings.model.preset}, " if settings.model.preset else ""
        n_pieces = settings.tokenizer.vocab_size or 0
        yield _row("model", f"{preset}{trial.parameters:,} weights, {n_pieces:,} pieces")
    yield from _memory(diagnosis, trial)
    if trial.speed is not None:
        speed = trial.speed
        yield _row(
            "speed",
            f"{speed.targets_a_second:,.0f} target tokens/s, {speed.seconds_an_update:.3g} s an update "
            f"({speed.updates} tried)",
        )
    if time is not None:
        parts = (
            f"preparing {_long(time.preparing)}, updates {_long(time.updating)}, validation {_long(time.validating)}"
        )
        yield _row("time", f"an epoch takes about {_long(time.epoch)} ({about(time.updates_an_epoch)} updates)")
        yield _row(
            "",
            f"to the end (training.{time.by}) about {_long(time.total)}: {parts}; {time.updates:,} updates, "
            f"{time.updates / time.updates_an_epoch:.1f} epochs",
        )
    if disk is not None:
        kept = settings.training.keep_checkpoints
        yield _row(
            "disk",
            f"{size(disk.needed)} at most at {disk.place}, {size(disk.free)} free "
            f"({kept} checkpoints of {size(disk.checkpoint)} kept)",
        )


def _memory(diagnosis: Diagnosis, trial: Trial) -> Iterator[str]:
    memory, settings = trial.memory, diagnosis.settings
    if memory is None or settings is None:
        return
    micro = tokens_at_once(settings, trial.processes)
    each = "" if trial.processes == 1 else f" for each of {trial.processes} processes"
    how = "measured" if memory.measured else f"continued from {trial.points[-1].share:.0%} of it"
    fits = diagnosis.fitting_tokens
    room = "" if fits is None else f"; up to {fits:,} tokens at once fit"
    yield _row(
        "memory",
        f"{size(memory.worst)} at the worst batch of {micro:,} tokens ({how}), {size(diagnosis.available)} free"
        f"{each}{room}",
    )
    if trial.speed is not None and trial.peak > 1.1 * memory.worst:
        many = (
            f"after {trial.speed.updates} updates of many sizes {size(trial.peak)} were held, and it grows for a while"
        )
        yield _row("", many)


def _notes(diagnosis: Diagnosis) -> Iterator[str]:
    notes: list[Finding] = [one for one in diagnosis.findings if one.level == "note"]
    for i, one in enumerate(notes):
        yield _row("seen" if not i else "", one.line)


def _long(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _row(name: str, text: str) -> str:
    return f"{name:<10}{text}"
