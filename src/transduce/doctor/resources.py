"""Warn before a training of too little memory or disk space, by a rough estimate, and of emulated products."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.logging import Log
from transduce.machine import Machine
from transduce.tasks.defaults import bytes_per_token
from transduce.training.averaging import AVERAGES

_PROCESS = 400 << 20  # memory of a process without a model, in bytes
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # optimizer state relative to the weights, roughly


def tokens_at_once(settings: Settings, processes: int = 1) -> int:
    """Return the number of tokens in the largest micro-batch of one of several processes, which share every batch."""
    batch = resolved(settings.training.batch_tokens, "training.batch_tokens")
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def warn_of_resources(settings: Settings, model: nn.Module, folder: Path, machine: Machine, log: Log) -> None:
    """Warn if memory or disk space may not suffice, or if the machine emulates the training's precision.

    Before a fine-tuning, the log says how much memory it will take.
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
    # `saved` contains as many trained weights as there are gradients
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
