"""Translating files: notes on stderr, and the lines before an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from transduce.cli.output import write_lines
from transduce.cli.translate import input_of, translate_files
from transduce.config.decoding import DecodingOptions
from transduce.decoding.results import Candidate, Translation
from transduce.errors import DataError, SettingsError

Translate = Callable[..., list[str]]


class Doubling:
    """Translates a line by doubling it; long ones get a note."""

    tokenizers = SimpleNamespace(src=None)

    def translate_lines(
        self, lines: Iterable[str], options: DecodingOptions, *, prefixes: None
    ) -> Iterator[Translation]:
        for line in lines:
            note = "output cut off" if len(line) > 3 else ""
            yield Translation((Candidate(2 * line, (), 0.0, 0.0),), note)


@pytest.fixture
def translate(tmp_path: Path) -> Translate:
    def run(text: str, style: str = "text") -> list[str]:
        (tmp_path / "in.txt").write_text(text)
        return list(translate_files(Doubling(), [tmp_path / "in.txt"], DecodingOptions(), style))  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(("n", "n_lines"), [(0, 0), (1, 1), (5, 5), (6, 6), (5000, 6)])
def test_many_notes_become_a_few_and_a_count(
    n: int, n_lines: int, translate: Translate, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = translate("A.\n" + "a long line\n" * n)
    assert len(lines) == n + 1
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == n_lines
    assert notes[:5] == [f"warning: line {i}: output cut off" for i in range(2, 2 + min(n, 5))]
    if n > 5:
        assert f"{n:,} of {n + 1:,} lines" in notes[5] and "first 5" in notes[5] and "JSON" in notes[5]


def test_json_contains_its_notes(translate: Translate, capsys: pytest.CaptureFixture[str]) -> None:
    lines = translate("a long line\n" * 9, "json")
    assert all('"note": "output cut off"' in line for line in lines)
    assert capsys.readouterr().err == ""


def test_lines_before_an_error_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(n: int) -> Iterator[str]:
        yield from ["eins", "zwei"][:n]
        raise DataError("in.txt, line 3: not valid UTF-8")

    output = tmp_path / "out.de"
    output.write_text("from before\n")
    with pytest.raises(DataError):
        write_lines(output, lines(0))
    assert capsys.readouterr().err == "" and [path.name for path in tmp_path.iterdir()] == ["out.de"]
    with pytest.raises(DataError):
        write_lines(output, lines(2))
    assert output.read_text() == "from before\n"
    assert (tmp_path / "out.de.partial").read_text() == "eins\nzwei\n"
    warning = capsys.readouterr().err
    assert warning.startswith("warning: ") and f"{tmp_path}/out.de.partial" in warning


def test_a_device_is_written_to_directly() -> None:
    write_lines(Path("/dev/null"), ["eins"])
    assert Path("/dev/null").exists() and not Path("/dev/null.partial").exists()


@pytest.mark.parametrize(
    "text",
    [
        "A dog runs.",
        "Hello!",
        "一只狗跑",
        "two dogs",
        "See http://x.y/ab now",
        "See http://x.y",
        "http://x.y z",
        "Write to a@b.de",
        "Only 2.5",
        "x" * 300 + " y",
    ],
)
def test_an_argument_that_is_no_file_is_a_text(text: str) -> None:
    assert input_of(text) == [text]


@pytest.mark.parametrize("name", ["in.en", "data/my file.txt", "data/in"])
def test_a_mistyped_file_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"no file {name}"):
        input_of(name)


@pytest.mark.parametrize(("word", "quoted"), [("Ani", "Ani"), ("123", "123"), ("$x", "'$x'")])
def test_the_error_for_a_single_word_names_the_pipe_that_translates_it(word: str, quoted: str) -> None:
    with pytest.raises(SettingsError) as error:
        input_of(word)
    assert str(error.value).endswith(f"echo {quoted} | transduce translate RUN")


@pytest.mark.parametrize("name", ["-", "https://example.org/in.en", __file__])
def test_an_argument_is_a_file(name: str) -> None:
    assert input_of(name) == Path(name)


def test_files_and_texts_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "two dogs").write_text("A.\nB.\n")
    inputs = [input_of(str(tmp_path / "two dogs")), input_of("C d.\nE.")]
    lines = translate_files(Doubling(), inputs, DecodingOptions(), "text")  # type: ignore[arg-type]
    assert list(lines) == ["A.A.", "B.B.", "C d.C d.", "E.E."]
