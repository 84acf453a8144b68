"""A limit in minutes becomes a limit in updates, so that the result of a run does not depend on the clock.

Once the speed of the machine is known, the number of updates that fit is computed and written to the run folder. From
then on the schedule and the end follow it. A run that is killed and resumed reads it again, so it makes the same
updates. The clock remains as a safety net for a machine that became slower.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from transduce.runs.atomic import expecting
from transduce.runs.folder import RunFolder

FILE = "time_limit.json"
WARM_UPDATES = 5  # not measured: the first updates are slower
MIN_UPDATES = 2 * WARM_UPDATES
MEASURED_SHARE = 0.05  # of the time limit is spent on measuring, unless the first validation comes earlier
MARGIN = 0.92  # of the time is planned for, so that the safety net is not needed


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """A time limit as a number of updates, which counts from update `since` on."""

    updates: int
    since: int

    @classmethod
    def read(cls, folder: RunFolder) -> TimeLimit | None:
        """What the run folder contains, if anything; `RunFolderError` where it is damaged."""
        values = folder.read_record(FILE)
        with expecting(folder.path / FILE):
            found = cls(**values) if values else None
            if found is not None and not (type(found.updates) is type(found.since) is int and found.updates > 0):
                raise ValueError("numbers of updates expected")
            return found

    def write(self, folder: RunFolder) -> None:
        """Store it durably."""
        folder.write_record(FILE, asdict(self))


def derive(
    *, done: int, seconds_left: float, seconds_per_update: float, validation_seconds: float, valid_updates: int
) -> TimeLimit:
    """The limit for a run that has made `done` updates: validations on the way and a final one are counted in."""
    each = seconds_per_update + validation_seconds / valid_updates
    more = int(MARGIN * (seconds_left - validation_seconds) / max(each, 1e-9))
    return TimeLimit(updates=done + max(1, more), since=done)


class Stopwatch:
    """Seconds per update, without validations and saving, and without the first updates once there are more."""

    def __init__(self) -> None:
        self._n, self._since = 0, (0, 0.0)
        self._paused = self._started = 0.0

    def start(self, now: float) -> None:
        """Start counting."""
        self.__init__()  # type: ignore[misc]
        self._started = now

    def pause(self, seconds: float) -> None:
        """Leave out the last `seconds`."""
        self._paused += seconds

    def count(self, now: float) -> None:
        """Note an update."""
        self._n += 1
        if self._n == WARM_UPDATES:
            self._since = self._n, now - self._started - self._paused

    def seconds_per_update(self, now: float) -> float:
        """The mean so far; at least one update must have been counted."""
        n, seconds = self._since if self._n > WARM_UPDATES else (0, 0.0)
        return max(0.0, now - self._started - self._paused - seconds) / (self._n - n)

    @property
    def n_updates(self) -> int:
        """Updates counted."""
        return self._n
