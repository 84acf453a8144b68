"""A run folder that is there already: where its training is, and what remains. Nothing in it is changed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transduce.config import Settings
from transduce.doctor.findings import Finding
from transduce.errors import UserError
from transduce.logging import duration
from transduce.metrics_log import MetricsFile
from transduce.runs.folder import RunFolder
from transduce.runs.lock import is_locked
from transduce.runs.manifest import Manifest
from transduce.runs.run_settings import asked_settings, difference


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is. `remaining`: seconds at the pace so far, None where nothing is known."""

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
        """For people."""
        if self.finished:
            return f"{self.path} is finished: update {self.update:,}, epoch {self.epochs:.1f} ({self.finished})"
        if not self.update:
            where = "has not saved a training state yet; the same command goes on with it"
        else:
            left = "" if self.remaining is None else f", {duration(self.remaining)} remain at its pace so far"
            where = f"is at update {self.update:,}, epoch {self.epochs:.2f}, {self.progress:.0%} of the way{left}"
        return f"{self.path} {where}{'; another process trains in it now' if self.busy else ''}"


def asked_of(path: Path) -> Settings:
    """The settings that a run was asked for with. A `RunFolderError` where there is no run."""
    return asked_settings(Manifest.read(path))


def no_place(path: Path) -> str:
    """Why no run folder can be made at `path`; nothing where it can, or where one is: that one may be finished."""
    if (path / "manifest.json").exists():
        return ""
    nearest = path.absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{path} cannot be made: {nearest} is no folder; name another place with --run"
    try:
        if nearest == path.absolute():
            return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written to; name another with --run"
        Path(tempfile.mkdtemp(prefix=".transduce-doctor-", dir=nearest)).rmdir()
    except OSError as error:
        return f"{path} cannot be made in {nearest}: {error.strerror or error}; name another place with --run"
    return ""


def another_run(path: Path, settings: Settings) -> str:
    """Why a training of these settings cannot go into a folder that is there; nothing where it can."""
    if not path.is_dir() or not any(path.iterdir()):
        return ""
    if not (path / "manifest.json").exists():
        return f"{path} is no run folder and not empty; name another with --run"
    if not (found := difference(asked_of(path), settings)):
        return ""
    return f"{path} contains another run: {found}; give the same settings to resume it, or name another with --run"


def progress_of(path: Path) -> tuple[Progress, list[Finding]]:
    """Where the run in a folder is, and what is wrong with it."""
    folder = RunFolder.open(path, model=False)
    events = MetricsFile(path / "metrics.jsonl").read()
    busy = is_locked(path)
    end = next((event for event in events if event["event"] == "end"), None)
    if end is not None:
        done = Progress(
            str(path), end.get("update", 0), end.get("epochs", 0.0), 1.0, end.get("seconds", 0.0), 0.0, end["reason"]
        )
        return done, []
    try:
        checkpoint = folder.latest_checkpoint()
    except UserError as error:
        return Progress(str(path), busy=busy), [Finding("run", "obstacle", str(error))]
    found = [Finding("run", "warning", note) for note in checkpoint.notes] if checkpoint else []
    if checkpoint is None:
        return Progress(str(path), busy=busy), found
    state: dict[str, Any] = checkpoint.state["training"]
    share, seconds = float(state["progress"]), float(state["seconds"])
    remaining = seconds * (1 - share) / share if share > 0 else None
    here = Progress(str(path), state["update"], state["epochs"], share, seconds, remaining, state["finished"], busy)
    return here, found
