"""A trial: a few real updates in a separate process, so that only it is killed if memory runs out.

`python -m transduce.doctor.trial FOLDER UNTIL PROCESSES` trains on the prepared run folder FOLDER, as one of so many
processes, until the time UNTIL. It prints what is known after each measurement as a line of JSON, and writes no files.
Batches grow, so the last one that was printed fits. `measure` starts it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from transduce.config import Settings, resolved
from transduce.doctor.estimates import FULL, TIMEOUT, Point, Speed, Trial, speed_of, tokens_at_once
from transduce.machine import this_machine
from transduce.models.registry import build_model, count_parameters
from transduce.process import child_environment, exit_with_parent, keep_freed_memory, limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared
from transduce.tasks.registry import find_task
from transduce.training.averaging import AVERAGES
from transduce.training.feed import Feed, Feeder, Position
from transduce.training.step import Updater

SPARE = 1.5  # seconds before its time limit at which a trial stops
LEAST = 1.0  # seconds that a trial takes even if it starts late
ENOUGH = 40  # updates to measure the speed
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Fractions of the micro-batch that are tried in this order."""
_MEMORY_ERRORS = ("memory", "bad_alloc", "doesnotfit", "could not create a primitive", "failed to map segment")
"""In the last lines of a process that ran out of memory: of Python, PyTorch, oneDNN, the loader and ourselves."""
_CLASS = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:: |$)")


def measure(folder: Path, *, seconds: float, processes: int = 1) -> Trial:
    """Run a trial on the prepared run folder `folder`, as one of so many processes.

    It is killed after `seconds`; what it has measured until then is used.
    """
    until = time.time() + max(0.5 * seconds, seconds - SPARE)
    command = [sys.executable, "-m", "transduce.doctor.trial", str(folder), str(until), str(processes)]
    environment = child_environment()
    if processes > 1:  # as `launch` distributes the cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment, check=False)
        out, died = done.stdout, why_it_died(done.returncode, done.stderr.decode("utf-8", errors="replace"))
    except subprocess.TimeoutExpired as error:
        out, died = error.stdout or b"", TIMEOUT
    whole = [line for line in out.splitlines(keepends=True) if line[:1] == b"{" and line[-1:] == b"\n"]
    found = TypeAdapter(Trial).validate_json(whole[-1]) if whole else Trial(processes=processes)
    return found if died == TIMEOUT and found.speed else replace(found, died=died)


def why_it_died(code: int, err: str) -> str:
    """The reason why a trial ended early, from its exit code and its last lines, without names of classes.

    >>> why_it_died(1, "MemoryError"), why_it_died(1, "a.b.SomeError: the disk is gone"), why_it_died(3, "")
    ('out of memory', 'the disk is gone', 'exit code 3')
    """
    if not code:
        return ""
    lines = err.strip().splitlines()
    if code == -9 or any(mark in line.lower() for line in lines[-3:] for mark in _MEMORY_ERRORS):  # -9: OOM killer
        return FULL
    return (_CLASS.sub("", lines[-1]) if lines else "") or f"exit code {code}"


