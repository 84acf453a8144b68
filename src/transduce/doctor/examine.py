"""`transduce doctor`: what a training would meet, before it is begun. Reads a sample, tries a little, keeps nothing."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from transduce.config import Settings
from transduce.data.labelled import Labelled, labels_in
from transduce.data.preparation import has_prepared
from transduce.distributed.group import check_devices
from transduce.doctor.checks import run_checks
from transduce.doctor.copied import Copies
from transduce.doctor.diagnosis import Diagnosis
from transduce.doctor.findings import Finding
from transduce.doctor.forecast import JUDGED, disk_needed, time_needed
from transduce.doctor.measuring import Trial, measure
from transduce.doctor.progress import Progress, another_run, no_place, progress_of
from transduce.doctor.resources import disk_findings, memory_findings, time_findings
from transduce.doctor.sampling import Sample, drawn, take_sample
from transduce.doctor.tokens import look
from transduce.errors import DataError, UserError
from transduce.logging import Log
from transduce.machine import Machine, this_machine
from transduce.runs.folder import RunFolder, has_read_text
from transduce.tasks.finetune import Start, learn_more
from transduce.tasks.resolve import AnyTask, check, resolve, start_of
from transduce.text.tokenizer import Tokenizers, load_tokenizers

SAMPLED = 12_000  # rows that a vocabulary is learned from and updates are tried with
HELD = 1_000  # of a validation set
SECONDS = 20.0
LEAST = 3.0  # of them for the trial, in which it can at least begin


@dataclass(slots=True)
class _Work:
    """What becomes known on the way."""

    asked: Settings
    run: Path
    log: Log
    until: float
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    start: Start | None = None
    processes: int = 1

    def obstacle(self, check: str, error: Exception, advice: str = "") -> None:
        self.findings.append(Finding(check, "obstacle", " ".join(str(error).split()), advice))


def diagnose(
    settings: Settings,
    *,
    run: Path | str | None = None,
    log: Log | None = None,
    seconds: float | None = None,
    processes: int = 1,
) -> Diagnosis:
    """Look at the data, the machine and the run folder that a training of `settings` would meet.

    Takes about `seconds`, of which SECONDS is enough. `run`: where the run folder goes, or is. `processes`: that train
    together on this machine. What is wrong comes back as findings, not as errors; nothing is kept.
    """
    began = time.monotonic()
    work = _Work(
        settings, Path(run or "runs"), log or Log(quiet=True), began + (seconds or SECONDS), processes=processes
    )
    task = machine = None
    try:
        work.start = None if has_read_text(work.run) else start_of(settings)
        task, machine = (
            check(settings if work.start is None else work.start.settings),
            this_machine(settings.training.device).shared(1, processes),  # our threads are those of all of them
        )
        check_devices(torch.device(machine.device), processes)
        work.facts["machine"] = machine.describe()
        work.facts["available"] = machine.memory
    except UserError as error:
        work.obstacle("settings", error)
    known = _at(work, run is not None)
    if work.start is not None:
        work.asked = work.start.settings
    sample = _sampled(work)
    if task is not None and machine is not None and not _is_finished(work):
        _try(work, task, machine, sample, known)
    return Diagnosis(
        findings=tuple(work.findings),
        sample=None if sample is None else _bare(sample),
        seconds=time.monotonic() - began,
        **work.facts,
    )


def _at(work: _Work, named: bool) -> RunFolder | None:
    """The run that the folder holds already, if it is the one asked for and knows its settings."""
    path = work.run
    try:
        if named and (why := no_place(path) or another_run(path, work.asked)):
            work.findings.append(Finding("run", "obstacle", why))
            return None
        if not named or not (path / "manifest.json").exists():
            return None
        work.facts["progress"], found = progress_of(path)
        work.findings += found
        return RunFolder.open(path, model=False)
    except UserError as error:
        if (path / "config.json").exists():
            work.obstacle("run", error)
        return None


def _is_finished(work: _Work) -> bool:
    progress: Progress | None = work.facts.get("progress")
    return progress is not None and bool(progress.finished)


def _sampled(work: _Work) -> Sample | None:
    """A sample, looked at by all checks; none where the files are gone, but the run has its text."""
    try:
        work.log.say("looking at the data ...")
        sample = take_sample(work.asked, seconds=0.2 * (work.until - time.monotonic()))
    except UserError as error:
        if isinstance(error, DataError) and has_read_text(work.run):
            work.findings.append(Finding("data", "note", f"{error}; the run has its text in its folder"))
        elif not _is_finished(work):
            work.obstacle("data", error)
        return None
    work.findings += run_checks(sample)
    return sample


def _try(work: _Work, task: AnyTask, machine: Machine, sample: Sample | None, known: RunFolder | None) -> None:
    """Choose, learn a vocabulary, make some updates, and say what follows from it."""
    if any(one.check == "empty" and one.level == "obstacle" for one in work.findings):
        return  # no pair is left: there is no more to say
    try:
        if sample is None or not sample.n_rows:
            if known is not None and has_read_text(work.run) and has_prepared(known):
                _forecast(work, known.settings, _measured(work, work.run), None, 0.0)
            return
        with tempfile.TemporaryDirectory(prefix="transduce-doctor-") as temporary:
            _try_sample(work, task, machine, sample, known, Path(temporary))
    except UserError as error:
        work.obstacle("data", error)


def _try_sample(
    work: _Work, task: AnyTask, machine: Machine, sample: Sample, known: RunFolder | None, temporary: Path
) -> None:
    copies = Copies(temporary, sample.form)
    try:
        _try_copies(work, task, machine, sample, known, copies)
    except DataError as error:
        raise DataError(copies.told(str(error))) from None


def _try_copies(
    work: _Work, task: AnyTask, machine: Machine, sample: Sample, known: RunFolder | None, copies: Copies
) -> None:
    began = time.monotonic()
    small, n_rows = _on_sample(work.asked, sample, copies)
    texts = task.read(small, Log(quiet=True))
    scale = sample.total / max(1, n_rows)
    if known is not None and known.has_tokenizers:
        settings, tokenizers = known.settings, load_tokenizers(known)
    else:
        quiet, taken = Log(quiet=True), None
        if work.start is None:
            work.log.say("learning a vocabulary from the sample ...")
        else:
            taken = learn_more(work.start, *task.lines(texts, small), quiet).tokenizers
        settings, tokenizers = resolve(task, small, texts, machine, quiet, known=taken, scale=scale)
    learned = time.monotonic()
    work.facts["lengths"], found = look(sample, tokenizers, settings)
    work.findings += found
    folder = _prepared(task, texts, settings, tokenizers, copies.folder / "run")
    encoded = time.monotonic()
    preparing = (learned - began) * min(scale, 1e6 / max(1, n_rows)) ** 0.7 + (encoded - learned) * scale
    _forecast(work, settings, _measured(work, folder), sample, preparing if known is None else 0.0, n_rows)


def _on_sample(asked: Settings, sample: Sample, copies: Copies) -> tuple[Settings, int]:
    """The same settings, on files that hold the sample, each as many as there are; and how many rows to train on."""
    if asked.data.demo:
        n = min(asked.data.demo, SAMPLED)
        return asked.with_values("data", demo=n), n
    chosen = drawn(sample.parts, SAMPLED)
    n_rows = sum(len(window.rows) for windows in chosen for window in windows)
    values: dict[str, Any] = {"test": []}
    corpora = [copies.write(part, windows) for part, windows in zip(sample.parts, chosen, strict=True)]
    values["train"] = [corpus.model_dump() for corpus in corpora]
    held = sample.held[: len(asked.data.valid)]
    corpora = [copies.write(part, windows) for part, windows in zip(held, drawn(held, HELD), strict=True)]
    values["valid"] = [corpus.model_dump() for corpus in corpora]
    if sample.form == "labelled" and asked.data.labels is None and n_rows < sample.total:
        labels = _labels(sample)
        if len(labels) > 1:
            values["labels"] = labels
    return asked.with_values("data", **values), n_rows


def _labels(sample: Sample) -> list[str]:
    """All that were seen: where not all was, a label of a held-out set may stand in the training text too."""
    rows = chain(sample.rows(), () if sample.whole else (row for part in sample.held for row in part.rows()))
    return list(labels_in(Labelled(row[0], row[1:], ("", 0)) for row in rows))


def _prepared(task: AnyTask, texts: Any, settings: Settings, tokenizers: Tokenizers, path: Path) -> Path:
    """A run folder with the encoded sample, to try updates on."""
    few = min(JUDGED, settings.training.valid_bleu_sentences)
    settings = settings.with_values("training", valid_bleu_sentences=few)
    with RunFolder.create(path, settings, "") as folder:
        folder.write_settings(settings)
        task.encode(folder, texts, tokenizers, settings, Log(quiet=True))
    return path


def _measured(work: _Work, folder: Path) -> Trial:
    work.log.say("trying some updates ...")
    return measure(folder, seconds=max(LEAST, work.until - time.monotonic()), processes=work.processes)


def _forecast(
    work: _Work, settings: Settings, trial: Trial, sample: Sample | None, preparing: float, n_rows: int = 1
) -> None:
    """What follows for memory, time and disk."""
    facts = work.facts
    n_held = sum(part.total for part in sample.held[: len(settings.data.valid)]) if sample else 1
    weighted = _weighted(work.asked, sample) if sample else 1.0
    scale = weighted / max(1, n_rows) if sample else 1.0
    n_valid = n_held or min(1000, max(1, round(0.01 * (sample.total if sample else 1))))
    tried = min(HELD, n_valid) if n_held else max(1, round(0.01 * n_rows))
    facts |= {"trial": trial, "settings": settings}
    facts["time"] = time_needed(settings, trial, scale=scale, sampled=(tried, n_valid), preparing=preparing)
    mean = sum(side.mean for side in facts.get("lengths", ()))
    total = sample.total if sample else 0
    if trial.checkpoint_bytes:
        facts["disk"] = disk_needed(settings, trial, work.run, n_tokens=mean * total, n_rows=total)
    work.findings += memory_findings(settings, trial, facts["available"])
    work.findings += disk_findings(facts["disk"]) if "disk" in facts else []
    work.findings += time_findings(settings, facts["time"])


def _weighted(asked: Settings, sample: Sample) -> float:
    """Rows of an epoch: some corpora are passed over more than once."""
    weights = [corpus.weight for corpus in asked.data.train] or [1.0]
    return sum(weight * part.total for weight, part in zip(weights, sample.parts, strict=True))


def _bare(sample: Sample) -> Sample:
    """What was looked at, without the text."""

    def emptied(parts: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(part, blocks=(), reread=None) for part in parts)

    return replace(sample, parts=emptied(sample.parts), held=emptied(sample.held), looked_at=sample.n_rows)
