"""Check data, memory, speed, time and disk space before training: `transduce.diagnose`, and `transduce doctor`.

It reads a sample, runs a few updates in a child process, and keeps nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from transduce.config import Settings
from transduce.data.corpus import sorted_labels
from transduce.data.sources import Sources
from transduce.distributed.group import check_devices
from transduce.doctor.checks import run_checks
from transduce.doctor.estimates import (
    JUDGED,
    disk_findings,
    estimate_disk,
    estimate_time,
    memory_findings,
    time_findings,
)
from transduce.doctor.findings import Finding
from transduce.doctor.lengths import check_tokens
from transduce.doctor.report import Diagnosis, Progress
from transduce.doctor.sampling import Sample, select, take_sample
from transduce.doctor.trial import measure
from transduce.errors import DataError, SettingsError, UserError
from transduce.logging import Log
from transduce.machine import Machine, this_machine
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.lock import is_locked
from transduce.runs.manifest import Manifest
from transduce.runs.run_settings import difference
from transduce.tasks.finetune import Start, extend_vocabulary, find_start
from transduce.tasks.registry import AnyTask
from transduce.tasks.resolve import check, resolve
from transduce.text.tokenizer import Tokenizers, load_tokenizers

SAMPLED = 12_000  # training rows for the trial and its vocabulary
HELD = 1_000  # rows of a validation set for the trial
SECONDS = 20.0
LEAST = 3.0  # seconds for the trial
_QUIET = Log(quiet=True)


def diagnose(
    settings: Settings,
    *,
    run: Path | str | None = None,
    log: Log | None = None,
    seconds: float | None = None,
    processes: int = 1,
) -> Diagnosis:
    """Check data, machine and run folder before a training. Problems are returned as findings, not raised.

    Args:
        settings: The settings of the training.
        run: The run folder, new or existing.
        log: Where progress is printed; default: nowhere.
        seconds: Time budget (default: 20, which is enough).
        processes: Number of processes that train together on this machine.

    Returns:
        The findings and measurements. No file is kept or changed.

    Raises `SettingsError` for a source of vectors.
    """
    if settings.model.reads_vectors:
        raise SettingsError("model.source = 'vectors': the doctor checks text; try the training with --dry-run")
    began = time.monotonic()
    examination = _Examination(settings, Path(run or "runs"), log or _QUIET, began + (seconds or SECONDS), processes)
    examination.run_all(known=None if run is None else examination.existing_run())
    examination.found.seconds = time.monotonic() - began
    return examination.found


class _Examination:
    """The steps of a diagnosis, and what they found so far."""

    def __init__(self, asked: Settings, path: Path, log: Log, until: float, processes: int) -> None:
        self.asked, self.path, self.log, self.until, self.processes = asked, path, log, until, processes
        self.found = Diagnosis()
        self.start: Start | None = None

    def run_all(self, known: RunFolder | None) -> None:
        """All steps. `known`: the run in the folder."""
        found, task_and_machine = self.found, None
        with found.collecting("settings"):
            task_and_machine = self.check_settings()
        found.sample = self.take_sample()
        is_empty = any(one.check == "empty" for one in found.obstacles)
        if task_and_machine is not None and not found.is_finished and not is_empty:
            with found.collecting("data"):
                self.try_training(*task_and_machine, known)

    def existing_run(self) -> RunFolder | None:
        """The run in the folder, if it is that of these settings and they are resolved."""
        found, path = self.found, self.path
        with found.collecting("run"):
            if why := why_unusable(path, self.asked):
                found.add(Finding("run", "obstacle", why))
            elif (path / "config.json").exists():
                found.progress, findings = progress_of(path)
                found.add(*findings)
                return RunFolder.open(path, model=False)
        return None

    def check_settings(self) -> tuple[AnyTask, Machine]:
        """Refuse settings that cannot work, and describe the machine."""
        self.start = None if has_read_text(self.path) else find_start(self.asked)
        if self.start is not None:
            self.asked = self.start.settings
        task = check(self.asked)
        machine = this_machine(self.asked.training.device).shared(1, self.processes)  # threads of all processes
        check_devices(torch.device(machine.device), self.processes)
        self.found.machine, self.found.available = machine.describe(), machine.memory
        return task, machine

    def take_sample(self) -> Sample | None:
        """A checked sample; None if the files are missing, but the run has stored their text."""
        self.log.say("checking the data ...")
        with self.found.collecting("data"):
            try:
                sample = take_sample(self.asked, seconds=0.2 * (self.until - time.monotonic()))
            except DataError as error:
                if not has_read_text(self.path):
                    raise
                self.found.add(Finding("data", "note", f"{error}; the run folder contains the encoded text"))
            else:
                self.found.add(*run_checks(sample))
                return sample
        return None

    def try_training(self, task: AnyTask, machine: Machine, known: RunFolder | None) -> None:
        """Make some updates on the sample, or on the text of the run, and estimate the whole training."""
        sample = self.found.sample
        if sample is not None and sample.n_rows:
            with tempfile.TemporaryDirectory(prefix="transduce-doctor-") as temporary:
                try:
                    self.try_sample(task, machine, sample, known, Path(temporary) / "run")
                except DataError:
                    if not sample.faults:  # if there are, too little text may be their result
                        raise
        elif known is not None and has_read_text(self.path) and (self.path / "tokens").exists():
            self.measure(self.path, known.settings)
            self.estimate(scale=1.0, n_rows=1, sampled=(1, 1))

    def try_sample(
        self, task: AnyTask, machine: Machine, sample: Sample, known: RunFolder | None, folder: Path
    ) -> None:
        """Resolve the settings, learn a vocabulary, and make some updates on the sample in a new run folder."""
        began = time.monotonic()
        small, sources, n_rows = on_sample(self.asked, sample)
        texts = task.read(small, _QUIET, sources)
        scale = sample.total / max(1, n_rows)
        if known is not None and known.has_tokenizers:
            settings, tokenizers = known.settings, load_tokenizers(known)
        else:
            extended: Tokenizers | None = None
            if self.start is None:
                self.log.say("learning a vocabulary from the sample ...")
            else:
                extended = extend_vocabulary(self.start, *task.lines(texts), _QUIET).tokenizers
            settings, tokenizers = resolve(task, small, texts, machine, _QUIET, known=extended, scale=scale)
        learned = time.monotonic()
        self.found.lengths, findings = check_tokens(sample, tokenizers, settings)
        self.found.add(*findings)
        few = min(JUDGED, settings.training.valid_bleu_sentences)
        trial_settings = settings.with_values("training", valid_bleu_sentences=few)
        with RunFolder.create(folder, trial_settings, "") as run:
            task.encode(run, texts, tokenizers, trial_settings, _QUIET)
        preparing = 0.0
        if known is None:
            growth = min(scale, 1e6 / max(1, n_rows)) ** 0.7  # learning a vocabulary uses at most a million rows
            preparing = (learned - began) * growth + (time.monotonic() - learned) * scale
        self.measure(folder, settings)
        weights = [corpus.weight for corpus in self.asked.data.train] or [1.0]  # of the corpora in an epoch
        scale = sum(w * part.total for w, part in zip(weights, sample.parts, strict=True)) / max(1, n_rows)
        n_held = sum(part.total for part in sample.held[: len(settings.data.valid)])
        n_valid = n_held or min(1000, max(1, round(0.01 * sample.total)))
        tried = min(HELD, n_valid) if n_held else max(1, round(0.01 * n_rows))
        self.estimate(scale=scale, n_rows=sample.total, sampled=(tried, n_valid), preparing=preparing)

    def measure(self, folder: Path, settings: Settings) -> None:
        """Measure updates on a prepared run folder."""
        self.log.say("trying some updates ...")
        seconds = max(LEAST, self.until - time.monotonic())
        self.found.trial, self.found.settings = measure(folder, seconds=seconds, processes=self.processes), settings

    def estimate(self, *, scale: float, n_rows: int, sampled: tuple[int, int], preparing: float = 0.0) -> None:
        """Estimate memory, time and disk space of the whole training from the trial.

        `scale`: updates of an epoch relative to the trial. `n_rows`: training rows. `sampled`: validation rows of the
        trial, and of the training.
        """
        found, settings, trial = self.found, self.found.settings, self.found.trial
        assert settings is not None and trial is not None, "measure() has set them"
        found.time = estimate_time(settings, trial, scale=scale, sampled=sampled, preparing=preparing)
        found.add(*memory_findings(settings, trial, found.available))
        if trial.checkpoint_bytes:
            n_tokens = sum(side.mean for side in found.lengths) * n_rows
            found.disk = estimate_disk(settings, trial, self.path, n_tokens=n_tokens, n_rows=n_rows)
            found.add(*disk_findings(found.disk))
        found.add(*time_findings(settings, found.time))


def why_unusable(path: Path, settings: Settings) -> str:
    """Why a training of these settings cannot use the folder, or an empty string if it can."""
    if (path / "manifest.json").exists():
        if found := difference(Manifest.read(path).asked_settings(), settings):
            return (
                f"{path} contains another run: {found}; use the same settings to resume it, or another folder (--run)"
            )
        return ""
    if path.is_dir() and any(path.iterdir()):
        return f"{path} is not empty and not a run folder; use another folder (--run)"
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))
    try:
        tempfile.TemporaryDirectory(prefix=".transduce-doctor-", dir=nearest).cleanup()
    except OSError as error:
        return f"{path} cannot be created in {nearest}: {error.strerror or error}; use another folder (--run)"
    return ""


def progress_of(path: Path) -> tuple[Progress, list[Finding]]:
    """The progress of a run, and findings about its checkpoints."""
    checkpoints = RunFolder.open(path, model=False).checkpoints
    for event in MetricsFile(path / "metrics.jsonl").read():
        if event["event"] == "end":
            at = event.get("update", 0), event.get("epochs", 0.0), 1.0, event.get("seconds", 0.0), 0.0
            return Progress(str(path), *at, event["reason"]), []
    busy = is_locked(path)
    try:
        checkpoint = checkpoints.latest()
    except UserError as error:
        return Progress(str(path), busy=busy), [Finding("run", "obstacle", str(error))]
    if checkpoint is None:
        return Progress(str(path), busy=busy), []
    state = checkpoint.state["training"]
    share, seconds = float(state["progress"]), float(state["seconds"])
    remaining = seconds * (1 - share) / share if share > 0 else None
    here = Progress(str(path), state["update"], state["epochs"], share, seconds, remaining, state["finished"], busy)
    return here, [Finding("run", "warning", note) for note in checkpoint.notes]


def on_sample(asked: Settings, sample: Sample) -> tuple[Settings, Sources[Any] | None, int]:
    """Settings and sources for a training on the sample, with as many corpora as asked, and its training rows."""
    if asked.data.demo:
        n = min(asked.data.demo, SAMPLED)
        return asked.with_values("data", demo=n), None, n
    chosen = select(sample.parts, SAMPLED)
    held = sample.held[: len(asked.data.valid)]
    train = [part.source(windows, sample.form) for part, windows in zip(sample.parts, chosen, strict=True)]
    valid = [part.source(windows, sample.form) for part, windows in zip(held, select(held, HELD), strict=True)]
    n_rows = sum(len(window.rows) for windows in chosen for window in windows)
    if sample.form == "labelled" and asked.data.labels is None and n_rows < sample.total:
        # Rare labels may be missing from the chosen rows. If only a part was read, they may be in held-out text.
        rows = chain(sample.rows(), () if sample.whole else (row for part in sample.held for row in part.rows()))
        labels = sorted_labels(row[0] for row in rows)
        if len(labels) > 1:
            asked = asked.with_values("data", labels=list(labels))
    return asked, Sources(tuple(train), tuple(valid)), n_rows