class Rehearsal:
    """The parts of a training without its loop, and measurements of them."""

    def __init__(self, folder: RunFolder, processes: int = 1, *, prepared: Prepared[Any] | None = None) -> None:
        """`prepared`: the encoded text; by default that of the folder."""
        self.settings, self.processes = folder.settings, processes
        limit_kernel_cache()
        self.task = find_task(self.settings.task)
        training = self.settings.training
        self.device = torch.device(this_machine(training.device).device)
        if self.device.type == "cpu":
            keep_freed_memory()
        torch.manual_seed(training.seed)
        self.prepared = prepared or self.task.open_prepared(folder)
        tokenizers = self.prepared.tokenizers
        self.model = build_model(self.settings.model, n_src=tokenizers.n_src, n_tgt=tokenizers.n_tgt).to(self.device)
        criterion = self.task.criterion(self.settings.model)
        self.updater = Updater(
            self.model, training, device=self.device, precision=training.precision, criterion=criterion
        )
        live = dict(self.model.named_parameters())
        self.average = AVERAGES[training.average](
            live, folder=folder.path, n=training.average_n, decay=training.ema_decay
        )

    def run(self, seconds: float) -> Iterator[Trial]:
        """What is known after each measurement, within so many seconds."""
        until = time.monotonic() + seconds
        found = Trial(count_parameters(self.model), self.device.type, processes=self.processes)
        for point in self.memory(time.monotonic() + 0.4 * seconds):
            found = replace(found, points=(*found.points, point))
            yield found
        tensors = [*self.updater.state()[0].values(), *self.average.tensors().values()]
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        saved = weights + sum(t.numel() * t.element_size() for t in tensors)
        found = replace(found, checkpoint_bytes=saved, weight_bytes=weights)
        yield found
        left = until - time.monotonic()
        found = replace(found, speed=self.speed(time.monotonic() + 0.7 * left, found.points))
        yield found
        for loss, judge in self.validation(max(1.0, until - time.monotonic())):
            yield replace(found, loss_seconds=loss, judge_seconds=judge)

    def memory(self, until: float, shares: tuple[float, ...] = SHARES) -> Iterator[Point]:
        """Peaks of growing batches of the longest rows, as many as time allows, but at least two."""
        took, slots, number = 0.0, 0, 0
        for share in shares:
            feed = self._worst(share)
            if feed.n_slots <= slots:
                continue
            if number >= 2 and time.monotonic() + 2.2 * took * feed.n_slots / slots > until:
                return
            took, slots, number = self.update(feed), feed.n_slots, number + 1
            if took < (until - time.monotonic()) / 4:  # the first of a size is slower
                took = self.update(feed)
            yield Point(share, slots, self._peak(), took)

    def speed(self, until: float, points: tuple[Point, ...]) -> Speed:
        """Time updates of real batches, smaller ones on slow machines."""
        settings, share = self.settings, 1.0
        pace = points[-1].seconds / points[-1].slots
        n_batches = len(self.feeder(settings).plan(0))
        while True:
            feeds = self.feeder(settings).feeds(Position())
            first = next(feeds)
            tokens = resolved(settings.training.batch_tokens, "training.batch_tokens")
            is_fast = first.n_slots / self.processes * pace < (until - time.monotonic()) / 3
            if is_fast or share < 0.02 or tokens < 2 * (settings.data.context or 32):
                break
            share, settings = share / 2, settings.with_values("training", batch_tokens=tokens // 2)
        self.update(first)
        took, n_targets = list[float](), 0
        while not took or (len(took) < ENOUGH and time.monotonic() + took[-1] < until):
            began = time.monotonic()
            feed = next(feeds)
            self.update(feed)
            took.append(time.monotonic() - began)
            n_targets += feed.n_targets
        n, peak = len(took), self._peak()
        return speed_of(
            points, share=share, updates=n, targets=n_targets / n, seconds=sum(took) / n, batches=n_batches, peak=peak
        )

    def validation(self, seconds: float) -> Iterator[tuple[float, float]]:
        """Seconds of the validation loss of the sample, and of the translation of a few of its rows."""
        settings = self.settings  # an untrained model may never produce the end token
        settings = settings.with_values("decoding", max_length=min(30, settings.decoding.max_length))
        validator = self.task.validator(self.model, self.prepared, settings, self.device)
        judge, validator.judge = validator.judge, None
        began = time.monotonic()
        validator()
        loss = time.monotonic() - began
        yield loss, 0.0
        if judge is None or loss > seconds / 2:
            return
        began = time.monotonic()
        with torch.no_grad():
            self.model.eval()
            judge(self.model)
        yield loss, time.monotonic() - began

    def feeder(self, settings: Settings) -> Feeder:
        """The batches of this process: its share of each."""
        feeder = self.task.feeder(self.prepared, settings, self.device)
        feeder.n_ranks = self.processes
        return feeder

    def _worst(self, share: float) -> Feed:
        """The largest possible batch with this share of the micro-batch."""
        budget = tokens_at_once(self.settings, self.processes)
        tokens = max(1, self.settings.data.context or 1, round(budget * share))
        settings = self.settings.with_values("training", batch_tokens=tokens, micro_batch_tokens=tokens)
        feeder = self.task.feeder(self.task.longest(self.prepared, settings), settings, self.device)
        sizes = [len(batch) for batch in feeder.plan(0)]
        return next(iter(feeder.feeds(Position(0, sizes.index(max(sizes))))))

    def update(self, feed: Feed) -> float:
        """Make one update; its seconds. Where state is carried, it follows another one, as most updates do."""
        carry = self.updater.update(feed.batches, 1e-6).carry if self.settings.model.carries_state else ()
        began = time.perf_counter()
        self.updater.update(feed.batches, 1e-6, carry=carry)
        self.average.after_update()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _peak(self) -> int:
        """Peak bytes of this process so far, on the device that it trains on."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    exit_with_parent()
    path, until, n = sys.argv[1:]
    rehearsal = Rehearsal(RunFolder.open(Path(path), model=False), int(n))
    for found in rehearsal.run(max(LEAST, float(until) - time.time())):
        print(json.dumps(asdict(found)), flush=True)
