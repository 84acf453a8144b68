"""Losses, speed and memory for the training log."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

LOGGED_UPDATES = 10  # updates per line of metrics.jsonl
_RECENT = 20_000  # number of updates whose times are kept


class Row(NamedTuple):
    """The numbers of one update, for the log; losses are sums in nats."""

    update: int
    lr: float
    n_targets: int  # target tokens with EOS; losses are divided by it
    n_tokens: int  # source and target tokens
    n_slots: int  # tokens including padding
    loss_sum: float
    nll_sum: float
    grad_norm: float


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarize several updates as one event of the log. Losses are means over the target tokens."""
    n_targets = max(1, sum(row.n_targets for row in rows))
    return {
        "update": rows[-1].update,
        "loss": sum(row.loss_sum for row in rows) / n_targets,
        "nll": sum(row.nll_sum for row in rows) / n_targets,
        "lr": rows[-1].lr,
        "grad_norm": sum(row.grad_norm for row in rows) / len(rows),
        "padding": 1.0 - sum(row.n_tokens for row in rows) / sum(row.n_slots for row in rows),
        "n_targets": n_targets,
    }


class Stopwatch:
    """Measures the speed of updates, without validations and saving. All times are in seconds."""

    def __init__(self, now: float) -> None:
        self.n_updates = self._n_targets = 0
        self._line = now  # time of the last log line
        self._times = deque([now], maxlen=_RECENT + 1)  # times of the start and of recent updates

    def pause(self, seconds: float) -> None:
        """Do not count the last `seconds`, such as the time of a validation."""
        self._line += seconds
        self._times = deque((time + seconds for time in self._times), maxlen=_RECENT + 1)

    def count(self, now: float, n_targets: int) -> None:
        self.n_updates += 1
        self._n_targets += n_targets
        self._times.append(now)

    def targets_per_second(self, now: float) -> float:
        """Return the number of targets per second since the last call."""
        speed = self._n_targets / max(now - self._line, 1e-9)
        self._line, self._n_targets = now, 0
        return speed

    def seconds_per_update(self, now: float) -> float:
        """Return the mean over the second half of the updates: the first updates (on a GPU, hundreds) are slower."""
        half = (len(self._times) - 1) // 2
        return max(0.0, now - self._times[half]) / (len(self._times) - 1 - half)


def reset_peak_memory() -> None:
    """Restart the measurement of `peak_memory`. For main memory, this works only on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> int | None:
    """Return this process's peak memory in bytes since `reset_peak_memory`; None if the system does not report it.

    It is the memory of the GPU for a CUDA device, otherwise main memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
