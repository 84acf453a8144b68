"""Lines for stdout."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

import typer


def print_lines(lines: Iterable[str]) -> None:
    """Print to stdout; a reader (head, less) that has seen enough ends the command, quietly."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or Python would try to flush once more, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
