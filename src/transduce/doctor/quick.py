"""The checks that every training runs: a few warnings in well under a second."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from transduce.config import Settings
from transduce.doctor.checks import run_checks
from transduce.doctor.estimates import disk_findings, estimate_disk
from transduce.doctor.findings import size
from transduce.doctor.measuring import Trial
from transduce.doctor.sampling import take_sample
from transduce.errors import UserError
from transduce.logging import Log
from transduce.machine import Machine
from transduce.tasks.choices import bytes_per_token

MOST = 3  # warnings
_BLOCKS, _SECONDS = 2, 0.2
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # optimizer state relative to the weights, roughly
_PROCESS = 400 << 20  # bytes of a process without a model


def warn_of_data(settings: Settings, log: Log) -> None:
    """Check a small sample, and warn of misaligned or swapped sides and unusual characters."""
    try:
        found = run_checks(take_sample(settings, seconds=_SECONDS, most_blocks=_BLOCKS), quick=True)
    except UserError:  # reading the text gives a better message
        return
    serious = sorted((one for one in found if one.level != "note"), key=lambda one: one.level != "obstacle")
    for one in serious[:MOST]:
        log.warn(one.line)
    if serious:
        log.warn('"transduce doctor" with the same options checks the data more thoroughly')


def warn_of_resources(settings: Settings, model: nn.Module, place: Path, machine: Machine, log: Log) -> None:
    """Warn of too little memory or disk space, by a rough estimate."""
    training = settings.training
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    micro = training.micro_batch_tokens or training.batch_tokens or 1
    batch = micro * bytes_per_token(settings.model, settings.tokenizer.vocab_size or 0)
    needed = round(weights * (1.0 + _copies(settings))) + batch + _PROCESS  # 1: the gradient
    if needed > machine.memory:
        log.warn(
            f"training will take about {size(needed)} of memory, and {size(machine.memory)} are free; "
            f"use --set training.micro_batch_tokens={max(64, micro // 2)} or a smaller model"
        )
    trial = Trial(checkpoint_bytes=round(weights * _copies(settings)), weight_bytes=weights)
    for one in disk_findings(estimate_disk(settings, trial, place, n_tokens=0.0, n_rows=0.0)):
        log.warn(one.line)


def _copies(settings: Settings) -> float:
    """Size of weights, optimizer state and average relative to the weights."""
    training = settings.training
    return 1.0 + _STATES.get(training.optimizer or "", 2.0) + (training.average == "ema")
