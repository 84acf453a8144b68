"""The machine we are on, as far as training cares."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from typing import Literal

from transduce.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Machine:
    """What trains: `memory` in bytes that training may use, `precision` in which it multiplies matrices fastest."""

    device: Literal["cpu", "cuda"]
    name: str
    n_threads: int
    memory: int
    precision: str

    @property
    def flops(self) -> float:
        """Arithmetic a second that training really reaches, roughly: for estimates of time only."""
        return 1.0e14 if self.device == "cuda" else 6.0e10 * self.n_threads

    def describe(self) -> str:
        """One line for people."""
        cores = f", {self.n_threads} threads" if self.device == "cpu" else ""
        return f"{self.name} ({self.device}{cores}, {self.memory / 2**30:.0f} GiB free)"


def this_machine(device: str) -> Machine:
    """The machine we are on; `device` is auto, cpu or cuda. A `SettingsError` where it has no such device."""
    import torch

    from transduce.training.step import choose_precision

    if device not in ("auto", "cpu", "cuda"):
        raise SettingsError(f"training.device = {device!r}: allowed are auto, cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("training.device = 'cuda', but PyTorch finds no CUDA device here; use auto or cpu")
    if device != "cpu" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        precision = choose_precision(torch.device("cuda"))
        return Machine("cuda", torch.cuda.get_device_name(), os.cpu_count() or 1, free, precision)
    precision = choose_precision(torch.device("cpu"))
    return Machine("cpu", _processor(), torch.get_num_threads(), _free_memory(), precision)


def _processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _free_memory() -> int:
    """Bytes that can be had without swapping; 4 GiB where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            kilobytes = next(line.split()[1] for line in file if line.startswith("MemAvailable"))
        return int(kilobytes) * 1024
    except (OSError, StopIteration, ValueError):
        return 4 * 2**30
