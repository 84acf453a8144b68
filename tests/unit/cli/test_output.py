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
