"""A trial: a few real updates in a separate process, so that only it is killed if memory runs out.

`python -m transduce.doctor.trial FOLDER UNTIL PROCESSES` trains on the prepared run folder FOLDER, as one of so many
processes, until the time UNTIL. It prints what is known after each measurement as a line of JSON, and writes no files.
Batches grow, so the last one that was printed fits.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from transduce.config import Settings
from transduce.doctor.measuring import Point, Speed, Trial, speed_of, tokens_at_once
from transduce.machine import this_machine
from transduce.models.registry import build_model, count_parameters
from transduce.process import exit_with_parent, keep_freed_memory, limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.tasks.registry import find_task
from transduce.training.averaging import AVERAGES
from transduce.training.feed import Feed, Feeder, Position
from transduce.training.step import Updater

LEAST = 1.0  # seconds that a trial takes even if it starts late
ENOUGH = 40  # updates to measure the speed
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Fractions of the micro-batch that are tried in this order."""


class Rehearsal:
    """The parts of a training without its loop."""

    def __init__(self, folder: RunFolder, processes: int) -> None:
        self.settings, self.processes = folder.settings, processes
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

    def feeder(self, settings: Settings) -> Feeder:
        """The batches of this process: its share of each."""
        feeder = self.task.feeder(self.prepared, settings, self.device)
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

    def saved(self) -> tuple[int, int]:
        """Bytes of a checkpoint, and of the weights alone."""
        tensors = [*self.updater.state()[0].values(), *self.average.tensors().values()]
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return weights + sum(t.numel() * t.element_size() for t in tensors), weights

    def worst(self, share: float) -> Feed:
        """The largest possible batch with this share of the micro-batch."""
        budget = tokens_at_once(self.settings, self.processes)
        tokens = max(1, self.settings.data.context or 1, round(budget * share))
        settings = self.settings.with_values("training", batch_tokens=tokens, micro_batch_tokens=tokens)
        feeder = self.task.feeder(self.task.longest(self.prepared, settings), settings, self.device)
        sizes = [len(batch) for batch in feeder.plan(0)]
        return next(iter(feeder.feeds(Position(0, sizes.index(max(sizes))))))


def run(folder: RunFolder, seconds: float, processes: int = 1) -> Iterator[Trial]:
    """What is known after each measurement, within so many seconds."""
    until = time.monotonic() + seconds
    rehearsal = Rehearsal(folder, processes)
    found = Trial(count_parameters(rehearsal.model), rehearsal.device.type, processes=processes)
    for point in memory(rehearsal, time.monotonic() + 0.4 * (until - time.monotonic())):
        found = replace(found, points=(*found.points, point))
        yield found
    checkpoint, weights = rehearsal.saved()
    found = replace(found, checkpoint_bytes=checkpoint, weight_bytes=weights)
    yield found
    found = replace(found, speed=speed(rehearsal, time.monotonic() + 0.7 * (until - time.monotonic()), found.points))
    yield found
    for loss, judge in validation(rehearsal, max(1.0, until - time.monotonic())):
        yield replace(found, loss_seconds=loss, judge_seconds=judge)


def memory(rehearsal: Rehearsal, until: float, shares: tuple[float, ...] = SHARES) -> Iterator[Point]:
    """Peaks of growing batches of the longest rows, as many as time allows, but at least two."""
    took, slots, number = 0.0, 0, 0
    for share in shares:
        feed = rehearsal.worst(share)
        if feed.n_slots <= slots:
            continue
        if number >= 2 and time.monotonic() + 2.2 * took * feed.n_slots / slots > until:
            return
        took, slots, number = rehearsal.update(feed), feed.n_slots, number + 1
        if took < (until - time.monotonic()) / 4:  # the first of a size is slower
            took = rehearsal.update(feed)
        yield Point(share, slots, rehearsal.peak(), took)


def speed(rehearsal: Rehearsal, until: float, points: Sequence[Point]) -> Speed:
    """Time updates of real batches, smaller ones on slow machines."""
    settings, share = rehearsal.settings, 1.0
    pace = points[-1].seconds / points[-1].slots
    n_batches = len(rehearsal.feeder(settings).plan(0))
    while True:
        feeds = rehearsal.feeder(settings).feeds(Position())
        first = next(feeds)
        tokens = settings.training.batch_tokens or 1
        is_fast = first.n_slots / rehearsal.processes * pace < (until - time.monotonic()) / 3
        if is_fast or share < 0.02 or tokens < 2 * (settings.data.context or 32):
            break
        share, settings = share / 2, settings.with_values("training", batch_tokens=tokens // 2)
    rehearsal.update(first)
    took, n_targets = list[float](), 0
    while not took or (len(took) < ENOUGH and time.monotonic() + took[-1] < until):
        began = time.monotonic()
        feed = next(feeds)
        rehearsal.update(feed)
        took.append(time.monotonic() - began)
        n_targets += feed.n_targets
    return speed_of(
        points,
        share=share,
        updates=len(took),
        targets=n_targets / len(took),
        seconds=sum(took) / len(took),
        batches=n_batches,
        peak=rehearsal.peak(),
    )


def validation(rehearsal: Rehearsal, seconds: float) -> Iterator[tuple[float, float]]:
    """Seconds of the validation loss of the sample, and of the translation of a few of its rows."""
    settings = rehearsal.settings  # an untrained model may never produce the end token
    settings = settings.with_values("decoding", max_length=min(30, settings.decoding.max_length))
    validator = rehearsal.task.validator(rehearsal.model, rehearsal.prepared, settings, rehearsal.device)
    judge, validator.judge = validator.judge, None
    began = time.monotonic()
    validator()
    loss = time.monotonic() - began
    yield loss, 0.0
    if judge is None or loss > seconds / 2:
        return
    began = time.monotonic()
    with torch.no_grad():
        rehearsal.model.eval()
        judge(rehearsal.model)
    yield loss, time.monotonic() - began


def main(arguments: list[str]) -> None:
    """Run a trial, and print what is known after each measurement as a line of JSON."""
    exit_with_parent()
    folder, until, processes = arguments
    left = max(LEAST, float(until) - time.time())
    for found in run(RunFolder.open(Path(folder), model=False), left, int(processes)):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
