"""Memory, time and disk space of a training: a rough estimate, and a trial of a few real updates.

The trial is a child process: if memory runs out, the system kills only the child.

`python -m transduce.doctor.resources FOLDER SECONDS PROCESSES` runs the trial on a prepared run folder, as one of
PROCESSES. After each measurement it prints all measurements so far as a line of JSON. It writes no files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.errors import is_out_of_memory, message_of
from transduce.logging import Log
from transduce.machine import Machine, this_machine
from transduce.models.registry import build_model, count_parameters
from transduce.process import child_environment, exit_with_parent, keep_freed_memory, limit_kernel_cache
from transduce.runs.folder import RunFolder
from transduce.tasks.base import open_prepared
from transduce.tasks.defaults import bytes_per_token
from transduce.tasks.finetune import adapt
from transduce.tasks.resolve import find_task
from transduce.training.averaging import AVERAGES
from transduce.training.feed import DataPosition, Feed, Feeder
from transduce.training.session import trained_parameters
from transduce.training.step import DoesNotFit, Updater

_PROCESS = 400 << 20  # memory of a process without a model, in bytes
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # approximate size of optimizer state relative to the weights


def tokens_at_once(settings: Settings, processes: int = 1) -> int:
    """Return the number of tokens in the largest micro-batch of one process; `processes` share every batch."""
    batch = resolved(settings.training.batch_tokens, "training.batch_tokens")
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def warn_of_resources(settings: Settings, model: nn.Module, folder: Path, machine: Machine, log: Log) -> None:
    """Warn if memory or disk space may not suffice, or if the machine emulates the training's precision.

    Before a fine-tuning, also log how much memory it will take.
    """
    training = settings.training
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    weights, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    if training.precision == "bfloat16" and machine.precision != "bfloat16":
        log.warn(
            "training.precision = 'bfloat16': this machine has no instructions for it, and emulation takes many times "
            "as long; set training.precision=float32"
        )
    average = AVERAGES[training.average]
    saved = trained * (1.0 + _STATES[resolved(training.optimizer, "training.optimizer")] + average.n_copies)
    micro = tokens_at_once(settings)
    # the trained weights in `saved` stand for the gradients, which have the same size
    needed = round(weights + saved) + micro * bytes_per_token(settings) + _PROCESS
    if training.start is not None:
        log.say(f"memory: about {size(needed)}; {size(machine.memory)} are free")
    if needed > machine.memory:
        log.warn(
            f"training will take about {size(needed)} of memory, and {size(machine.memory)} are free; "
            f"set training.micro_batch_tokens = {max(64, micro // 2)}, or use a smaller model"
        )
    snapshots = training.average_n + 1 if average.is_mean else 0
    # Disk space of all checkpoints, with one more while it is written, and of the run's weights.
    on_disk = (max(1, training.keep_checkpoints) + 1) * saved + snapshots * trained + 2 * weights
    free = shutil.disk_usage(folder).free
    if on_disk > free:
        log.warn(
            f"the run needs about {size(on_disk)} at {folder}, where {size(free)} are free; free space, use another "
            "folder, or keep fewer checkpoints (training.keep_checkpoints = 1)"
        )


def size(n_bytes: float) -> str:
    """Format a number of bytes.

    >>> size(3 * 2**30), size(5e6)
    ('3.0 GiB', '5 MiB')
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"


