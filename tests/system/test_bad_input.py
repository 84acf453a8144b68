"""Bad input: a one-line error, exit code 2, no partial results, nothing lost."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from system.commands import Done, assert_refused, sets, small, succeed, transduce, write_corpus


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_corpus(folder, "train", 60)
    write_corpus(folder, "test", 6, split="test")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    src, tgt = write_corpus(folder, "train", 60)
    succeed("train", "--src", src, "--tgt", tgt, "--run", folder / "run", *small())
    return folder


def train(texts: Path, *more: object) -> Done:
    sides = ["--src", texts / "train.en", "--tgt", texts / "train.de"]
    return transduce("train", *sides, "--run", texts.parent / "run", "--quiet", *small(), *more)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda en, de: (en, de[:41]), ["train.en has 60 lines", "train.de has 41", "line 42"]),
        (lambda en, de: ([], []), ["no sentence pair found"]),
        (lambda en, de: (en, [b"\n"] * 60), ["no sentence pair", "60", "empty"]),
        (lambda en, de: (en[:1], de[:1]), ["one sentence pair"]),
    ],
    ids=["shorter", "empty", "blank", "one pair"],
)
def test_bad_text(spoil: Callable[..., tuple[list[bytes], list[bytes]]], parts: list[str], texts: Path) -> None:
    files = texts / "train.en", texts / "train.de"
    sides = [file.read_bytes().splitlines(keepends=True) for file in files]
    for file, lines in zip(files, spoil(*sides), strict=True):
        file.write_bytes(b"".join(lines))
    assert_refused(train(texts), *parts)
    assert not (texts.parent / "run").exists()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (["model.positions=learned", "model.max_positions=10"], ["model.max_positions = 10", "at least 257"]),
        (["data.demo=100"], ["data.demo = 100", "leave one of them out"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_settings(settings: list[str], parts: list[str], texts: Path) -> None:
    assert_refused(train(texts, *sets(*settings)), *parts)
    assert not (texts.parent / "run").exists()


def test_leaked_test_pairs_are_counted_in_a_warning(texts: Path) -> None:
    leaked = [(texts / f"train.{side}").read_text(encoding="utf-8").splitlines(keepends=True) for side in ("en", "de")]
    for side, lines in (("en", map(str.upper, leaked[0][:4])), ("de", [*leaked[1][:3], "Another translation.\n"])):
        with (texts / f"test.{side}").open("a", encoding="utf-8") as file:
            file.writelines(lines)
    done = train(texts, "--test-src", texts / "test.en", "--test-tgt", texts / "test.de", "--valid-src",
                 texts / "test.en", "--valid-tgt", texts / "test.de")  # fmt: skip
    assert done.code == 0, done.err
    assert "warning: test: 3 of 10 pairs" in done.err and "1 of 10 sources" in done.err
    report = json.loads((texts.parent / "run" / "data.json").read_text())
    assert [leak["leaked"] for leak in report["leaks"]] == [3, 3]
    assert "overlap with the training text" in (texts.parent / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("translate RUN .", ". is a folder; name a text file"),
        ("translate RUN train.en -o no/where.de", "cannot write no/where.de: No such file or directory"),
        ("translate RUN train.en -o .", "--output . is a folder; name a file"),
        ("translate RUN no.en train.en -o run/../train.en", "there is no file no.en"),
        ("translate RUN train.en --prefix train.de -o train.de", "--output train.de is also an input"),
        ("evaluate RUN --src train.en --ref train.de -o train.de", "--output train.de is also an input"),
        ("translate RUN train.en --device tpu", "device = 'tpu': allowed are auto, cpu and cuda"),
        (
            "translate RUN train.en --precision int4",
            "'int4'; did you mean 'int8'?; allowed: float32, float32-fast, int8, bfloat16",
        ),
        ("evaluate RUN --src train.en --ref two.de", "train.en has 60 lines, two.de has 2"),
        ("evaluate RUN --src train.en --ref train.de --hyp two.de", "2 lines of two.de but 60 references"),
        ("evaluate RUN --src train.en --ref train.de --stride 4", "--stride: no effect for a run of"),
        ("evaluate RUN --src train.en --ref train.de --hyp train.de --beam 7", "beam: no effect if hyp gives"),
        ("score RUN --src train.en --tgt two.de", "train.en has 60 lines, two.de has 2"),
    ],
)
def test_bad_input_of_a_finished_run(
    command: str, problem: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    (trained / "two.de").write_text("eins\nzwei\n")
    assert_refused(transduce(*command.replace("RUN", str(trained / "run")).split()), problem)


def test_a_finished_run_without_its_log_is_reported(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    (run / "metrics.jsonl").write_text("")
    sides = ["--src", trained / "train.en", "--tgt", trained / "train.de"]
    assert_refused(
        transduce("train", *sides, "--run", run, "-q", *small()), "metrics.jsonl is damaged", "model can be used"
    )


def test_damaged_text_of_a_run_that_was_killed_before_it_was_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, tgt = write_corpus(tmp_path, "train", 60)
    asked = ["train", "--src", src, "--tgt", tgt, "--run", tmp_path / "run", "-q", *small("training.max_updates=2")]
    with monkeypatch.context() as patch:
        patch.setattr("transduce.pipeline.finalize", mock.Mock(side_effect=KeyboardInterrupt))
        assert transduce(*asked).code == 130
    file = tmp_path / "run" / "tokens" / "valid" / "src.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert_refused(transduce(*asked), "src.npy")
    file.write_bytes(content)
    assert transduce(*asked).code == 0
