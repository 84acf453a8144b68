"""Shows, on the user's own text, settings and machine, that a kill and a resume change nothing.

A short training with the run's settings goes its way uninterrupted; the same again is killed with SIGKILL at random
moments and started again each time; then losses and weights of both are compared bit for bit. All of it happens in a
folder of its own beside the run, which stays as it is. The processes are those that a user starts: `transduce train`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
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

SECONDS, MOST_UPDATES, FEWEST_UPDATES = 20.0, 300, 40  # of one of the trainings
LONG = 8 << 20  # bytes of a text file from which on only its beginning is used
LINES = 20_000
CLOCKED = ("seconds", "tokens_per_second", "validation_seconds")
WAY = ("start", "restart", "rollback", "memory", "end")  # events that tell of the way, not of what was computed


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two trainings are apart: lines of the log that differ, of how many, and numbers of weights and state."""

    n_lines: int
    of_lines: int
    n_numbers: int
    of_numbers: int
    largest: float

    @property
    def none(self) -> bool:
        """Whether they are equal to the bit."""
        return not self.n_lines and not self.n_numbers

    def __str__(self) -> str:
        return (
            f"{self.n_lines:,} of {self.of_lines:,} lines of the log and {self.n_numbers:,} of {self.of_numbers:,} "
            f"numbers of weights and state differ, by {self.largest:.3g} at most"
        )


