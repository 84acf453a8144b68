"""Runs that are interrupted or damaged and continued; contradictions that are refused before any work."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sacrebleu import sentence_chrf

import toys
from system.commands import Done, small, transduce, write_corpus
from transduce.config.settings import Settings
from transduce.errors import Interrupted, SettingsError
from transduce.runs.checkpoints import Checkpoints
from transduce.tasks.resolve import check


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


def cut_short(texts: Path) -> None:
    """Train for three updates, as if a signal had arrived then."""
    with toys.failing_update(4, Interrupted("saved", signal=2)):
        assert train(texts).code == 130


def test_a_run_resumes_without_its_text(texts: Path) -> None:
    """The folder contains everything that is needed, test sets included."""
    cut_short(texts)
    for path in texts.iterdir():
        path.unlink()
    with mock.patch.object(Checkpoints, "load", autospec=True, side_effect=Checkpoints.load) as load:
        done = train(texts)
    assert done.code == 0, done.err
    assert "update 2," in done.err and "changed" not in done.err
    assert load.call_count == 1, "a checkpoint is read once"
    (scored,) = json.loads((texts.parent / "run" / "scores.json").read_text())["sets"]
    assert (scored["name"], scored["scores"]["n_sentences"]) == ("test", 6)
    (sampled,) = json.loads((texts.parent / "run" / "samples.json").read_text())["sets"]
    chrf = [sentence_chrf(sample["hyp"], [sample["ref"]]).score for sample in sampled["worst"]]
    assert len(chrf) == sum(sample["hyp"] != sample["ref"] for sample in sampled["samples"]) and chrf == sorted(chrf)
    again = train(texts)
    assert again.code == 0 and "is finished" in again.err


def test_a_run_whose_encoded_text_was_removed_resumes_as_the_error_says(texts: Path) -> None:
    cut_short(texts)
    run = texts.parent / "run"
    shutil.rmtree(run / "tokens")
    done = train(texts)
    assert done.code == 2 and f"{run / 'tokens'} was removed" in done.err and f"remove {run / 'data.json'}" in done.err
    (run / "data.json").unlink()
    done = train(texts)
    assert done.code == 0 and "resuming after update" in done.err, done.err


def test_a_damaged_line_of_the_log_is_skipped_with_a_warning(texts: Path) -> None:
    cut_short(texts)
    log = texts.parent / "run" / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:1], b"\x00\xff\n", *lines[1:]]))
    done = train(texts)
    assert done.code == 0, done.err
    assert f"warning: {log}, line 2: damaged, left out" in done.err
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()][-1] == "end"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a test set and without validation translations."""
    folder = tmp_path_factory.mktemp("finished") / "texts"
    folder.mkdir()
    write_corpus(folder, "train", 60)
    done = train(folder, "training.valid_bleu_sentences=0", tests=False)
    assert done.code == 0, done.err
    assert "nothing was scored" in done.err and f"evaluate {folder.parent / 'run'} on a source" in done.err
    return folder.parent


def again(finished: Path, tmp_path: Path, spoil: Callable[[Path], object]) -> tuple[Done, Path]:
    """Repeat the command after `spoil` has changed the run."""
    shutil.copytree(finished, tmp_path / "x")
    run = finished / "run"
    spoil(run)
    try:
        return train(finished / "texts", "training.valid_bleu_sentences=0", tests=False), run
    finally:
        shutil.copytree(run, tmp_path / "then")
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "x" / "run", run)


def test_without_anything_to_score_there_is_still_a_report_and_a_model(finished: Path) -> None:
    run = finished / "run"
    for name in ("report.html", "README.md"):
        assert "Nothing was scored" in (run / name).read_text(encoding="utf-8")
    assert not (run / "scores.json").exists()
    src, tgt = finished / "texts" / "train.en", finished / "texts" / "train.de"
    assert transduce("translate", run, src, "--max-length", 3).code == 0
    assert transduce("evaluate", run, "--src", src, "--ref", tgt, "--max-length", 3).code == 0
    assert transduce("inspect", run, "A dog.").code == 0


@pytest.mark.parametrize("name", ["report.html", "README.md"])
def test_report_writes_a_missing_report_or_card(finished: Path, tmp_path: Path, name: str) -> None:
    before = (finished / "run" / name).read_bytes()
    done, run = again(finished, tmp_path, lambda run: (run / name).unlink())
    assert done.code == 0 and "is finished" in done.err, done.err
    (run / name).unlink()
    assert transduce("report", run).code == 0
    assert (run / name).read_bytes() == before


def test_an_edited_card_is_kept(finished: Path, tmp_path: Path) -> None:
    words = "# Our own words\n\nabout this model\n"

    def edit(run: Path) -> None:
        (run / "README.md").write_text(words)
        assert transduce("report", run).code == 0

    done, _ = again(finished, tmp_path, edit)
    assert done.code == 0
    assert (tmp_path / "then" / "README.md").read_text() == words


def test_verify_names_a_changed_log_of_a_finished_run(finished: Path, tmp_path: Path) -> None:
    """A finished log has a checksum; a change does not make the run unusable."""
    run = finished / "run"
    assert "ok        metrics.jsonl" in transduce("verify", run).out

    def spoil(run: Path) -> None:
        log = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(log.replace('"update": 4', '"update": 3', 1))
        done = transduce("verify", run)
        assert done.code == 1 and re.search(r"DAMAGED +metrics\.jsonl", done.out)

    done, _ = again(finished, tmp_path, spoil)
    assert done.code == 0 and "is finished" in done.err, done.err


@pytest.mark.parametrize("preset", [{}, {"preset": "small"}])
@pytest.mark.parametrize("vocab_size", [None, 500], ids=["chosen", "equal on both sides"])
def test_separate_vocabularies_cannot_be_tied_three_ways(preset: dict[str, Any], vocab_size: int | None) -> None:
    """Even if both have the same size: piece 7 of one is not piece 7 of the other."""
    separate = {"joint": False, "vocab_size": vocab_size}
    with pytest.raises(SettingsError, match=r"'three_way' needs one vocabulary: set tokenizer\.joint = true"):
        check(Settings.from_mapping({"tokenizer": separate, "model": {"tie": "three_way", **preset}}))
    for tokenizer, model in ((separate, {"tie": "two_way"}), (separate, {}), ({}, {"tie": "three_way"})):
        check(Settings.from_mapping({"tokenizer": tokenizer, "model": {**model, **preset}}))
