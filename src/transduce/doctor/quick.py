"""The cheap part of the doctor, which every training does by itself: a few warnings in well under a second."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from transduce.config import Settings
from transduce.doctor.checks import run_checks
from transduce.doctor.forecast import Disk, disk_needed
from transduce.doctor.measuring import Trial
from transduce.doctor.resources import disk_findings, size
from transduce.doctor.sampling import take_sample
from transduce.errors import UserError
from transduce.logging import Log
from transduce.machine import Machine
from transduce.tasks.defaults import bytes_a_token

MOST = 3  # lines
_BLOCKS, _SECONDS = 2, 0.2
_STATES = {"adam": 2.0, "adamw": 2.0, "muon": 1.5}  # copies of the weights that an optimizer keeps, roughly
_PROCESS = 400 << 20  # bytes of a process before any model


def warn_of_data(settings: Settings, log: Log) -> None:
    """Warn of what a small sample shows: lines that do not belong together, sides swapped, odd characters."""
    try:
        found = run_checks(take_sample(settings, seconds=_SECONDS, most_blocks=_BLOCKS), quick=True)
    except UserError:  # reading the text says it better
        return
    serious = [one for one in found if one.level == "obstacle"] + [one for one in found if one.level == "warning"]
    for one in serious[:MOST]:
        log.warn(one.line)
    if serious:
        log.warn('of the data; "transduce doctor", with the same options, looks at more of it')


def warn_of_resources(settings: Settings, model: nn.Module, place: Path, machine: Machine, log: Log) -> None:
    """Warn of too little memory or disk, by a rough estimate without any update."""
    for line in resource_warnings(settings, model, place, machine):
        log.warn(line)


def resource_warnings(settings: Settings, model: nn.Module, place: Path, machine: Machine) -> list[str]:
    """What is to be said of the memory and of the disk at `place`."""
    training = settings.training
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    copies = 2.0 + _STATES.get(training.optimizer or "", 2.0) + (training.average == "ema")  # with the gradient
    micro = training.micro_batch_tokens or training.batch_tokens or 1
    batch = micro * bytes_a_token(settings.model, settings.tokenizer.vocab_size or 0)
    needed, found = round(weights * copies) + batch + _PROCESS, []
    if needed > machine.memory:
        found.append(
            f"training will take about {size(needed)} of memory, and {size(machine.memory)} are free; "
            f"--set training.micro_batch_tokens={max(64, micro // 2)} or a smaller model takes less"
        )
    disk = room_needed(settings, weights, place)
    return found + [one.line for one in disk_findings(disk)]


def room_needed(settings: Settings, weights: int, place: Path) -> Disk:
    """Disk of a run with so many bytes of weights."""
    training = settings.training
    copies = 1.0 + _STATES.get(training.optimizer or "", 2.0) + (training.average == "ema")
    trial = Trial(checkpoint_bytes=round(weights * copies), weight_bytes=weights)
    return disk_needed(settings, trial, place, n_tokens=0.0, n_rows=0.0)