def shortened(settings: Settings, folder: Path, *, updates: int, log: Log) -> Settings:
    """The same settings for `updates` updates, with three validations, saved often, and with less text."""
    training = {
        "max_updates": updates,
        "max_epochs": None,
        "max_minutes": None,
        "valid_updates": max(1, updates // 3),
        "save_updates": max(1, updates // 15),
        "patience": 0,
    }
    if "training.valid_bleu_sentences" in find_task(settings.task).uses:  # others refuse it
        training["valid_bleu_sentences"] = min(8, settings.training.valid_bleu_sentences)
    if settings.tokenizer.extend:  # the size that comes of it is none to ask for
        settings = settings.with_values("tokenizer", vocab_size=None)
    names = {}
    for key in ("train", "valid"):
        names[key] = [
            _beginning(corpus, folder, f"{key}{i}", log) for i, corpus in enumerate(getattr(settings.data, key))
        ]
    return settings.with_values("training", **training).with_values("data", **names, test=[])


def _beginning(corpus: Corpus, folder: Path, name: str, log: Log) -> dict[str, Any]:
    """The corpus, or the first lines of its files where they are long."""
    values = corpus.model_dump(mode="json")
    files = {side: Path(values[side]) for side in ("src", "tgt", "path") if values[side] is not None}
    for file in files.values():
        if not file.exists():
            raise RunFolderError(f"{file} is gone: a run can be trained a little only with its text")
    if max(file.stat().st_size for file in files.values()) < LONG or any(
        bare_suffix(f) == ".tmx" for f in files.values()
    ):
        return values
    for side, file in files.items():
        short = folder / f"{name}.{side}{bare_suffix(file)}"
        with open_bytes(file) as lines, short.open("wb") as out:
            out.writelines(islice(lines, LINES))
        values[side] = str(short)
    log.say(f"of {', '.join(f.name for f in files.values())} the first {LINES:,} lines")
    return values


def updates_for(run: RunFolder | None, seconds: float) -> int:
    """How many updates take about `seconds`, by the pace of the run's log."""
    events = MetricsFile(run.path / "metrics.jsonl").read() if run is not None else []
    paces = [
        (b["update"] - a["update"]) / (b["seconds"] - a["seconds"])
        for a, b in pairwise(events)
        if a["event"] == b["event"] == "update" and b["seconds"] > a["seconds"] and b["update"] > a["update"]
    ]
    pace = sorted(paces)[len(paces) // 2] if paces else MOST_UPDATES / 3 / seconds
    return int(min(MOST_UPDATES, max(FEWEST_UPDATES, pace * seconds)))


class Trainings:
    """`transduce train` of one recipe, in processes of their own, each in a folder of its own."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.recipe = folder, folder / "recipe.toml"
        self.recipe.write_text(to_toml(settings), encoding="utf-8")

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start, or go on with, one of them."""
        command = [sys.executable, "-m", "transduce", "train", str(self.recipe), "--run", str(self.folder / name)]
        environment = child_environment()
        with (self.folder / f"{name}.err").open("ab") as errors:
            return subprocess.Popen([*command, "--quiet"], env=environment, stdout=subprocess.DEVNULL, stderr=errors)

    def finish(self, name: str) -> Path:
        """Run one to its end; a `TrainingError` tells its last words where it fails."""
        with _ended(self.start(name)) as process:
            code = process.wait()
        if code:
            words = (self.folder / f"{name}.err").read_text(encoding="utf-8", errors="replace").strip()
            last = words.splitlines()[-1].removeprefix("transduce: error: ") if words else f"exit code {code}"
            raise TrainingError(f"a training of this folder's settings fails here: {last}")
        return self.folder / name

    def kill_at(self, name: str, update: int, *, more: float) -> int | None:
        """Start one and kill it `more` seconds after its log tells of `update`; 0: after `more` seconds.

        The update that the log then told of; None where it came to its end before.
        """
        metrics = MetricsFile(self.folder / name / "metrics.jsonl")
        with _ended(self.start(name)) as process:
            while process.poll() is None and update and _last_update(metrics) < update:
                time.sleep(0.02)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=more)
            if process.poll() is not None:
                return None
            process.send_signal(signal.SIGKILL)
            process.wait()
        return _last_update(metrics)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Never leave the process behind."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _last_update(metrics: MetricsFile) -> int:
    return max((event["update"] for event in metrics.read() if event["event"] != "restart"), default=0)


def compare(one: Path, other: Path) -> Difference:
    """The logs without what a clock measured, the models, and all that the last training states hold."""
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
    events = MetricsFile(folder / "metrics.jsonl").read()
    return [{k: v for k, v in event.items() if k not in CLOCKED} for event in events if event["event"] not in WAY]


def _tensors(folder: Path) -> list[dict[str, torch.Tensor]]:
    state = Checkpoints(folder / "checkpoints").latest()
    assert state is not None, "a finished training has saved its state"
    return [load_tensors(folder / "model.safetensors"), state.tensors()]


@contextlib.contextmanager
def workplace(beside: Path) -> Iterator[Path]:
    """A folder for trial trainings, on the same disk if that may be written, removed at the end."""
    parent = beside.absolute().parent
    place = parent if os.access(parent, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.verify.", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_and_compare(trainings: Trainings, *, updates: int, kills: int, seed: int, log: Log) -> bool:
    """Train uninterrupted, train with kills, compare; whether the two are equal. Tells what it does."""
    draw = random.Random(seed)
    log.say(f"training {updates} updates, uninterrupted")
    began = time.monotonic()
    whole = trainings.finish("whole")
    seconds = time.monotonic() - began
    log.say(f"  done in {seconds:.0f} seconds; now the same, killed {kills} times")
    places = [0, *sorted(draw.randint(1, max(1, updates - 10)) for _ in range(kills - 1))]
    for update in places:
        more = draw.uniform(0.3, 0.5 * seconds) if not update else draw.uniform(0.0, 10 * seconds / updates)
        last = trainings.kill_at("killed", update, more=more)
        if last is None:
            log.say("  (it was at its end before the next kill)")
            break
        log.say(f"  killed with SIGKILL, {f'after update {last}' if last else 'before its first updates were told'}")
    killed = trainings.finish("killed")
    difference = compare(whole, killed)
    if difference.none:
        log.say(
            f"  {difference.of_lines:,} lines of losses, {difference.of_numbers:,} numbers of weights and state: equal"
        )
        return True
    log.say(f"  {difference}")
    log.say("  for comparison, a second uninterrupted training")
    again = compare(whole, trainings.finish("again"))
    if again.none:
        return False
    log.say(f"  two uninterrupted trainings differ here too: {again}")
    log.say("  this machine does not compute the same thing twice (as a GPU may not), so a resume cannot either")
    return difference.largest <= 10 * again.largest


def verify(
    path: Path, settings: Settings | None = None, *, updates: int | None = None, kills: int = 3, seed: int, log: Log
) -> bool:
    """Whether a kill and a resume change nothing: to the run at `path`, or with the `settings` of a recipe there."""
    run = None if settings is not None else RunFolder.open(path, model=False)
    settings = settings or (run.settings if run is not None else Settings())
    updates = updates or updates_for(run, SECONDS)
    with workplace(path) as folder:
        trainings = Trainings(folder, shortened(settings, folder, updates=updates, log=log))
        return kill_and_compare(trainings, updates=updates, kills=kills, seed=seed, log=log)
