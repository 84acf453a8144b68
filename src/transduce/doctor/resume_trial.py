"""Check on the user's own text, settings and machine that a kill and a resume change nothing.

A short training with the run's settings runs uninterrupted. The same training is killed with SIGKILL at random moments
and started again. Then losses and weights of both are compared bit for bit. The trainings are ordinary
`transduce train` processes in a temporary folder next to the run, which is not changed.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch

from transduce.config import Corpus, Settings, to_toml
from transduce.data.lines import bare_suffix, open_bytes
from transduce.errors import RunFolderError, TrainingError
from transduce.logging import Log
from transduce.metrics_log import MetricsFile
from transduce.process import child_environment
from transduce.runs.checkpoints import Checkpoints
from transduce.runs.folder import RunFolder
from transduce.runs.tensors import load_tensors
from transduce.tasks.registry import find_task
from transduce.training.schedule import TimeLimit

SECONDS, MOST_UPDATES, FEWEST_UPDATES = 20.0, 300, 40  # of one trial training
USUAL_SPEED = MOST_UPDATES / 3 / SECONDS  # updates per second where no run has measured it
START_SECONDS = 60.0  # for the start of a trial, its validations and its checkpoints
LONG = 8 << 20  # bytes of a text file of which only the beginning is used
LINES = 20_000
MEASURED = ("seconds", "tokens_per_second", "validation_seconds")  # by the clock
NOT_COMPARED = ("start", "restart", "rollback", "memory", "end")  # events that a kill may add or repeat


@dataclass(frozen=True, slots=True)
class Difference:
    """How two trainings differ: lines of the log, and numbers among weights and state, of how many."""

    n_lines: int
    of_lines: int
    n_numbers: int
    of_numbers: int
    largest: float

    @property
    def none(self) -> bool:
        """Whether they are equal bit for bit."""
        return not self.n_lines and not self.n_numbers

    def __str__(self) -> str:
        return (
            f"{self.n_lines:,} of {self.of_lines:,} log lines and {self.n_numbers:,} of {self.of_numbers:,} "
            f"numbers of weights and state differ, by at most {self.largest:.3g}"
        )


def verify_resume(
    path: Path, settings: Settings | None = None, *, updates: int | None = None, kills: int = 3, seed: int, log: Log
) -> tuple[bool, str]:
    """Whether a kill and a resume change nothing: to the run at `path`, or with the `settings` of a recipe there.

    The second value lists the run's settings that the trial had to replace, and therefore did not verify.
    """
    run = None if settings is not None else RunFolder.open(path, model=False)
    settings = settings or (run.settings if run is not None else Settings())
    speed = updates_per_second(run) if run is not None else USUAL_SPEED
    updates = updates or int(min(MOST_UPDATES, max(FEWEST_UPDATES, speed * SECONDS)))
    parent = path.absolute().parent  # the disk of the run, if possible
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.verify.", dir=parent if os.access(parent, os.W_OK) else None, ignore_cleanup_errors=True
    ) as temporary:
        folder = Path(temporary)
        trial = shortened(settings, folder, updates=updates, seconds=updates / speed, log=log)
        same = kill_and_compare(TrialRuns(folder, trial), updates=updates, kills=kills, seed=seed, log=log)
    return same, not_verified(settings, trial)


def shortened(settings: Settings, folder: Path, *, updates: int, seconds: float, log: Log) -> Settings:
    """The same settings with `updates` updates, three validations, frequent checkpoints and less text.

    The time limit stays unless it could end a trial of about `seconds`: the clock would decide after how many updates.
    """
    minutes = settings.training.max_minutes
    training: dict[str, Any] = {
        "max_updates": updates,
        "max_epochs": None,
        "max_minutes": minutes if minutes and 60 * minutes > 5 * seconds + START_SECONDS else None,
        "valid_updates": max(1, updates // 3),
        "save_updates": max(1, updates // 15),
        "patience": 0,
    }
    if "training.valid_bleu_sentences" in find_task(settings.task).uses:  # other tasks refuse it
        training["valid_bleu_sentences"] = min(8, settings.training.valid_bleu_sentences)
    if settings.tokenizer.extend:  # the resulting size cannot be asked for
        settings = settings.with_values("tokenizer", vocab_size=None)
    corpora = {
        key: [_beginning(corpus, folder, f"{key}{i}", log) for i, corpus in enumerate(getattr(settings.data, key))]
        for key in ("train", "valid")
    }
    return settings.with_values("training", **training).with_values("data", **corpora, test=[])


def not_verified(settings: Settings, trial: Settings) -> str:
    """The settings of training that differ in the trial, with both values; empty if there are none.

    >>> run = Settings.from_mapping({"training": {"max_epochs": 3}})
    >>> not_verified(run, Settings.from_mapping({"training": {"max_updates": 60}}))
    'training.max_updates = none (trial: 60), training.max_epochs = 3.0 (trial: none)'
    """
    before, after = settings.training.model_dump(), trial.training.model_dump()
    changed = [name for name in before if before[name] != after[name]]

    def shown(value: object) -> str:
        return "none" if value is None else str(value)

    parts = [f"training.{name} = {shown(before[name])} (trial: {shown(after[name])})" for name in changed]
    if settings.data.train != trial.data.train:
        parts.append(f"data.train (trial: the first {LINES:,} lines)")
    return ", ".join(parts)


def _beginning(corpus: Corpus, folder: Path, name: str, log: Log) -> dict[str, Any]:
    """The corpus, or the first lines of its files if they are long."""
    values = corpus.model_dump(mode="json")
    files = {side: Path(values[side]) for side in ("src", "tgt", "path") if values[side] is not None}
    for file in files.values():
        if not file.exists():
            raise RunFolderError(f"{file} is missing: a trial training needs the text of the run")
    is_tmx = any(bare_suffix(file) == ".tmx" for file in files.values())
    if is_tmx or max(file.stat().st_size for file in files.values()) < LONG:
        return values
    for side, file in files.items():
        short = folder / f"{name}.{side}{bare_suffix(file)}"
        with open_bytes(file) as lines, short.open("wb") as out:
            out.writelines(islice(lines, LINES))
        values[side] = str(short)
    log.say(f"using the first {LINES:,} lines of {', '.join(file.name for file in files.values())}")
    return values


def updates_per_second(run: RunFolder) -> float:
    """The median speed in the run's log; `USUAL_SPEED` if the log contains none."""
    events = MetricsFile(run.path / "metrics.jsonl").read()
    speeds = [
        (b["update"] - a["update"]) / (b["seconds"] - a["seconds"])
        for a, b in pairwise(events)
        if a["event"] == b["event"] == "update" and b["seconds"] > a["seconds"] and b["update"] > a["update"]
    ]
    return sorted(speeds)[len(speeds) // 2] if speeds else USUAL_SPEED


class TrialRuns:
    """`transduce train` processes with one recipe, each in its own run folder.

    If the recipe has a time limit, every folder starts with the same `time_limit.json`. Otherwise each trial would
    measure its own speed and derive another number of updates.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.recipe = folder, folder / "recipe.toml"
        self.recipe.write_text(to_toml(settings), encoding="utf-8")
        updates, minutes = settings.training.max_updates, settings.training.max_minutes
        self.time_limit = TimeLimit(updates=updates, since=0) if updates and minutes else None

    @contextlib.contextmanager
    def started(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Start or resume a run; the process is killed at the end if it is still there."""
        if self.time_limit is not None and not (self.folder / name).exists():
            with RunFolder.create(self.folder / name, Settings.from_toml(self.recipe), "") as run:
                self.time_limit.write(run)
        command = [sys.executable, "-m", "transduce", "train", str(self.recipe), "--run", str(self.folder / name)]
        with (
            (self.folder / f"{name}.err").open("ab") as errors,
            subprocess.Popen(
                [*command, "--quiet"], env=child_environment(), stdout=subprocess.DEVNULL, stderr=errors
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def finish(self, name: str) -> Path:
        """Train until the run is finished; a `TrainingError` with its last message if it fails."""
        with self.started(name) as process:
            code = process.wait()
        if code:
            words = (self.folder / f"{name}.err").read_text(encoding="utf-8", errors="replace").strip()
            last = words.splitlines()[-1].removeprefix("transduce: error: ") if words else f"exit code {code}"
            raise TrainingError(f"a training with these settings fails here: {last}")
        if any("by the clock" in e.get("reason", "") for e in MetricsFile(self.folder / name / "metrics.jsonl").read()):
            raise TrainingError("training.max_minutes ended the trial before its last update; give fewer --updates")
        return self.folder / name

    def kill_at(self, name: str, update: int, *, more: float) -> int | None:
        """Start a run and kill it `more` seconds after `update` appears in its log, or after the start if it is 0.

        Returns the last update in the log; None if the run finished before.
        """
        metrics = MetricsFile(self.folder / name / "metrics.jsonl")
        with self.started(name) as process:
            while process.poll() is None and update and _last_update(metrics) < update:
                time.sleep(0.02)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=more)
            if process.poll() is not None:
                return None
        return _last_update(metrics)


def _last_update(metrics: MetricsFile) -> int:
    return max((event["update"] for event in metrics.read() if event["event"] != "restart"), default=0)


def compare(one: Path, other: Path) -> Difference:
    """Compare the logs without measured times, the models, and the last checkpoints of two runs."""
    logs = [_computed(folder) for folder in (one, other)]
    n_lines = sum(a != b for a, b in zip(*logs, strict=False)) + abs(len(logs[0]) - len(logs[1]))
    n_numbers, of_numbers, largest = 0, 0, 0.0
    for a, b in zip(_tensors(one), _tensors(other), strict=True):
        for name in a.keys() | b.keys():
            if name not in a or name not in b or a[name].shape != b[name].shape:
                n_numbers, largest = n_numbers + 1, float("inf")
                continue
            of_numbers += a[name].numel()
            differing = (a[name] != b[name]) & ~(a[name].isnan() & b[name].isnan())
            if n := int(differing.sum()):
                n_numbers += n
                largest = max(largest, float((a[name].double() - b[name].double()).abs().max()))
    return Difference(n_lines, max(map(len, logs)), n_numbers, of_numbers, largest)


def _computed(folder: Path) -> list[dict[str, Any]]:
    events = [e for e in MetricsFile(folder / "metrics.jsonl").read() if e["event"] not in NOT_COMPARED]
    return [{key: value for key, value in event.items() if key not in MEASURED} for event in events]


def _tensors(folder: Path) -> list[dict[str, torch.Tensor]]:
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None, "a finished training has saved a checkpoint"
    return [load_tensors(folder / "model.safetensors"), last.tensors()]


def kill_and_compare(runs: TrialRuns, *, updates: int, kills: int, seed: int, log: Log) -> bool:
    """Train once uninterrupted and once with kills, and log whether both are equal; returns that."""
    draw = random.Random(seed)
    log.say(f"training {updates} updates without interruption")
    began = time.monotonic()
    whole = runs.finish("whole")
    seconds = time.monotonic() - began
    log.say(f"  finished in {seconds:.0f} seconds; now the same with {kills} kills")
    for update in [0, *sorted(draw.randint(1, max(1, updates - 10)) for _ in range(kills - 1))]:
        more = draw.uniform(0.3, 0.5 * seconds) if not update else draw.uniform(0.0, 10 * seconds / updates)
        last = runs.kill_at("killed", update, more=more)
        if last is None:
            log.say("  (it finished before the next kill)")
            break
        log.say(f"  killed with SIGKILL {f'after update {last}' if last else 'before its first logged update'}")
    difference = compare(whole, runs.finish("killed"))
    if difference.none:
        log.say(f"  {difference.of_lines:,} log lines and {difference.of_numbers:,} weights and states: equal")
        return True
    log.say(f"  {difference}")
    log.say("  for comparison, a second training without interruption")
    again = compare(whole, runs.finish("again"))
    if again.none:
        return False
    log.say(f"  two uninterrupted trainings differ here too: {again}")
    log.say("  this machine is not deterministic (a GPU may not be), so a resume cannot be exact either")
    return difference.largest <= 10 * again.largest