TIMEOUT, FULL = "time ran out", "out of memory"  # reasons for an early end of a trial
ENOUGH = 40  # largest number of timed updates
LIMIT = 120.0  # seconds until a trial is killed


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements of one process. A field is None if the trial ended before its measurement; `died` has the reason.

    `base`: peak memory in bytes before the first batch. `peak`: peak memory in bytes after the largest batch and some
    others. `updates`: number of timed updates. `updates_per_epoch`: updates in an epoch of the trial's text.
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
    """Run a trial on a prepared run folder: time updates for about `seconds`; kill it after `limit` seconds.

    `processes`: number of processes of the training, of which the trial is one.
    """
    command = [sys.executable, "-m", "transduce.doctor.resources", str(folder), str(seconds), str(processes)]
    environment = child_environment()
    if processes > 1:  # distribute the cores like `launch`
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit, env=environment, check=False)
        out, died = done.stdout, why_it_crashed(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        out, died = error.stdout or b"", TIMEOUT
    whole = [line for line in out.splitlines(keepends=True) if line[:1] == b"{" and line[-1:] == b"\n"]
    trial = TypeAdapter(Trial).validate_json(whole[-1]) if whole else Trial()
    return replace(trial, died=trial.died or died)


def why_it_crashed(code: int, err: bytes) -> str:
    """Explain why a trial process crashed, from its exit code and stderr; "" if it did not crash.

    >>> why_it_crashed(-6, b"terminate called ... std::bad_alloc"), why_it_crashed(3, b"ImportError: no libc")
    ('out of memory', 'exit code 3: ImportError: no libc')
    """
    if not code:
        return ""
    # The system's OOM killer sends signal 9; the messages are from C++, Python and the loader of shared libraries.
    marks = b"bad_alloc", b"memoryerror", b"failed to map segment", b"cannot allocate memory"
    if code == -9 or any(mark in err.lower() for mark in marks):
        return FULL
    last = err.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
    return f"exit code {code}" + (f": {last}" if last else "")


def run_trial(folder: RunFolder, seconds: float, processes: int) -> Iterator[Trial]:
    """Yield the measurements after the start, after the largest update, and after `seconds` of further updates."""
    settings, training = folder.settings, folder.settings.training
    limit_kernel_cache()
    device = torch.device(this_machine(training.device).device)
    if device.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(training.seed)
    task = find_task(settings.task)
    prepared = open_prepared(task, folder)
    model = build_model(settings.model, n_src=prepared.tokenizers.n_src, n_tgt=prepared.tokenizers.n_tgt)
    n_parameters = count_parameters(model)
    if training.lora is not None:
        adapt(model, training.lora)
    model.to(device)
    loss = task.loss(settings)
    updater = Updater(model, training, device=device, precision=training.precision, criterion=loss)
    average = AVERAGES[training.average](
        trained_parameters(model), folder=folder.path, n=training.average_n, decay=training.ema_decay
    )

    def update(feed: Feed) -> float:
        """Run one update; return its seconds. A model that carries state continues from an earlier update."""
        if device.type == "cuda":
            for _ in range(2):  # the first updates of a shape capture its graph, which takes time and memory
                updater.update(feed.batches, 1e-6)
        carry = updater.update(feed.batches, 1e-6).carry if settings.model.carries_state else ()
        began = time.perf_counter()
        updater.update(feed.batches, 1e-6, carry=carry)
        average.after_update()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    trial = Trial(n_parameters, base=_peak(device))
    yield trial
    tokens = max(settings.data.context or 1, tokens_at_once(settings, processes))
    at_once = settings.with_values("training", batch_tokens=tokens, micro_batch_tokens=tokens)
    update(largest(task.batches(prepared, at_once, device)))
    trial = replace(trial, peak=_peak(device))
    yield trial
    feeder = task.batches(prepared, settings, device)
    feeder.n_ranks = processes  # this process has its share of each batch
    feeds, until = feeder.feeds(DataPosition()), time.monotonic() + seconds
    update(next(feeds))  # not timed: the first update is slower
    durations, n_targets = list[float](), 0
    while not durations or (len(durations) < ENOUGH and time.monotonic() + durations[-1] < until):
        feed = next(feeds)
        durations.append(update(feed))
        n_targets += feed.n_targets
    yield replace(
        trial,
        peak=_peak(device),
        updates=len(durations),
        seconds_per_update=sum(durations) / len(durations),
        targets_per_second=n_targets / sum(durations),
        updates_per_epoch=len(feeder.plan(0)),
    )


def largest(feeder: Feeder) -> Feed:
    """Return the batch of an epoch that needs the most memory, which also grows with the square of row lengths."""
    feeds = islice(feeder.feeds(DataPosition()), len(feeder.plan(0)))
    inputs = ((feed, feed.batches[0].inputs[0]) for feed in feeds)
    return max(inputs, key=lambda pair: len(pair[1]) * pair[1].shape[1] ** 2)[0]


def _peak(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes, on the device that it trains on."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved())
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def rehearse(folder: Path, seconds: float, processes: int) -> None:
    """Run a trial; print the measurements after each step, and finally the error if it failed."""
    trial = Trial()
    try:
        for trial in run_trial(RunFolder.open(folder, model=False), seconds, processes):
            print(json.dumps(asdict(trial)), flush=True)
    except Exception as error:
        full = isinstance(error, DoesNotFit) or is_out_of_memory(error)
        died = FULL if full else message_of(error) or type(error).__name__
        print(json.dumps(asdict(replace(trial, died=died))), flush=True)


if __name__ == "__main__":
    exit_with_parent()
    rehearse(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
