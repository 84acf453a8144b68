"""What the doctor tries is the user's data in small: as many files, all labels, and faults told of the given files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transduce.config import Settings
from transduce.diagnosis.copied import Copies
from transduce.diagnosis.measuring import OVER, measure, tokens_at_once
from transduce.diagnosis.sampling import take_sample
from transduce.errors import DataError
from transduce.examine import HELD, SAMPLED, _on_sample
from transduce.log import Log
from transduce.tasks.table import TASKS, find_task
from unit.diagnosis.corpora import good, settings, write


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
    from transduce.evaluation.wording import WORDINGS
    from transduce.exchange import EXPORTS
    from transduce.purposes import PURPOSES

    assert set(TASKS) == set(WORDINGS) and set(TASKS) | {"encoding"} == set(PURPOSES)
    assert all(set(target.exporters) <= set(PURPOSES) for target in EXPORTS.values())
    assert {task.reads for task in TASKS.values()} == {"pairs", "text", "labelled"}
