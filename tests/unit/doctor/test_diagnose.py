"""The trial uses a small copy of the data: as many corpora, all labels, and errors that name the given files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transduce.__main__ import main
from transduce.cli.request import Request
from transduce.config import Settings
from transduce.data.sources import Sources
from transduce.doctor.diagnose import HELD, SAMPLED, diagnose, on_sample, why_unusable
from transduce.doctor.estimates import TIMEOUT, Trial, tokens_at_once
from transduce.doctor.report import Diagnosis, format_diagnosis
from transduce.doctor.sampling import take_sample
from transduce.doctor.trial import measure
from transduce.errors import DataError
from transduce.logging import Log
from transduce.tasks.registry import TASKS, find_task
from unit.doctor.corpora import good, settings, write


def small(asked: Settings) -> tuple[Settings, Sources[Any], int]:
    settings, sources, n = on_sample(asked, take_sample(asked))
    assert sources is not None
    return settings, sources, n


def test_each_file_stays_a_document(tmp_path: Path) -> None:
    lines = [src for src, _ in good(600)]
    paths = [write(tmp_path / f"{i}.txt", lines[i * 100 : i * 100 + 100]) for i in range(4)]
    train, valid = ([{"path": str(path)} for path in some] for some in (paths[:2], paths[2:]))
    values: dict[str, Any] = {"task": "masked", "data": {"train": train, "valid": valid, "documents": "file"}}
    given, sources, n = small(Settings.from_mapping(values | {"model": {"kind": "bert", "next_sentence": True}}))
    assert (len(sources.train), len(sources.valid), n) == (2, 2, 200)
    find_task("masked").read(given, Log(quiet=True), sources)  # refuses fewer than two documents


def test_a_rare_label_outside_the_sample_is_known(tmp_path: Path) -> None:
    n = 3 * SAMPLED
    rows = [f"{'rare' if i == n // 2 + 777 else 'ab'[i % 2]}\ttext number {i}" for i in range(n)]
    train = write(tmp_path / "train.tsv", rows)
    valid = write(tmp_path / "valid.tsv", ["a\tone", "rare\ttwo", "b\tthree"])
    asked = settings({"path": str(train)}, task="classification", valid=[{"path": str(valid)}])
    given, sources, n_rows = small(asked)
    assert n_rows <= SAMPLED and given.data.labels is not None and list(given.data.labels) == ["a", "b", "rare"]
    find_task("classification").read(given, Log(quiet=True), sources)


def test_an_unknown_label_is_reported_with_file_and_line(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", [f"{'ab'[i % 2]}\ttext {i}" for i in range(100)])
    rows = [f"{'ab'[i % 2]}\tother {i}" for i in range(5 * HELD)]
    rows[0] = "c\tfirst"
    valid = write(tmp_path / "valid.tsv", rows)
    asked = settings({"path": str(train)}, task="classification", valid=[{"path": str(valid)}])
    given, sources, _ = small(asked)
    with pytest.raises(DataError, match=r"valid\.tsv, line 1: unknown label 'c'.*a, b"):
        find_task("classification").read(given, Log(quiet=True), sources)


def test_trial_is_killed_after_its_time_limit(tmp_path: Path) -> None:
    assert measure(tmp_path, seconds=0.05).died == TIMEOUT


def test_processes_share_a_batch() -> None:
    asked = Settings.from_mapping({"training": {"batch_tokens": 1000, "micro_batch_tokens": 600}})
    assert [tokens_at_once(asked, n) for n in (1, 2, 3)] == [600, 500, 334]


def test_the_tasks_cover_every_form_of_rows() -> None:
    assert {task.reads for task in TASKS.values()} == {"pairs", "text", "labelled"}


def test_results_of_an_unreadable_file_are_no_obstacles(tmp_path: Path) -> None:
    tsv = write(tmp_path / "bad.tsv", ["a cat\teine Katze", "a dog"])
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>{n} cats</seg></tuv><tuv xml:lang="de"><seg>{n}</seg></tuv></tu>' for n in "123"
    )
    tmx = write(tmp_path / "a.tmx", [f'<tmx version="1.4"><header/><body>{units}</body></tmx>'])
    for path, message in ((tsv, "bad.tsv, line 2"), (tmx, "no unit has both 'en' and 'fr'")):
        found = diagnose(settings({"path": str(path)}, tgt_lang="fr"), run=tmp_path / "run", seconds=3)
        (only,) = found.obstacles
        assert only.check == "readable" and message in only.text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_fifos_and_folders_are_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.en")
    target = write(tmp_path / "a.de", ["one"])
    asked = settings({"src": str(tmp_path / "a.en"), "tgt": str(target)})
    with pytest.raises(DataError, match=r"is a folder|is a pipe"):
        take_sample(asked)
    found = diagnose(asked, run=tmp_path / "run", seconds=3)
    assert [one.check for one in found.obstacles] == ["data"]
    with pytest.raises(DataError, match=r"is a folder|is a pipe"):
        Request(src=[tmp_path / "a.en"], tgt=[target], run=tmp_path / "run").settings()


def test_unusable_places_for_a_run_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "file", ["text"])
    asked = settings()
    assert "cannot be created" in why_unusable(tmp_path / "file" / "x" / "y", asked)
    assert "cannot be created" in why_unusable(tmp_path / "file", asked)
    assert "is not empty" in why_unusable(tmp_path, asked)
    assert not why_unusable(tmp_path / "new" / "run", asked)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
    if Path("/proc/self").exists():
        assert "cannot be created" in why_unusable(Path("/proc/new/run"), asked)


def test_verdict_names_what_was_not_measured() -> None:
    assert (
        "not measured: memory, speed, time, disk"
        in format_diagnosis(Diagnosis(findings=(), trial=Trial(died=TIMEOUT)))[-1]
    )


def test_settings_cannot_be_given_for_an_existing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["doctor", str(tmp_path), "--set", "training.lr=3"])
    assert left.value.code == 2 and "own settings" in capsys.readouterr().err
