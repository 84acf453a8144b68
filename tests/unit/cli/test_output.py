from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import typer

from transduce.cli.output import print_lines


class Closed(io.StringIO):
    """A pipe whose reader has closed it."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_pipe_stops_the_producer_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def lines() -> Iterator[str]:
        try:
            for i in range(5):
                made.append(i)
                yield str(i)
        finally:
            made.append("end")  # type: ignore[arg-type]

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(typer.Exit):
        print_lines(lines(), end="")
    assert made == [0, "end"]


def test_model_output_is_escaped_on_a_terminal_and_byte_exact_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, shown in ((True, r"a\u001b[2Jb"), (False, "a\x1b[2Jb")):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdout", stream)
        print_lines(["a\x1b[2Jb"])
        assert stream.getvalue() == f"{shown}\n"
