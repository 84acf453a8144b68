"""What the doctor tries is the user's data in small: as many files, all labels, and faults told of the given files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transduce.__main__ import main
from transduce.cli.request import Request
from transduce.config import Settings
from transduce.doctor.copied import Copies
from transduce.doctor.diagnosis import Diagnosis
from transduce.doctor.examine import HELD, SAMPLED, _on_sample, diagnose
from transduce.doctor.measuring import OVER, Trial, measure, tokens_at_once
from transduce.doctor.presentation import lines_of
from transduce.doctor.progress import no_place
from transduce.doctor.sampling import take_sample
from transduce.errors import DataError
from transduce.logging import Log
from transduce.tasks.registry import TASKS, find_task
from unit.doctor.corpora import good, settings, write


def _small(asked: Settings, folder: Path) -> tuple[Settings, int, Copies]:
    sample = take_sample(asked)
    copies = Copies(folder / "copies", sample.form)
    copies.folder.mkdir()
    return *_on_sample(asked, sample, copies), copies


def test_files_that_are_documents_stay_files(tmp_path: Path) -> None:
    lines = [src for src, _ in good(600)]
    paths = [write(tmp_path / f"{i}.txt", lines[i * 100 : i * 100 + 100]) for i in range(4)]
    train, valid = ([{"path": str(path)} for path in some] for some in (paths[:2], paths[2:]))
    values: dict[str, Any] = {"task": "masked", "data": {"train": train, "valid": valid, "documents": "file"}}
    asked = Settings.from_mapping(values | {"model": {"kind": "bert", "next_sentence": True}})
    small, n, _ = _small(asked, tmp_path)
    assert (len(small.data.train), len(small.data.valid), n) == (2, 2, 200)
    find_task("masked").read(small, Log(quiet=True))  # two documents on either side, or it would be refused


def test_a_rare_label_that_was_not_drawn_is_known(tmp_path: Path) -> None:
    n = 3 * SAMPLED
    rows = [f"{'rare' if i == n // 2 + 777 else 'ab'[i % 2]}\ttext number {i}" for i in range(n)]
    train = write(tmp_path / "train.tsv", rows)
    valid = write(tmp_path / "valid.tsv", ["a\tone", "rare\ttwo", "b\tthree"])
    asked = settings({"path": str(train)}, task="classification", valid=[{"path": str(valid)}])
    small, n_rows, _ = _small(asked, tmp_path)
    assert n_rows <= SAMPLED and small.data.labels is not None and list(small.data.labels) == ["a", "b", "rare"]
    find_task("classification").read(small, Log(quiet=True))


def test_a_label_that_is_not_known_is_told_with_its_place(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", [f"{'ab'[i % 2]}\ttext {i}" for i in range(100)])
    rows = [f"{'ab'[i % 2]}\tother {i}" for i in range(5 * HELD)]
    rows[0] = "c\tfirst"
    valid = write(tmp_path / "valid.tsv", rows)
    asked = settings({"path": str(train)}, task="classification", valid=[{"path": str(valid)}])
    small, _, copies = _small(asked, tmp_path)
    with pytest.raises(DataError) as refused:
        find_task("classification").read(small, Log(quiet=True))
    assert copies.told(str(refused.value)) == f"{valid}, line 1: label 'c' is not known; known: a, b"


def test_a_trial_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    assert measure(tmp_path, seconds=0.05).died == OVER


def test_processes_share_a_batch() -> None:
    asked = Settings.from_mapping({"training": {"batch_tokens": 1000, "micro_batch_tokens": 600}})
    assert [tokens_at_once(asked, n) for n in (1, 2, 3)] == [600, 500, 334]


def test_every_task_has_its_line_in_the_tables_that_tell_of_tasks() -> None:
    from transduce.config.purposes import PURPOSES
    from transduce.convert.exchange import EXPORTS
    from transduce.evaluation.wording import WORDINGS

    assert set(TASKS) == set(WORDINGS) and set(TASKS) | {"encoding"} == set(PURPOSES)
    assert all(set(target.exporters) <= set(PURPOSES) for target in EXPORTS.values())
    assert {task.reads for task in TASKS.values()} == {"pairs", "text", "labelled"}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.en")
    target = write(tmp_path / "a.de", ["one"])
    asked = settings({"src": str(tmp_path / "a.en"), "tgt": str(target)})
    with pytest.raises(DataError, match=r"is a folder|is no file"):
        take_sample(asked)
    found = diagnose(asked, run=tmp_path / "run", seconds=3)
    assert [one.check for one in found.obstacles] == ["data"]
    with pytest.raises(DataError, match=r"is a folder|is no file"):
        Request(src=[tmp_path / "a.en"], tgt=[target], run=tmp_path / "run").settings()


def test_a_place_where_no_run_can_be_made_is_told(tmp_path: Path) -> None:
    write(tmp_path / "file", ["text"])
    assert "is no folder" in no_place(tmp_path / "file" / "x" / "y")
    assert "is no folder" in no_place(tmp_path / "file")
    assert not no_place(tmp_path / "new" / "run") and not no_place(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    if Path("/proc/self").exists():
        assert "cannot be made" in no_place(Path("/proc/new/run"))


def test_ready_says_what_was_not_measured() -> None:
    assert "not measured: memory, speed, time, disk" in lines_of(Diagnosis(findings=(), trial=Trial(died=OVER)))[-1]


def test_a_run_has_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(tmp_path), "--set", "training.lr=3"])
    assert left.value.code == 2 and "own settings" in capsys.readouterr().err
