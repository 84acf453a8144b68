"""Decoding speed of several models on a machine that may do other work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from transduce.logging import Log

ROUNDS = 3
WARM = 32  # examples before the first round, when threads and memory get ready


def measure_in_turns(models: Mapping[str, Callable[[int], int]], n: int, log: Log) -> dict[str, float]:
    """Examples per second of each model: the median of `ROUNDS` rounds.

    The models take turns, so that what else the machine does slows all of them down.

    Args:
        models: Functions that process at most so many examples and return their number.
        n: Examples in a round.
        log: For progress.
    """
    found: dict[str, list[float]] = {name: [] for name in models}
    for process in models.values():
        process(WARM)
    with log.progress("measuring speed") as bar:
        for number in range(ROUNDS):
            for place, (name, process) in enumerate(models.items(), 1):
                began = time.perf_counter()
                done = process(n)
                found[name].append(done / (time.perf_counter() - began))
                bar.update((number * len(models) + place) / (ROUNDS * len(models)))
    return {name: statistics.median(speeds) for name, speeds in found.items()}
