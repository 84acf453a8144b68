"""Training options become settings; contradictions and missing files are refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from transduce.cli.train import Doctor, Prepare, Request, Train
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
