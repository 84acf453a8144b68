"""Learning-rate schedules: pure functions of the moment of training, and of how far the limits are used up.

A schedule gives a factor of the peak learning rate: 0 to 1 over the warm-up, then a shape. The shapes that fall to zero
go by `progress`, which may be counted in updates, in epochs or in minutes (whichever limit is nearest), so a run with a
time limit ends on time with its learning rate at zero, however fast the machine is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from transduce.config import TrainingSettings
from transduce.errors import SettingsError, nearest


@dataclass(frozen=True, slots=True)
class Moment:
    """When an update is made: `done` updates lie before it, and `progress` in [0, 1] of the limits is used up."""

    done: int
    progress: float
    warmup: int

    @property
    def number(self) -> int:
        """The update's own number, from 1: the paper's step_num."""
        return self.done + 1

    @property
    def decay(self) -> float:
        """Share of the way from the end of the warm-up (0) to the end of training (1).

        The progress at the end of the warm-up is `progress * warmup / done`: exact when updates are the limit, and the
        running estimate at the speed so far when time is; either way 0 at the end of the warm-up and 1 at the end.
        """
        if self.done <= self.warmup:
            return 0.0
        start = self.progress * self.warmup / self.done
        return min(1.0, max(0.0, (self.progress - start) / (1.0 - start))) if start < 1.0 else 1.0


Schedule = Callable[[Moment], float]


def warmed_up(shape: Schedule) -> Schedule:
    """`shape` after a linear warm-up: factor number/warmup for the updates 1 to warmup."""

    def schedule(moment: Moment) -> float:
        return moment.number / moment.warmup if moment.number < moment.warmup else shape(moment)

    return schedule


def inverse_sqrt(moment: Moment) -> float:
    """The paper's (section 5.3), scaled to 1 at the end of the warm-up: sqrt(warmup / number).

    The paper's rate is d_model**-0.5 * min(number**-0.5, number * warmup**-1.5); its peak is (d_model * warmup)**-0.5.
    """
    return math.sqrt(max(1, moment.warmup) / moment.number)


def linear(moment: Moment) -> float:
    """A straight line from the end of the warm-up down to zero at the end of training."""
    return 1.0 - moment.decay


def cosine(moment: Moment) -> float:
    """Half a cosine from the end of the warm-up down to zero at the end of training."""
    return 0.5 * (1.0 + math.cos(math.pi * moment.decay))


def constant(moment: Moment) -> float:
    """The peak, all the way."""
    return 1.0


SCHEDULES: dict[str, Schedule] = {
    shape.__name__: warmed_up(shape) for shape in (inverse_sqrt, linear, cosine, constant)
}


def find_schedule(name: str) -> Schedule:
    """The schedule of that name, or a `SettingsError` with the nearest known one."""
    if name not in SCHEDULES:
        raise SettingsError(
            f"training.schedule = {name!r}: unknown{nearest(name, SCHEDULES)}; known: {', '.join(SCHEDULES)}"
        )
    return SCHEDULES[name]


@dataclass(frozen=True, slots=True)
class Limits:
    """Where training ends; the nearest limit counts."""

    updates: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, settings: TrainingSettings) -> Limits:
        """The limits in the settings; at least one must be given, or the schedule has no end to go by."""
        minutes = settings.max_minutes
        limits = cls(settings.max_updates, settings.max_epochs, None if minutes is None else 60.0 * minutes)
        if limits == cls():
            raise SettingsError("no end of training given: set training.max_updates, max_epochs or max_minutes")
        return limits

    def progress(self, *, updates: int, epochs: float, timed_updates: int | None = None) -> float:
        """Share of the nearest limit that is used up, in [0, 1]; 1 is the end.

        `timed_updates`: the number of updates that the time limit allows, once it is known.
        """
        shares = [0.0]
        if self.updates is not None:
            shares.append(updates / self.updates)
        if self.epochs is not None:
            shares.append(epochs / self.epochs)
        if timed_updates is not None:
            shares.append(updates / timed_updates)
        return min(1.0, max(shares))

    def is_late(self, seconds: float, *, reserve: float = 0.0) -> bool:
        """Whether the time limit is over by the clock.

        `reserve` seconds are set aside for what follows the last update (validation and saving), but never more than
        half of the limit.
        """
        return self.seconds is not None and seconds >= max(self.seconds - reserve, 0.5 * self.seconds)


class Clock:
    """Seconds of training over all restarts, monotonic: what an interrupted run had used is counted, its pause is not.

    Everything between two updates counts: validation, translation and saving too, so that a limit of minutes is one
    that the user can read off a watch. (What comes before the loop, data and vocabulary, and after it, test
    scores and report, does not count.)
    """

    def __init__(self, used: float = 0.0, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._zero = now() - used

    def seconds(self) -> float:
        """Seconds used so far."""
        return self._now() - self._zero
