"""Speeds of several models on a machine that may do other work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

from transduce.logging import Log

ROUNDS = 3
WARM = 32  # examples before the first round, when threads and memory get ready


def measure_in_turns(models: Mapping[str, Callable[[int], int]], n: int, log: Log) -> dict[str, float]:
    """Examples per second of each model: the median of `ROUNDS` rounds.

    The models take turns, so that what else the machine does slows all of them down.

    Args:
        models: Functions that process at most n examples and return their number.
        n: Examples in a round.
        log: For progress.
    """
    for process in models.values():
        process(WARM)
    return in_turns({name: partial(_examples_per_second, process, n) for name, process in models.items()}, log)


def in_turns(measures: Mapping[str, Callable[[], float]], log: Log) -> dict[str, float]:
    """The median of `ROUNDS` values of each measure, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    with log.progress("measuring speed") as bar:
        for number in range(ROUNDS):
            for place, (name, measure) in enumerate(measures.items(), 1):
                found[name].append(measure())
                bar.update((number * len(measures) + place) / (ROUNDS * len(measures)))
    return {name: statistics.median(values) for name, values in found.items()}


def _examples_per_second(process: Callable[[int], int], n: int) -> float:
    began = time.perf_counter()
    done = process(n)
    return done / (time.perf_counter() - began)
