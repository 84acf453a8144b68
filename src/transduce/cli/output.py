"""Lines for stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator, Iterable

import typer


def print_lines(lines: Iterable[str], end: str = "\n") -> None:
    """Print to stdout, at once where `end` is empty; a reader (head, less) that has seen enough ends it, quietly.

    Lines that are made on the way are then made no more.
    """
    try:
        for line in lines:
            print(line, end=end, flush=not end)
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or Python would try to flush once more, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    finally:
        if isinstance(lines, Generator):
            lines.close()
