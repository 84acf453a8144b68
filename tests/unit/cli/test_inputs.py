"""What a command line names: options become settings, arguments are files or texts, notes and errors go to stderr."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from transduce.cli.options import write_lines
from transduce.cli.train import Doctor, Prepare, Request, Train
from transduce.cli.translate import input_of, translate_files
from transduce.config.decoding import DecodingOptions
from transduce.decoding.results import Candidate, Translation
from transduce.errors import DataError, SettingsError, UserError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in ("a.en", "a.de", "b.en", "b.de", "memory.tmx"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "x.toml").write_text('[data]\ntrain = [{ src = "b.en", tgt = "b.de" }]\n[training]\nlr = 0.001\n')
    return tmp_path


def test_files_of_the_command_line_replace_those_of_the_recipe(texts: Path) -> None:
    request = Request(
        recipe=texts / "x.toml", src=[texts / "a.en"], tgt=[texts / "a.de"], overrides=["training.seed=5"]
    )
    settings = request.settings()
    assert [corpus.src for corpus in settings.data.train] == [texts / "a.en"]
    assert (settings.training.lr, settings.training.seed) == (0.001, 5)
    assert request.run_folder() == Path("runs/x")


def test_a_file_with_both_sides_is_added_to_pairs_of_files(texts: Path) -> None:
    tmx = [texts / "memory.tmx"]
    both = Request(src=[texts / "a.en"], tgt=[texts / "a.de"], path=tmx, run=texts / "run").settings().data.train
    assert [corpus.path for corpus in both] == [None, texts / "memory.tmx"]
    assert len(Request(recipe=texts / "x.toml", path=tmx).settings().data.train) == 1


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(valid_tgt=[Path("a")]), "the number of --valid-src is 0 and of --valid-tgt 1"),
        (Request(text=[Path("a")], path=[Path("a.tsv")]), "train text is given as plain text and as sentence pairs"),
        (Request(overrides=["data=3"]), "data = 3: a section, not a value"),
        (Request(text=[Path("a")], overrides=["data.train.0.weight=2"]), "'train' is not a section"),
    ],
)
def test_contradictions_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        request_.settings()


def test_missing_data_of_a_recipe_suggests_data_option(texts: Path) -> None:
    (texts / "b.de").unlink()
    with pytest.raises(DataError, match=r"b\.de; .*--data FOLDER"):
        Request(recipe=texts / "x.toml").settings()
    with pytest.raises(DataError, match=r"elsewhere.b\.en$"):
        Request(recipe=texts / "x.toml", data=texts / "elsewhere").settings()


def test_a_run_with_encoded_text_does_not_need_the_files(texts: Path) -> None:
    (texts / "b.de").unlink()
    (texts / "run").mkdir()
    with pytest.raises(DataError):
        Request(recipe=texts / "x.toml", run=texts / "run").settings()
    (texts / "run" / "data.json").write_text("{}")
    assert Request(recipe=texts / "x.toml", run=texts / "run").settings().data.train[0].tgt == texts / "b.de"


def test_a_run_needs_a_name() -> None:
    with pytest.raises(SettingsError, match="--run"):
        Request().run_folder()


def test_plain_text_is_for_the_task_of_the_starting_model(tmp_path: Path) -> None:
    """A resumed run knows its task even if the starting run no longer exists."""
    text, start, run = tmp_path / "text.txt", tmp_path / "start", tmp_path / "run"
    text.write_text("a line\n")
    start.mkdir()
    run.mkdir()
    request = Request(text=[text], start=start, run=run)
    assert Request(text=[text], run=run).settings().task == "causal"
    for task, found in (("masked", "masked"), ("encoding", "masked"), ("causal", "causal"), ("translation", "causal")):
        (start / "config.json").write_text(json.dumps({"task": task}))
        assert request.settings().task == found
    (run / "manifest.json").write_text(json.dumps({"asked": {"task": "masked"}}))
    (start / "config.json").unlink()
    assert request.settings().task == "masked"


def test_train_prepare_and_doctor_share_options() -> None:
    shared = list(inspect.signature(Request).parameters)
    for command in (Train, Prepare, Doctor):
        assert list(inspect.signature(command).parameters)[: len(shared)] == shared


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
