"""Write lines to stdout and to files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Protocol

import typer

from transduce.errors import SettingsError
from transduce.logging import Log, escape
from transduce.runs.atomic import partial_of, write_aside

STDOUT = "standard output"


def print_lines(lines: Iterable[str], *, colours: bool = False) -> None:
    """Print lines to stdout. On a terminal, control characters are escaped.

    When the reader (head, less) closes the pipe, the command exits quietly and closes `lines`. `colours` keeps the
    background colours of attention pictures.
    """
    on_terminal = sys.stdout.isatty()
    try:
        for line in lines:
            _print(escape(line, colours=colours) if on_terminal else line)
        _print("", end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit from None
    except OSError as error:
        if error.filename == STDOUT:
            _drop_output()
        raise
    finally:
        if isinstance(lines, Generator):
            lines.close()


def _drop_output() -> None:
    """Discard buffered output: Python would flush it at exit, and print an error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(text: str, *, end: str = "\n", flush: bool = False) -> None:
    try:
        print(text, end=end, flush=flush)
    except OSError as error:
        error.filename = STDOUT
        raise


class Result(Protocol):
    """The result of a command, as lines for people and as plain data."""

    def lines(self) -> Iterable[str]: ...

    def to_json(self) -> Any: ...


def print_result(result: Result, *, as_json: bool) -> None:
    """Print a result for people, or as one line of JSON."""
    print_lines([to_json(result.to_json())] if as_json else result.lines())


def to_json(value: Any) -> str:
    """Format a value as one line of JSON without escaping text to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def check_output(output: Path | None, *inputs: Path | None) -> None:
    """Raise `SettingsError` if the output is a folder or an input."""
    if output is not None and output.is_dir():
        raise SettingsError(f"--output {output} is a folder; name a file")
    given = {os.path.realpath(path) for path in inputs if path is not None}
    if output is not None and output.is_file() and os.path.realpath(output) in given:
        raise SettingsError(f"--output {output} is also an input, which it would replace; name another file")


def write_lines(output: Path, lines: Iterable[str]) -> None:
    """Write lines to a file, atomically. After an error, the lines before it remain in `output`.partial."""
    n = 0
    try:
        with write_aside(output, keep=True) as aside, aside.open("w", encoding="utf-8", newline="\n") as file:
            for line in lines:
                file.write(f"{line}\n")
                n += 1
    except BaseException:
        if n and (partial := partial_of(output)).exists():
            Log().warn(f"the lines before the error are in {partial}")
        raise
    Log().say(f"{n:,} lines are in {output}")
