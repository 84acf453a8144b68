"""Warn of too little memory or disk space before a training, by a rough estimate without a trial."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.doctor.findings import size
from transduce.logging import Log
from transduce.machine import Machine
from transduce.tasks.defaults import bytes_per_token
from transduce.training.averaging import AVERAGES

_PROCESS = 400 << 20  # bytes of a process without a model
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # optimizer state relative to the weights, roughly


def tokens_at_once(settings: Settings, processes: int = 1) -> int:
    """Tokens of the largest micro-batch of one process, which gets a share of each batch."""
    batch = resolved(settings.training.batch_tokens, "training.batch_tokens")
    return min(settings.training.micro_batch_tokens or batch, -(-batch // processes))


def warn_of_resources(settings: Settings, model: nn.Module, place: Path, machine: Machine, log: Log) -> None:
    """`place`: the run folder, which exists."""
    training, vocab_size = settings.training, settings.tokenizer.vocab_size or 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    average = AVERAGES[training.average]
    saved = weights * (1.0 + _STATES[resolved(training.optimizer, "training.optimizer")] + average.n_copies)
    micro = tokens_at_once(settings)
    needed = round(saved + weights) + micro * bytes_per_token(settings.model, vocab_size) + _PROCESS  # with gradients
    if needed > machine.memory:
        log.warn(
            f"training will take about {size(needed)} of memory, and {size(machine.memory)} are free; "
            f"set training.micro_batch_tokens = {max(64, micro // 2)}, or use a smaller model"
        )
    snapshots = training.average_n + 1 if average.keeps_last else 0
    # Checkpoints, one that is being written, and the weights of the run.
    on_disk = (training.keep_checkpoints + 1) * saved + (snapshots + 2) * weights
    free = shutil.disk_usage(place).free
    if on_disk > free:
        log.warn(
            f"the run needs about {size(on_disk)} at {place}, where {size(free)} are free; free space, use another "
            "folder, or keep fewer checkpoints (training.keep_checkpoints = 1)"
        )
