"""What surrounds the translations of a finished run: notes, and the lines that an error cuts short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from transduce.cli import use
from transduce.decoding.results import Candidate, Translation
from transduce.errors import DataError
from transduce.logging import Log

Translate = Callable[..., list[str]]


class Doubling(use.Search):
    """Translates a line by doubling it; long ones get a note."""

    def __call__(self, translator: Any, lines: Iterable[str]) -> Iterator[Translation]:
        for line in lines:
            note = "output cut off" if len(line) > 3 else ""
            yield Translation((Candidate(2 * line, (), 0.0, 0.0),), note)


@pytest.fixture
def translate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Translate:
    monkeypatch.setattr(use.Translator, "load", lambda run, device: object())

    def run(text: str, style: str = "text") -> list[str]:
        (tmp_path / "in.txt").write_text(text)

        files = [tmp_path / "in.txt"]
        return list(use.translate(tmp_path, files, search=Doubling(), style=style, device="cpu", log=Log()))

    return run


@pytest.mark.parametrize(("n", "n_lines"), [(0, 0), (1, 1), (5, 5), (6, 6), (5000, 6)])
def test_many_notes_become_a_few_and_a_number(
    n: int, n_lines: int, translate: Translate, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = translate("A.\n" + "a long line\n" * n)
    assert len(lines) == n + 1
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == n_lines
    assert notes[:5] == [f"warning: line {i}: output cut off" for i in range(2, 2 + min(n, 5))]
    if n > 5:
        assert notes[5].startswith(f"warning: {n:,} of {n + 1:,} lines have such notes, of which the first 5 are shown")


def test_json_holds_its_notes_itself(translate: Translate, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translate("a long line\n" * 9, "json")
    assert all('"note": "output cut off"' in line for line in lines)
    assert capsys.readouterr().err == ""


def test_what_was_translated_before_an_error_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(n: int) -> Iterator[str]:
        yield from ["eins", "zwei"][:n]
        raise DataError("in.txt, line 3: not valid UTF-8")

    output = tmp_path / "out.de"
    output.write_text("of before\n")
    with pytest.raises(DataError):
        use.write_lines(output, lines(0))
    assert capsys.readouterr().err == "" and [path.name for path in tmp_path.iterdir()] == ["out.de"]
    with pytest.raises(DataError):
        use.write_lines(output, lines(2))
    assert output.read_text() == "of before\n"
    assert (tmp_path / "out.de.partial").read_text() == "eins\nzwei\n"
    assert capsys.readouterr().err == f"warning: the lines before the error are kept in {tmp_path}/out.de.partial\n"


def test_a_file_that_is_none_is_written_to_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    use.write_lines(Path("/dev/null"), ["eins"])
    assert Path("/dev/null").exists() and not Path("/dev/null.partial").exists()
