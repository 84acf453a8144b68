"""Whether the machine is enough: memory, disk, time. Pure functions of what was measured."""

from __future__ import annotations

from transduce.config import Settings
from transduce.doctor.findings import Finding
from transduce.doctor.forecast import ROOM, Disk, Time
from transduce.doctor.measuring import FULL, OVER, Trial, tokens_at_once
from transduce.logging import duration

_LEAST = 64  # tokens of a micro-batch that is worth trying
_DAY = 86_400.0
_SMALLER = (
    "choose a smaller model (--set model.preset=tiny), smaller batches (--set training.batch_tokens=N) or shorter "
    "texts (--set data.max_length=N)"
)


def size(n_bytes: float) -> str:
    """Bytes for people.

    >>> size(3 * 2**30), size(5e6)
    ('3.0 GiB', '5 MiB')
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


def fitting_tokens(settings: Settings, trial: Trial, available: int) -> int | None:
    """The largest micro-batch whose worst case stays within ROOM of what is free; None where nothing is known."""
    if trial.memory is None:
        return None
    micro = tokens_at_once(settings, trial.processes)
    share = trial.memory.share_for(ROOM * available)
    tokens = min(micro * share, 1 << 24)
    return int(tokens) // 256 * 256 if tokens >= 256 else int(tokens)


def memory_findings(settings: Settings, trial: Trial, available: int) -> list[Finding]:
    """The worst batch in the memory that is free."""
    memory, micro = trial.memory, tokens_at_once(settings, trial.processes)
    if memory is None:
        if trial.died == FULL:
            return [
                Finding("memory", "obstacle", "the model does not fit: the trial updates ran out of memory", _SMALLER)
            ]
        text = f"the trial updates ended too early: {trial.died or 'nothing was measured'}"
        advice = "of memory and speed nothing is known"
        if trial.died == OVER:
            advice += "; try again when the machine has less to do"
        return [Finding("memory", "warning", text, advice)]
    figures = {"worst": memory.worst, "measured": memory.measured, "available": available, "peak": trial.peak}
    if trial.peak <= ROOM * available and not trial.died:
        return []
    told = "takes" if memory.measured else "will take about"
    text = f"the worst batch of {micro:,} tokens {told} {size(memory.worst)} of the {size(available)} free"
    if trial.peak > memory.worst and trial.speed is not None:
        text = f"{trial.speed.updates} updates of many sizes held {size(trial.peak)} of the {size(available)} free"
    fits = fitting_tokens(settings, trial, available) or 0
    least = max(_LEAST, settings.data.context or 0)
    if fits >= micro:
        fits = int(trial.points[-1].share * micro * 0.8)  # it took more than seemed to be needed
    advice = f"--set training.micro_batch_tokens={fits} takes an update in parts that fit, with the same gradient"
    if fits < least:
        advice = "not even a small batch fits: choose a smaller model (--set model.preset=tiny) or shorter texts"
    if trial.died == FULL:
        text = f"the trial updates ran out of memory: {text}"
    if trial.peak > available or trial.died == FULL:
        return [Finding("memory", "obstacle", text, advice, figures)]
    if trial.died:
        return [Finding("memory", "warning", f"the trial updates ended too early: {trial.died}", "", figures)]
    return [Finding("memory", "warning", f"{text}, which is near the edge", advice, figures)]


def disk_findings(disk: Disk) -> list[Finding]:
    """The run folder on its disk."""
    if disk.needed <= disk.free:
        return []
    text = f"the run needs {size(disk.needed)} at {disk.place}, where {size(disk.free)} are free"
    advice = "make room, name another place with --run, or keep fewer: --set training.keep_checkpoints=1"
    return [Finding("disk", "obstacle", text, advice, {"needed": disk.needed, "free": disk.free})]


def time_findings(settings: Settings, time: Time | None) -> list[Finding]:
    """A training that will not see the data once, or will take weeks."""
    if time is None:
        return []
    epochs = time.updates / time.updates_an_epoch
    found = []
    if time.total > 7 * _DAY:
        text = f"the training will take {time.total / _DAY:.0f} days"
        found.append(Finding("time", "warning", text, "--set training.max_minutes=N ends it when they are over"))
    if epochs < 0.9 and time.by == "max_minutes":
        text = f"{duration(time.updating)} of updates are {epochs:.2f} of an epoch: not all of the text will be seen"
        found.append(Finding("time", "warning", text, "raise training.max_minutes, or choose a smaller model"))
    warmup = settings.training.warmup_updates or 0
    if warmup > 0.5 * time.updates:
        text = f"training.warmup_updates = {warmup:,} of only about {time.updates:,} updates"
        found.append(Finding("time", "warning", text, "lower it: the learning rate would never do its work"))
    return found
