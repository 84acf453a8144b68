"""Learning-rate schedules and the limits of training.

A schedule is a pure function that returns a factor of the peak learning rate. It rises from 0 to 1 during the warm-up;
then it has one of several shapes. Shapes that fall to zero follow `progress`, the used part of the nearest limit in
updates, epochs or minutes. So a run with a time limit ends with a learning rate of zero on a machine of any speed.

A limit in minutes becomes a limit in updates (`TimeLimit`), so that the result of a run does not depend on the clock.
After a fifth of the time, the number of updates that fit is computed and written to the run folder. From then on this
number decides the schedule and the end, also after a resume. If the machine becomes slower, the clock ends training.

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
MARGIN = 0.92  # share of the time limit that is planned, so that the clock rarely ends the training


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of an update, from which a schedule computes its factor.

    done: earlier updates. progress: fraction of the training that is over. warmup: updates of the warm-up.
    """

    done: int
    progress: float
    warmup: int

    @property
    def number(self) -> int:
        """The number of the update, from 1 (step_num in the paper)."""
        return self.done + 1

    @property
    def decay(self) -> float:
        """Fraction of the training after the warm-up that is over: 0 until the warm-up ends, 1 at the end.

        The progress at the end of the warm-up is computed as `progress * warmup / done`. This is exact if the limit is
        in updates, and otherwise an estimate from the speed so far.
        """
        if self.done <= self.warmup:
            return 0.0
        start = self.progress * self.warmup / self.done
        return min(1.0, max(0.0, (self.progress - start) / (1.0 - start))) if start < 1.0 else 1.0


Schedule = Callable[[Moment], float]


def warmed_up(shape: Schedule) -> Schedule:
    """Make a schedule that follows `shape` after a linear warm-up, number / warmup for updates 1 to warmup."""

    def schedule(moment: Moment) -> float:
        return moment.number / moment.warmup if moment.number < moment.warmup else shape(moment)

    return schedule


def inverse_sqrt(moment: Moment) -> float:
    """Shape of the paper's schedule (section 5.3), scaled to 1 at the end of the warm-up: sqrt(warmup / number).

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
    """The peak learning rate from the end of the warm-up on: the factor is always 1."""
    return 1.0


SCHEDULES: dict[str, Schedule] = {
    shape.__name__: warmed_up(shape) for shape in (inverse_sqrt, linear, cosine, constant)
}
FALLING = ("linear", "cosine")
"""Names of schedules that fall to zero at the end of training."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of training, which ends at the nearest limit."""

    updates: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, settings: TrainingSettings) -> Limits:
        """Read the limits from settings whose defaults are chosen: at least one limit is set."""
        minutes = settings.max_minutes
        return cls(settings.max_updates, settings.max_epochs, None if minutes is None else 60.0 * minutes)

    def progress(self, *, updates: int, epochs: float, timed_updates: int | None = None) -> float:
        """Return the used fraction of the nearest limit, in [0, 1]; at 1, training ends.

        `timed_updates`: the number of updates that the time limit allows, or None while it is not known.
        """
        used = ((updates, self.updates), (epochs, self.epochs), (updates, timed_updates))
        return min(1.0, max(done / limit if limit is not None else 0.0 for done, limit in used))

    def is_late(self, seconds: float, *, began: float = 0.0, reserve: float = 0.0) -> bool:
        """Whether training must end after `seconds`, so that the final validation and saving meet the time limit.

        `began`: seconds when the training began, or was continued. `reserve`: seconds that the final validation and
        saving need; at most half of the time from `began` to the limit is reserved.
        """
        return self.seconds is not None and seconds >= max(self.seconds - reserve, 0.5 * (began + self.seconds))


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time limit as a number of updates. Schedules use it from update `since` on, when it was computed."""

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
        """Compute the limit after `done` updates, with time for a validation every `valid_updates` and a final one.

        `extra_from`: fraction of all updates after which each update takes `extra_seconds` longer.
        """
        # Solves: updates * each + (1 - extra_from) * updates * extra_seconds = the time left + done * each
        later = (1.0 - extra_from) * extra_seconds
        each = seconds_per_update + validation_seconds / valid_updates + later
        more = int((MARGIN * (seconds_left - validation_seconds) - later * done) / max(each, 1e-9))
        return cls(updates=done + max(1, more), since=done)

    @classmethod
    def read(cls, folder: RunFolder) -> TimeLimit | None:
        """Read the limit from the run folder; None if it has none for the current `training.max_minutes`."""
        values = folder.read_record(TIME_LIMIT)
        with expecting(folder.path / TIME_LIMIT):
            if not values or values.pop("minutes", -1) != folder.settings.training.max_minutes:
                return None
            return TypeAdapter(cls).validate_python(values)

    def write(self, folder: RunFolder) -> None:
        folder.write_record(TIME_LIMIT, {**asdict(self), "minutes": folder.settings.training.max_minutes})
