"""A trial: a few real updates in a separate process, so that only it is killed if memory runs out.

`python -m transduce.doctor.trial FOLDER SECONDS PROCESSES` trains on the prepared run folder FOLDER, as one of so many
processes. It prints what is known after each measurement as a line of JSON, and writes no files. `measure` starts it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from transduce.config.settings import Settings
from transduce.doctor.resources import tokens_at_once
from transduce.errors import is_out_of_memory, message_of
from transduce.machine import this_machine
from transduce.models.registry import build_model, count_parameters
from transduce.process import child_environment, exit_with_parent, keep_freed_memory, limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared
from transduce.tasks.registry import find_task
from transduce.training.averaging import AVERAGES
from transduce.training.feed import DataPosition, Feed, Feeder
from transduce.training.step import DoesNotFit, Updater

TIMEOUT, FULL = "time ran out", "out of memory"  # why a trial ended early
ENOUGH = 40  # updates to measure the speed
LIMIT = 120.0  # seconds of a trial


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements of one process; None where there was no time, or `died` says why it ended.

    `base`: peak bytes before the first batch; `peak`: after the largest possible one and some real ones. `updates`:
    how many real updates were timed; `updates_per_epoch`: of the text of the trial.
    """

    parameters: int = 0
    base: int = 0
    peak: int | None = None
    updates: int = 0
    seconds_per_update: float | None = None
    targets_per_second: float = 0.0
    updates_per_epoch: int = 0
    died: str = ""


def measure(folder: Path, *, seconds: float, processes: int = 1, limit: float = LIMIT) -> Trial:
    """Run a trial on the prepared run folder `folder`, as one of so many processes.

    `seconds`: of real updates. After `limit` seconds it is killed.
    """
    command = [sys.executable, "-m", "transduce.doctor.trial", str(folder), str(seconds), str(processes)]
    environment = child_environment()
    if processes > 1:  # as `launch` distributes the cores
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, env=environment, check=False)
        out, died = done.stdout, why_it_crashed(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        out, died = error.stdout or b"", TIMEOUT
    whole = [line for line in out.splitlines(keepends=True) if line[:1] == b"{" and line[-1:] == b"\n"]
    found = TypeAdapter(Trial).validate_json(whole[-1]) if whole else Trial()
    return replace(found, died=found.died or died)


def why_it_crashed(code: int, err: bytes) -> str:
    """The reason why a trial ended that could not report its error; "" if it did not crash.

    >>> why_it_crashed(-6, b"terminate called ... std::bad_alloc"), why_it_crashed(3, b"ImportError: no libc")
    ('out of memory', 'exit code 3: ImportError: no libc')
    """
    if not code:
        return ""
    # -9: the system's OOM killer; the messages: of C++, of Python, and two of the loader of libraries.
    marks = b"bad_alloc", b"memoryerror", b"failed to map segment", b"cannot allocate memory"
    if code == -9 or any(mark in err.lower() for mark in marks):
        return FULL
    last = err.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}" + (f": {last}" if last else "")


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
        criterion = self.task.criterion(self.settings)
        self.updater = Updater(
            self.model, training, device=self.device, precision=training.precision, criterion=criterion
        )
        live = dict(self.model.named_parameters())
        self.average = AVERAGES[training.average](
            live, folder=folder.path, n=training.average_n, decay=training.ema_decay
        )

    def run(self, seconds: float) -> Iterator[Trial]:
        """Yield the measurements so far: of the largest batch, then of real updates for `seconds`."""
        found = Trial(count_parameters(self.model), base=self._peak())
        yield found
        self.update(self._largest())
        found = replace(found, peak=self._peak())
        yield found
        feeder = self.feeder(self.settings)
        feeds, until = feeder.feeds(DataPosition()), time.monotonic() + seconds
        self.update(next(feeds))  # the first of a size is slower
        took, n_targets = list[float](), 0
        while not took or (len(took) < ENOUGH and time.monotonic() + took[-1] < until):
            feed = next(feeds)
            took.append(self.update(feed))
            n_targets += feed.n_targets
        yield replace(
            found,
            peak=self._peak(),
            updates=len(took),
            seconds_per_update=sum(took) / len(took),
            targets_per_second=n_targets / sum(took),
            updates_per_epoch=len(feeder.plan(0)),
        )

    def feeder(self, settings: Settings) -> Feeder:
        """The batches of this process: its share of each."""
        feeder = self.task.feeder(self.prepared, settings, self.device)
        feeder.n_ranks = self.processes
        return feeder

    def _largest(self) -> Feed:
        """The largest possible micro-batch."""
        tokens = max(self.settings.data.context or 1, tokens_at_once(self.settings, self.processes))
        settings = self.settings.with_values("training", batch_tokens=tokens, micro_batch_tokens=tokens)
        feeder = self.task.feeder(self.task.longest_rows(self.prepared, settings), settings, self.device)
        sizes = [len(batch) for batch in feeder.plan(0)]
        return next(iter(feeder.feeds(DataPosition(0, sizes.index(max(sizes))))))

    def update(self, feed: Feed) -> float:
        """Make one update; its seconds. Where state is carried, it follows another one, as most updates do."""
        if self.device.type == "cuda":
            for _ in range(2):  # a shape is slower until its graph is known, which takes memory too
                self.updater.update(feed.batches, 1e-6)
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


def rehearse(folder: Path, seconds: float, processes: int) -> None:
    """Print what is known after each measurement, and at the end the error, if there is one."""
    found = Trial()
    try:
        for found in Rehearsal(RunFolder.open(folder, model=False), processes).run(seconds):
            print(json.dumps(asdict(found)), flush=True)
    except Exception as error:
        full = isinstance(error, DoesNotFit) or is_out_of_memory(error)
        died = FULL if full else message_of(error) or type(error).__name__
        print(json.dumps(asdict(replace(found, died=died))), flush=True)


if __name__ == "__main__":
    exit_with_parent()
    rehearse(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
