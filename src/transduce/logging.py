"""Progress for people, on stderr: lines, warnings and progress bars (rich on a terminal, plain lines elsewhere).

stdout is reserved for the result of a command, such as translations. Metrics for programs: `metrics_log`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

SECONDS_BETWEEN_LINES = 10.0
LONGEST_ERROR = 2000
"""Maximum number of characters of an error message; the middle of a longer message is left out."""

_COLOURS = re.compile(r"(\x1b\[(?:0|48;5;\d{1,3})m)")  # the escape sequences of `inspection.pictures`
# Control characters except tab and line feed, line separators, marks that change the direction of the following text,
# and lone surrogates, Python's form of bytes that are not UTF-8.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202d\u202e\ud800-\udfff]")


def escape(text: str, *, colours: bool = False) -> str:
    r"""Replace control characters, which a terminal would obey, by escapes such as \u001b.

    File names, data and model output may contain anything. Sent to a terminal, escape sequences could retitle the
    window, overwrite lines or worse. `colours` keeps the background colours of `inspection.pictures`.
    """
    parts = _COLOURS.split(text) if colours else [text]
    parts[::2] = [_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", part) for part in parts[::2]]
    return "".join(parts)


def print_exception(error: BaseException) -> None:
    print_to_stderr(escape("".join(traceback.format_exception(error)).rstrip("\n")))


def print_error(message: str) -> None:
    """Print `transduce: error: MESSAGE` to stderr as a single line."""
    text = escape(" ".join(message.split()))
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR // 2]} [...] {text[-LONGEST_ERROR // 2 :]}"
    print_to_stderr(f"transduce: error: {text}")


def print_to_stderr(text: str) -> None:
    """Print `text` to stderr if possible. Failures are ignored, as they must not change the exit code."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Bar:
    """Progress of a long job with the time left, from the average speed since the first call; made by `Log.progress`.

    >>> clock = iter([0.0, 10.0]).__next__
    >>> bar = Bar(lambda fraction, text: print(f"{fraction:.0%}  {text}"), clock)
    >>> bar.update(0.5, note="resumed")
    50%  resumed
    >>> bar.update(0.75, loss=2.5, tokens_per_second=12345.6)
    75%  loss 2.500  12,346 tokens/s  0:10 left
    """

    def __init__(self, show: Callable[[float, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._first: tuple[float, float] | None = None  # a resumed job does not start at 0
        self._left = math.inf

    def update(
        self,
        fraction: float,
        *,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        note: str = "",
        at_most: float = math.inf,
    ) -> None:
        """Show that `fraction` (0 to 1) of the job is done. Cheap enough to call after every optimizer update.

        `at_most`: seconds after which the job ends in any case; with this limit, the time left never rises.
        """
        now = self._clock()
        then, start = self._first = self._first or (now, fraction)
        left = min(at_most, (now - then) * (1 - fraction) / (fraction - start) if fraction > start else math.inf)
        if at_most < math.inf:
            left = self._left = max(0.0, min(left, self._left))
        parts = [
            note,
            "" if loss is None else f"loss {loss:.3f}",
            "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s",
            f"{duration(left)} left" if left < math.inf else "",
        ]
        self._show(fraction, "  ".join(filter(None, parts)))


class Log:
    """Lines and progress bars for people, on stderr.

    `quiet` shows warnings only. On a terminal, bars are drawn by rich; in a file or a pipe, progress is a plain line
    about every ten seconds.
    """

    def __init__(self, *, quiet: bool = False, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._print_above_bar: Callable[[str], None] | None = None

    @property
    def is_terminal(self) -> bool:
        return self._stream.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ

    @property
    def width(self) -> int:
        """Number of columns of the terminal; a very large number if the output is no terminal."""
        return shutil.get_terminal_size().columns if self._stream.isatty() else sys.maxsize

    def say(self, text: str = "") -> None:
        """Print a line unless the log is quiet."""
        if not self._quiet:
            self._write(text)

    def warn(self, text: str) -> None:
        """Print a warning, even if the log is quiet."""
        self._write(f"warning: {text}")

    @contextmanager
    def progress(self, label: str) -> Iterator[Bar]:
        """Context manager that shows a progress bar and yields it; lines printed meanwhile appear above the bar."""
        if self._quiet:
            yield Bar(lambda fraction, text: None)
        elif not self.is_terminal:
            yield Bar(plain_lines(label, self._write))
        else:
            with self._rich_bar(escape(label)) as bar:
                yield bar

    @contextmanager
    def _rich_bar(self, label: str) -> Iterator[Bar]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        console = Console(file=self._stream, highlight=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}", markup=False),
        )
        progress = Progress(*columns, console=console, refresh_per_second=4, redirect_stdout=False)
        task = progress.add_task(label, total=1.0, text="")
        progress.start()
        self._print_above_bar = lambda text: console.print(text, markup=False, soft_wrap=True)
        try:
            yield Bar(lambda fraction, text: progress.update(task, completed=min(fraction, 1.0), text=text))
        finally:
            self._print_above_bar = None
            with suppress(OSError):
                progress.stop()

    def _write(self, text: str) -> None:
        if self._stream.isatty():
            text = escape(text)
        with suppress(OSError):  # a closed terminal or a pipe without a reader is no reason to stop the work
            if self._print_above_bar is not None:
                self._print_above_bar(text)
            else:
                print(text, file=self._stream, flush=True)


def plain_lines(
    label: str, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[float, str], None]:
    """Return the output function of a `Bar` outside a terminal: it prints a line every ten seconds."""
    due = clock() + SECONDS_BETWEEN_LINES / 5

    def show(fraction: float, text: str) -> None:
        nonlocal due
        if clock() >= due:
            due = clock() + SECONDS_BETWEEN_LINES
            write(f"{label} {fraction:4.0%}  {text}")

    return show


def duration(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if there are any.

    >>> duration(75), duration(4000)
    ('1:15', '1:06:40')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
