"""Learning-rate schedules and the limits of training.

A schedule is a pure function that returns a factor of the peak learning rate: from 0 to 1 during the warm-up, then a
shape. Shapes that fall to zero follow `progress`, the used part of the nearest limit in updates, epochs or minutes. So
a run with a time limit ends with a learning rate of zero, whatever the speed of the machine.

A limit in minutes becomes a limit in updates (`TimeLimit`), so that the result of a run does not depend on the clock.
After a fifth of the time, the number of updates that fit is computed and written to the run folder. From then on the
schedule and the end follow it, and a run that is killed and resumed reads it again. The clock remains as a safety net
for a machine that became slower.

If a finished training is continued at another learning rate, this is the new peak, and the update at which the training
had finished is the end of the warm-up: the rate begins there and follows the shape from there to the new limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from pydantic import NonNegativeInt, PositiveInt, TypeAdapter

from transduce.config.settings import TrainingSettings
from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder

TIME_LIMIT = "time_limit.json"
MARGIN = 0.92  # planned share of the time limit, so that the safety net is rarely needed


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of an update: `done` updates were made before it, and `progress` in [0, 1] of training is over."""

    done: int
    progress: float
    warmup: int

    @property
    def number(self) -> int:
        """Number of the update, from 1: the paper's step_num."""
        return self.done + 1

    @property
    def decay(self) -> float:
        """Progress from the end of the warm-up (0) to the end of training (1).

        The progress at the end of the warm-up is taken as `progress * warmup / done`. That is exact if the limit is in
        updates, and an estimate from the speed so far otherwise.
        """
        if self.done <= self.warmup:
            return 0.0
        start = self.progress * self.warmup / self.done
        return min(1.0, max(0.0, (self.progress - start) / (1.0 - start))) if start < 1.0 else 1.0


Schedule = Callable[[Moment], float]


def warmed_up(shape: Schedule) -> Schedule:
    """`shape` after a linear warm-up, with the factor number / warmup for updates 1 to warmup."""

    def schedule(moment: Moment) -> float:
        return moment.number / moment.warmup if moment.number < moment.warmup else shape(moment)

    return schedule


def inverse_sqrt(moment: Moment) -> float:
    """The paper's schedule (section 5.3), scaled to 1 at the end of the warm-up: sqrt(warmup / number).

    The paper's rate is d_model**-0.5 * min(number**-0.5, number * warmup**-1.5); its peak is (d_model * warmup)**-0.5.
    """
    return math.sqrt(max(1, moment.warmup) / moment.number)


def linear(moment: Moment) -> float:
    """Linear decay from the end of the warm-up to zero at the end of training."""
    return 1.0 - moment.decay


def cosine(moment: Moment) -> float:
    """Half a cosine from the end of the warm-up to zero at the end of training."""
    return 0.5 * (1.0 + math.cos(math.pi * moment.decay))


def constant(moment: Moment) -> float:
    """The factor 1: the peak learning rate after the warm-up."""
    return 1.0


SCHEDULES: dict[str, Schedule] = {
    shape.__name__: warmed_up(shape) for shape in (inverse_sqrt, linear, cosine, constant)
}
FALLING = ("linear", "cosine")
"""Schedules that fall to zero at the limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of training, which ends at the nearest limit."""

    updates: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, settings: TrainingSettings) -> Limits:
        """The limits in the settings. At least one is set after defaults are chosen."""
        minutes = settings.max_minutes
        return cls(settings.max_updates, settings.max_epochs, None if minutes is None else 60.0 * minutes)

    def progress(self, *, updates: int, epochs: float, timed_updates: int | None = None) -> float:
        """Used part of the nearest limit, in [0, 1]; 1 is the end.

        `timed_updates`: the number of updates that the time limit allows, once it is known.
        """
        used = ((updates, self.updates), (epochs, self.epochs), (updates, timed_updates))
        return min(1.0, max(done / limit if limit is not None else 0.0 for done, limit in used))

    def is_late(self, seconds: float, *, began: float = 0.0, reserve: float = 0.0) -> bool:
        """Whether the clock has reached the time limit.

        `began`: seconds at which the training began, or was continued. `reserve`: seconds for the final validation and
        saving; at most half of the time from `began` on is reserved.
        """
        return self.seconds is not None and seconds >= max(self.seconds - reserve, 0.5 * (began + self.seconds))


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time limit as a number of updates, which counts from update `since` on."""

    updates: PositiveInt
    since: NonNegativeInt

    @classmethod
    def derive(
        cls,
        *,
        done: int,
        seconds_left: float,
        seconds_per_update: float,
        validation_seconds: float,
        valid_updates: int,
        extra_seconds: float = 0.0,
        extra_from: float = 1.0,
    ) -> TimeLimit:
        """Compute the limit for a run after `done` updates, with time for validations, including a final one.

        After the fraction `extra_from` of all updates, each takes `extra_seconds` longer.
        """
        # updates * each + (1 - extra_from) * updates * extra_seconds = the time left + done * each
        later = (1.0 - extra_from) * extra_seconds
        each = seconds_per_update + validation_seconds / valid_updates + later
        more = int((MARGIN * (seconds_left - validation_seconds) - later * done) / max(each, 1e-9))
        return cls(updates=done + max(1, more), since=done)

    @classmethod
    def read(cls, folder: RunFolder) -> TimeLimit | None:
        """The limit in the run folder; None if there is none for these minutes. Raises `RunFolderError` if damaged."""
        values = folder.read_record(TIME_LIMIT)
        with expecting(folder.path / TIME_LIMIT):
            if not values or values.pop("minutes", -1) != folder.settings.training.max_minutes:
                return None
            return TypeAdapter(cls).validate_python(values)

    def write(self, folder: RunFolder) -> None:
        folder.write_record(TIME_LIMIT, {**asdict(self), "minutes": folder.settings.training.max_minutes})
