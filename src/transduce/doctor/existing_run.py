"""The run folder of a training: whether one can be created, or what state an existing one is in. Nothing is changed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transduce.config import Settings
from transduce.doctor.findings import Finding
from transduce.errors import UserError
from transduce.logging import duration
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder
from transduce.runs.lock import is_locked
from transduce.runs.manifest import Manifest
from transduce.runs.run_settings import difference


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


def why_unusable(path: Path, settings: Settings) -> str:
    """Why a training of these settings cannot use the folder, or an empty string if it can."""
    if (path / "manifest.json").exists():
        found = difference(Manifest.read(path).asked_settings(), settings)
        why = f"{path} contains another run: {found}; use the same settings to resume it, or" if found else ""
    elif path.is_dir() and any(path.iterdir()):
        why = f"{path} is not empty and not a run folder; use"
    else:
        why = _why_not_writable(path)
    return f"{why} another folder (--run)" if why else ""


def _why_not_writable(path: Path) -> str:
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))
    try:
        tempfile.TemporaryDirectory(prefix=".transduce-doctor-", dir=nearest).cleanup()
    except OSError as error:
        return f"{path} cannot be created in {nearest}: {error.strerror or error}; use"
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
