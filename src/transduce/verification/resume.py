"""Check on the user's own text, settings and machine that a kill and a resume change nothing.

A short training with the run's settings runs uninterrupted. The same training is killed with SIGKILL at random moments
and started again. Then losses and weights of both are compared bit for bit. The trainings are ordinary
`transduce train` processes in a temporary folder next to the run, which is not changed.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch

from transduce.config.recipe import to_toml
from transduce.config.settings import Corpus, Settings, is_remote
from transduce.data.corpus import corpus_files, corpus_name, is_by_line
from transduce.data.lines import bare_suffix, is_missing, open_bytes
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
NOT_COMPARED = ("start", "restart", "memory", "end")  # events that a kill may add or repeat


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of two trainings. `largest`: difference of two numbers among weights and state."""

    same: bool
    largest: float
    summary: str


def verify_resume(
    path: Path, settings: Settings | None = None, *, updates: int | None = None, kills: int = 3, seed: int, log: Log
) -> tuple[bool, str]:
    """Whether a kill and a resume change nothing: to the run at `path`, or with the `settings` of a recipe there.

    The second value lists the run's settings that the trial had to replace, and therefore did not verify.
    """
    speed = USUAL_SPEED
    if settings is None:
        run = RunFolder.open(path, model=False)
        settings, speed = run.settings, updates_per_second(run)
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
        "track": (),
    }
    if "training.valid_bleu_sentences" in find_task(settings.task).uses:  # other tasks refuse it
        training["valid_bleu_sentences"] = min(8, settings.training.valid_bleu_sentences)
    if settings.tokenizer.extend:  # the resulting size cannot be asked for
        settings = settings.with_values("tokenizer", vocab_size=None)
    train = [_beginning(corpus, folder, f"train{i}", log) for i, corpus in enumerate(settings.data.train)]
    valid = [_beginning(corpus, folder, f"valid{i}", log) for i, corpus in enumerate(settings.data.valid)]
    links = settings.training.guided_alignment
    if links is not None and train[0] != settings.data.train[0].model_dump(mode="json"):
        training["guided_alignment"] = str(_first_lines(links, folder, "links"))
    return settings.with_values("training", **training).with_values("data", train=train, valid=valid, test=[])


def not_verified(settings: Settings, trial: Settings) -> str:
    """The settings of training that differ in the trial, with both values; empty if there are none.

    >>> run = Settings.from_mapping({"training": {"max_epochs": 3}})
    >>> not_verified(run, Settings.from_mapping({"training": {"max_updates": 60}}))
    'training.max_updates = none (trial: 60), training.max_epochs = 3.0 (trial: none)'
    """
    both = zip(settings.training, trial.training, strict=True)
    changed = [
        (name, *("none" if value is None else value for value in (a, b)))
        for (name, a), (_, b) in both
        if a != b and name != "track"  # trackers change nothing
    ]
    parts = [f"training.{name} = {before} (trial: {after})" for name, before, after in changed]
    if settings.data.train != trial.data.train:
        parts.append(f"data.train (trial: the first {LINES:,} lines)")
    return ", ".join(parts)


def _beginning(corpus: Corpus, folder: Path, name: str, log: Log) -> dict[str, Any]:
    """The corpus, or the first lines of its files if they are long."""
    values, files = corpus.model_dump(mode="json"), corpus_files(corpus)
    for file in files:
        if is_missing(file):
            raise RunFolderError(f"{file} is missing: a trial training needs the text of the run")
    is_long = any(is_remote(file) or file.stat().st_size >= LONG for file in files)
    if not is_long or not all(map(is_by_line, files)):
        return values
    for side in ("src", "tgt", "path"):
        if values[side] is not None:
            values[side] = str(_first_lines(Path(values[side]), folder, f"{name}.{side}"))
    log.say(f"using the first {LINES:,} lines of {corpus_name(corpus)}")
    return values


def _first_lines(file: Path, folder: Path, name: str) -> Path:
    short = folder / f"{name}{bare_suffix(file)}"
    with open_bytes(file) as (lines, _):  # its errors name the file: none of writing belongs here
        first = b"".join(islice(lines, LINES))
    short.write_bytes(first)
    return short


def updates_per_second(run: RunFolder) -> float:
    """The median speed in the run's log; `USUAL_SPEED` if the log contains none."""
    neighbours = pairwise(MetricsFile(run.path / "metrics.jsonl").read())  # a validation may be between two updates
    updates = [(a, b) for a, b in neighbours if a["event"] == b["event"] == "update"]
    steps = [(b["update"] - a["update"], b["seconds"] - a["seconds"]) for a, b in updates]
    return statistics.median([n / seconds for n, seconds in steps if n > 0 and seconds > 0] or [USUAL_SPEED])


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
            raise TrainingError("training.max_minutes ended the trial before its last update; give fewer updates")
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


def compare(one: Path, other: Path) -> RunComparison:
    """Compare the logs without measured times, the models, and the last checkpoints of two runs."""
    (log, a), (other_log, b) = _results(one), _results(other)
    n_lines = sum(x != y for x, y in zip_longest(log, other_log))
    n_numbers, largest = 0, 0.0
    for name in a.keys() | b.keys():
        if name not in a or name not in b or a[name].shape != b[name].shape:
            n_numbers, largest = n_numbers + 1, float("inf")
            continue
        differing = (a[name] != b[name]) & ~(a[name].isnan() & b[name].isnan())
        if n := int(differing.sum()):
            n_numbers, largest = n_numbers + n, max(largest, float((a[name].double() - b[name].double()).abs().max()))
    of_numbers = sum(tensor.numel() for tensor in a.values())
    if not n_lines and not n_numbers:
        return RunComparison(True, 0.0, f"{len(log):,} log lines and {of_numbers:,} weights and states: equal")
    summary = f"{n_lines:,} of {len(log):,} log lines and {n_numbers:,} of {of_numbers:,} weights and states differ"
    return RunComparison(False, largest, f"{summary}, by at most {largest:.3g}")


def _results(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The results of a training: the events of its log, its model and its last checkpoint."""
    events = [e for e in MetricsFile(folder / "metrics.jsonl").read() if e["event"] not in NOT_COMPARED]
    log = [{key: value for key, value in event.items() if key not in MEASURED} for event in events]
    last = Checkpoints(folder / "checkpoints").latest()
    assert last is not None, "a finished training has saved a checkpoint"
    model = {f"model: {name}": tensor for name, tensor in load_tensors(folder / "model.safetensors").items()}
    return log, model | last.tensors()


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
    found = compare(whole, runs.finish("killed"))
    log.say(f"  {found.summary}")
    if found.same:
        return True
    log.say("  for comparison, a second training without interruption")
    again = compare(whole, runs.finish("again"))
    if again.same:
        return False
    log.say(f"  two uninterrupted trainings differ here too: {again.summary}")
    log.say("  this machine is not deterministic (a GPU may not be), so a resume cannot be exact either")
    return found.largest <= 10 * again.largest
