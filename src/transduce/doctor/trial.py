"""A trial: a few real updates in a separate process, so that only it is killed if memory runs out.

`python -m transduce.doctor.trial FOLDER UNTIL PROCESSES` trains on the prepared run folder FOLDER, as one of so many
processes, until the time UNTIL. It prints each measurement as a line of JSON, and writes no files. Batches grow, so the
last one that was printed fits.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from transduce.config import Settings
from transduce.doctor.measuring import tokens_at_once
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.models.registry import build_model, count_parameters
from transduce.process import exit_with_parent
from transduce.runs.folder import RunFolder
from transduce.tasks.registry import find_task
from transduce.training.averaging import AVERAGES
from transduce.training.feed import Feed, Feeder, Position
from transduce.training.step import Updater, keep_freed_memory, limit_kernel_cache

LEAST = 1.0  # seconds that a trial takes even if it starts late
ENOUGH = 40  # updates to measure the speed
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Fractions of the micro-batch that are tried in this order."""


class Rehearsal:
    """The parts of a training without its loop."""

    def __init__(self, folder: RunFolder, processes: int) -> None:
        self.settings, self.log, self.processes = folder.settings, Log(quiet=True), processes
        limit_kernel_cache()
        self.task = find_task(self.settings.task)
        training = self.settings.training
        self.device = torch.device(this_machine(training.device).device)
        if self.device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(training.seed)
        self.prepared = self.task.open_prepared(folder)
        tokenizers = self.task.tokenizers(self.prepared)
        self.model = build_model(self.settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt).to(self.device)
        self.updater = Updater(
            self.model, training, device=self.device, precision=training.precision, criterion=self.task.criterion
        )
        live = dict(self.model.named_parameters())
        self.average = AVERAGES[training.average](
            live, folder=folder.path, n=training.average_n, decay=training.ema_decay
        )

    def feeder(self, prepared: Any, settings: Settings) -> Feeder:
        """The batches of this process: its share of each."""
        feeder = self.task.feeder(prepared, settings, self.device)
        feeder.n_ranks = self.processes
        return feeder

    def update(self, feed: Feed) -> float:
        """Make one update; its seconds."""
        began = time.perf_counter()
        self.updater.update(feed.batches, 1e-6)
        self.average.after_update()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def peak(self) -> int:
        """Peak bytes of this process so far, on the device that it trains on."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def saved(self) -> dict[str, int]:
        """Bytes of a checkpoint and of the weights alone."""
        tensors = [*self.updater.state()[0].values(), *self.average.tensors().values()]
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {"checkpoint": weights + sum(t.numel() * t.element_size() for t in tensors), "weights": weights}

    def worst(self, share: float) -> Feed:
        """The largest possible batch with this share of the micro-batch."""
        budget = tokens_at_once(self.settings, self.processes)
        tokens = max(1, self.settings.data.context or 1, round(budget * share))
        settings = self.settings.with_values("training", batch_tokens=tokens, micro_batch_tokens=tokens)
        return largest(self.task.feeder(self.task.longest(self.prepared, settings), settings, self.device))


def largest(feeder: Feeder) -> Feed:
    """The largest batch of the first epoch."""
    plan = feeder.plan(0)
    index = max(range(len(plan)), key=lambda i: len(plan[i]))
    return next(iter(feeder.feeds(Position(0, index))))


def run(folder: RunFolder, seconds: float, processes: int = 1) -> Iterator[dict[str, Any]]:
    """Measurements within so many seconds, in order."""
    until = time.monotonic() + seconds
    trial = Rehearsal(folder, processes)
    yield {"device": trial.device.type, "parameters": count_parameters(trial.model)}
    pace = 0.0
    for fact in memory(trial, time.monotonic() + 0.4 * (until - time.monotonic())):
        pace = fact["memory"]["seconds"] / fact["memory"]["slots"]
        yield fact
    yield {"saved": trial.saved()}
    yield from speed(trial, time.monotonic() + 0.7 * (until - time.monotonic()), pace)
    yield from validation(trial, max(1.0, until - time.monotonic()))
    yield {"done": True}


def memory(trial: Rehearsal, until: float, shares: tuple[float, ...] = SHARES) -> Iterator[dict[str, Any]]:
    """Peaks of growing batches of the longest rows, as many as time allows, but at least two."""
    took, slots, number = 0.0, 0, 0
    for share in shares:
        feed = trial.worst(share)
        if feed.n_slots <= slots:
            continue
        if number >= 2 and time.monotonic() + 2.2 * took * feed.n_slots / slots > until:
            return
        took, slots, number = trial.update(feed), feed.n_slots, number + 1
        if took < (until - time.monotonic()) / 4:  # the first of a size is slower
            took = trial.update(feed)
        yield {"memory": {"share": share, "slots": slots, "peak": trial.peak(), "seconds": took}}


def speed(trial: Rehearsal, until: float, pace: float) -> Iterator[dict[str, Any]]:
    """Time updates of real batches, smaller ones on slow machines. `pace`: estimated seconds per slot."""
    settings, share = trial.settings, 1.0
    plan = trial.feeder(trial.prepared, settings).plan(0)
    while True:
        feeds = trial.feeder(trial.prepared, settings).feeds(Position())
        first = next(feeds)
        tokens = settings.training.batch_tokens or 1
        if (
            first.n_slots / trial.processes * pace < (until - time.monotonic()) / 3
            or share < 0.02
            or tokens < 2 * (settings.data.context or 32)
        ):
            break
        share, settings = share / 2, settings.with_values("training", batch_tokens=tokens // 2)
    trial.update(first)
    took, rows = 0.0, list[tuple[int, int, float]]()
    while not rows or (len(rows) < ENOUGH and time.monotonic() + took < until):
        began = time.monotonic()
        feed = next(feeds)
        trial.update(feed)
        took = time.monotonic() - began
        rows.append((feed.n_targets, feed.n_slots, took))
    n_targets, n_slots, total = (sum(row[i] for row in rows) for i in range(3))
    yield {
        "speed": {
            "updates": len(rows),
            "share": share,
            "targets": n_targets / len(rows),
            "slots": n_slots / len(rows),
            "seconds": total / len(rows),
            "batches": len(plan),
            "peak": trial.peak(),
        }
    }


def validation(trial: Rehearsal, seconds: float) -> Iterator[dict[str, Any]]:
    """Time the validation loss of the sample, and the translation of a few of its rows."""
    validator = trial.task.validator(trial.model, trial.prepared, _short(trial.settings), trial.device)
    judge, validator.judge = validator.judge, None
    began = time.monotonic()
    validator()
    loss = time.monotonic() - began
    yield {"validation": {"loss": loss, "judge": 0.0, "peak": trial.peak()}}
    if judge is None or loss > seconds / 2:
        return
    began = time.monotonic()
    with torch.no_grad():
        trial.model.eval()
        judge(trial.model)
    yield {"validation": {"loss": loss, "judge": time.monotonic() - began, "peak": trial.peak()}}


def _short(settings: Settings) -> Settings:
    """Limit the output length: an untrained model may never produce the end token."""
    return settings.with_values("decoding", max_length=min(30, settings.decoding.max_length))


def main(arguments: list[str]) -> None:
    """Run a trial, and print a line of JSON for each measurement."""
    exit_with_parent()
    folder, until, processes = arguments
    left = max(LEAST, float(until) - time.time())
    for fact in run(RunFolder.open(Path(folder), model=False), left, int(processes)):
        print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
