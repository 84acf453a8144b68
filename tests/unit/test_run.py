"""What is refused before any work; and runs that are cut short at one place or another and go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from system.commands import Done, small, transduce, write_corpus
from transduce.config import Settings
from transduce.errors import Interrupted, SettingsError
from transduce.run import check
from transduce.training.step import Updater

SEPARATE: dict[str, Any] = {"joint": False}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_corpus(folder, "train", 60)
    write_corpus(folder, "test", 6, split="test")
    return folder


def train(texts: Path, *more: str, tests: bool = True) -> Done:
    held_out = ["--test-src", texts / "test.en", "--test-tgt", texts / "test.de"] if tests else []
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de", *held_out]
    return transduce("train", *sides, "--run", texts.parent / "run", *small("training.valid_updates=2", *more))


def cut_short(texts: Path, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Train until the update before `at`, as if a signal had come then."""
    calls, original = [0], Updater.update

    def update(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Interrupted("saved")
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "update", update)
        assert train(texts).code == 130


def test_a_run_goes_on_when_its_text_is_gone(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is needed of it, test sets too, lies in the folder by then."""
    cut_short(texts, monkeypatch, at=4)
    for path in texts.iterdir():
        path.unlink()
    done = train(texts)
    assert done.code == 0, done.err
    assert "going on from update 2" in done.err and "changed" not in done.err
    (scored,) = json.loads((texts.parent / "run" / "scores.json").read_text())["sets"]
    assert (scored["name"], scored["scores"]["n_sentences"]) == ("test", 6)
    again = train(texts)
    assert again.code == 0 and "finished already" in again.err


def test_a_damaged_line_of_the_log_stops_nothing(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(texts, monkeypatch, at=4)
    log = texts.parent / "run" / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:1], b"\x00\xff\n", *lines[1:]]))
    done = train(texts)
    assert done.code == 0, done.err
    assert f"warning: {log}, line 2: damaged, left out" in done.err
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()][-1] == "end"
