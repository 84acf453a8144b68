"""Progress for people (on stderr, rich where it is a terminal) and metrics for programs (JSON lines).

stdout belongs to what a command is asked for, translations say; nothing here writes to it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Protocol, runtime_checkable

SECONDS_BETWEEN_LINES = 10.0


@runtime_checkable
class Bar(Protocol):
    """What shows how far a long job is."""

    def update(
        self, fraction: float, *, loss: float | None = None, tokens_per_second: float | None = None, note: str = ""
    ) -> None:
        """Show that `fraction` (0 to 1) of the job is done; cheap enough to be called after every update."""
        ...


class Log:
    """Lines and progress bars for people, on stderr.

    `quiet` leaves warnings only. On a terminal the bars are rich's; elsewhere (a file, a pipe) they are a plain line
    every ten seconds or so.
    """

    def __init__(self, *, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._open: _RichBar | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether bars and colours make sense here."""
        return self._stream.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ

    def say(self, text: str = "") -> None:
        """One line for people."""
        if not self._quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """A line that even a quiet run shows."""
        self._write(f"warning: {text}")

    @contextmanager
    def progress(self, label: str) -> Iterator[Bar]:
        """A bar from 0 to 1 with loss, tokens/s and the time left; lines said meanwhile stand above it."""
        if self._quiet:
            yield _NoBar()
        elif not self.is_terminal:
            yield _PlainBar(label, self._write)
        else:
            with _RichBar(label, self._stream) as bar:
                self._open = bar
                try:
                    yield bar
                finally:
                    self._open = None

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed, a pipe that nobody reads: no reason to stop the work
            if self._open is not None:
                self._open.print(text)
            else:
                print(text, file=self._stream, flush=True)


class TimeLeft:
    """Seconds left, from the pace since the first call: a resumed job does not begin at 0.

    >>> clock = iter([0.0, 10.0]).__next__
    >>> left = TimeLeft(clock)
    >>> left(0.5), left(0.75)
    (None, 10.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, float] | None = None

    def __call__(self, fraction: float) -> float | None:
        """Seconds until 1 is reached, or None while nothing is known."""
        now = self._clock()
        if self._first is None:
            self._first = now, fraction
        then, start = self._first
        return (now - then) * (1 - fraction) / (fraction - start) if fraction > start else None


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any.

    >>> duration(75), duration(4000)
    ('1:15', '1:06:40')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe(
    *, loss: float | None = None, tokens_per_second: float | None = None, left: float | None = None, note: str = ""
) -> str:
    """What stands beside a bar.

    >>> describe(loss=2.5, tokens_per_second=12345.6, left=75)
    'loss 2.500  12,346 tokens/s  1:15 left'
    """
    parts = [
        note,
        "" if loss is None else f"loss {loss:.3f}",
        "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s",
        "" if left is None else f"{duration(left)} left",
    ]
    return "  ".join(filter(None, parts))


class _NoBar:
    def update(
        self, fraction: float, *, loss: float | None = None, tokens_per_second: float | None = None, note: str = ""
    ) -> None:
        """Say nothing."""


class _PlainBar:
    """A line every few seconds, for logs."""

    def __init__(self, label: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._write, self._clock = label, write, clock
        self._left = TimeLeft(clock)
        self._next = clock() + SECONDS_BETWEEN_LINES / 5  # a first sign of life comes early

    def update(
        self, fraction: float, *, loss: float | None = None, tokens_per_second: float | None = None, note: str = ""
    ) -> None:
        left = self._left(fraction)
        if self._clock() >= self._next:
            self._next = self._clock() + SECONDS_BETWEEN_LINES
            what = describe(loss=loss, tokens_per_second=tokens_per_second, left=left, note=note)
            self._write(f"{self._label} {fraction:4.0%}  {what}")


class _RichBar:
    """rich's progress bar."""

    def __init__(self, label: str, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._console = Console(file=stream, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            TaskProgressColumn(),
            TextColumn("{task.fields[what]}"),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4, redirect_stdout=False)
        self._task = self._progress.add_task(label, total=1.0, what="")
        self._left = TimeLeft()

    def __enter__(self) -> _RichBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._progress.stop()

    def print(self, text: str) -> None:
        """A line above the bar, just as it is."""
        self._console.print(text, markup=False, soft_wrap=True)

    def update(
        self, fraction: float, *, loss: float | None = None, tokens_per_second: float | None = None, note: str = ""
    ) -> None:
        what = describe(loss=loss, tokens_per_second=tokens_per_second, left=self._left(fraction), note=note)
        self._progress.update(self._task, completed=min(fraction, 1.0), what=what)
