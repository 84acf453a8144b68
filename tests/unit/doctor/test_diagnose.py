"""Memory, time and advice from a trial; the trial uses a small part of the text."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import toys
from transduce.config.architectures import model_settings
from transduce.config.settings import Settings, TrainingSettings
from transduce.data.batch import collate
from transduce.data.reading import Sources
from transduce.data.store import Example, TokenStore
from transduce.doctor.checks import Finding
from transduce.doctor.diagnose import TRAINED, _for_trial, _unknown, diagnose, memory_findings, time_findings, time_of
from transduce.doctor.resources import tokens_at_once, warn_of_resources
from transduce.doctor.trial_updates import FULL, TIMEOUT, Trial, largest, measure, rehearse, why_it_crashed
from transduce.logging import Log
from transduce.machine import Machine
from transduce.models.registry import build_model
from transduce.tasks.resolve import find_task
from transduce.text.special import UNK, Vocabulary
from transduce.training.feed import PairFeeder
from transduce.training.step import DoesNotFit
from unit.doctor.corpora import good, sample_of, settings, write

GIB = 1 << 30


def for_trial(asked: Settings) -> tuple[Settings, Sources[Any], int]:
    return _for_trial(asked, sample_of(asked), find_task(asked.task))


def test_each_file_stays_a_document(tmp_path: Path) -> None:
    lines = [src for src, _ in good(600)]
    paths = [write(tmp_path / f"{i}.txt", lines[i * 100 : i * 100 + 100]) for i in range(4)]
    train, valid = ([{"path": str(path)} for path in some] for some in (paths[:2], paths[2:]))
    values: dict[str, Any] = {"task": "masked", "data": {"train": train, "valid": valid, "documents": "file"}}
    given, sources, n = for_trial(Settings.from_mapping(values | {"model": {"kind": "bert", "next_sentence": True}}))
    assert (len(sources.train), len(sources.valid), n) == (2, 2, 200)
    find_task("masked").form.read_texts(given, Log(quiet=True), sources)  # refuses fewer than two documents


def test_a_rare_label_outside_the_trial_is_known(tmp_path: Path) -> None:
    n = 3 * TRAINED
    rows = [f"{'rare' if i == n // 2 + 777 else 'ab'[i % 2]}\ttext number {i}" for i in range(n)]
    train = write(tmp_path / "train.tsv", rows)
    valid = write(tmp_path / "valid.tsv", ["a\tone", "rare\ttwo", "b\tthree"])
    asked = settings({"path": str(train)}, task="classification", valid=[{"path": str(valid)}])
    given, sources, n_rows = for_trial(asked)
    assert n_rows <= TRAINED and list(given.data.labels or ()) == ["a", "b", "rare"]
    find_task("classification").form.read_texts(given, Log(quiet=True), sources)


def test_trial_is_killed_after_its_time_limit(tmp_path: Path) -> None:
    assert measure(tmp_path, seconds=1.0, limit=0.05).died == TIMEOUT


def test_processes_share_a_batch() -> None:
    asked = Settings.from_mapping({"training": {"batch_tokens": 1000, "micro_batch_tokens": 600}})
    assert [tokens_at_once(asked, n) for n in (1, 2, 3)] == [600, 500, 334]


@pytest.mark.parametrize(
    ("content", "message"),
    [("<tmx><body>", "not valid TMX"), ("<tmx><body></body></tmx>", "there is no text")],
)
def test_a_file_without_text_is_the_only_obstacle(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.tmx").write_text(content)
    (only,) = diagnose(settings({"path": str(tmp_path / "a.tmx")}, tgt_lang="fr")).obstacles
    assert only.check == "readable" and message in only.text


def test_a_folder_instead_of_a_file_is_an_obstacle(tmp_path: Path) -> None:
    found = diagnose(settings({"src": str(tmp_path), "tgt": str(write(tmp_path / "a.de", ["one"]))}))
    assert ["is a folder" in one.text for one in found.obstacles] == [True]


def _settings(**training: object) -> Settings:
    given = {"batch_tokens": 4096, "micro_batch_tokens": 4096, "valid_updates": 50, **training}
    return Settings.from_mapping({"training": {"warmup_updates": 10, **given}, "tokenizer": {"vocab_size": 1000}})


def levels(found: Any) -> list[str]:
    return [one.level for one in found]


def _memory(trial: Trial, available: int) -> list[Finding]:
    return list(memory_findings(_settings(), trial, available))


def test_too_little_memory_is_an_obstacle_with_advice() -> None:
    assert _memory(Trial(base=GIB, peak=2 * GIB), 8 * GIB) == []
    assert levels(_memory(Trial(base=GIB, peak=7 * GIB), 8 * GIB)) == ["warning"]
    (one,) = _memory(Trial(base=GIB, peak=9 * GIB), 5 * GIB)
    tokens = int(one.advice.split("micro_batch_tokens = ")[1].split(" ")[0])
    assert one.level == "obstacle"
    assert GIB + tokens / 4096 * 8 * GIB == pytest.approx(4 * GIB, rel=0.05)  # 0.8 of what is free
    (one,) = _memory(Trial(base=8 * GIB, peak=9 * GIB), GIB)
    assert one.level == "obstacle" and "smaller model (model.preset = tiny)" in one.advice


def test_a_smaller_model_is_one_of_the_same_architecture() -> None:
    trial = Trial(base=8 * GIB, peak=9 * GIB)
    for model, advice in (
        ({"kind": "gpt", "preset": "gpt-small"}, "use a smaller model (model.preset = gpt-tiny) or shorter texts"),
        ({"kind": "gpt", "preset": "gpt-tiny"}, "use a smaller model or shorter texts"),
    ):
        chosen = _settings().model_copy(update={"model": model_settings(**model)})
        (one,) = memory_findings(chosen, trial, GIB)
        assert one.advice == advice


@pytest.mark.parametrize(
    ("coverage", "advice"), [(0.99, "character_coverage = 1"), (1.0, "train the vocabulary on text")]
)
def test_a_higher_coverage_is_advised_only_where_there_is_one(coverage: float, advice: str) -> None:
    vocabulary = mock.Mock(
        spec=Vocabulary,
        encode_batch=lambda texts: [[UNK]] * len(texts),
        unknown=list,
        unreadable_ids=frozenset({UNK}),
    )
    (one,) = _unknown("valid", ["é"], vocabulary, coverage=coverage)
    assert "é (U+00E9)" in one.text and advice in one.advice


@pytest.mark.parametrize(
    ("error", "died"),
    [
        (DoesNotFit(collate([Example([5], [6])])), FULL),
        (MemoryError(), FULL),
        (RuntimeError("could not create a primitive"), FULL),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes"), FULL),
        (ValueError("the wheel\nis off"), "the wheel is off"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_trial_reports_its_error(
    error: Exception, died: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("transduce.doctor.trial_updates.RunFolder.open", side_effect=error):
        rehearse(tmp_path, 1.0, 1)
    assert Trial(**json.loads(capsys.readouterr().out)) == Trial(died=died)


def test_the_largest_update_has_the_most_pairs_of_tokens() -> None:
    lengths = [3] * 40 + [9] * 6 + [30, 1]
    store = TokenStore.from_lists(*([[5] * n for n in lengths] for _ in range(2)))
    feeder = PairFeeder(store, TrainingSettings(batch_tokens=64), device=torch.device("cpu"))
    sizes = [len(batch.src) * batch.src.shape[1] ** 2 for batch in feeder.batches()]
    (batch,) = largest(feeder).batches
    assert len(batch.src) * batch.src.shape[1] ** 2 == max(sizes) > min(sizes) and 31 in batch.src.shape


def test_an_error_about_a_memory_is_not_a_lack_of_memory(tmp_path: Path) -> None:
    assert "there is no run folder" in measure(tmp_path / "memory", seconds=1.0).died


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (-6, b"terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"),
        (1, b"ImportError: libtorch_cpu.so: failed to map segment from shared object"),
        (-9, b""),
    ],
)
def test_a_trial_without_memory_is_an_obstacle(code: int, err: bytes) -> None:
    assert why_it_crashed(code, err) == FULL
    for trial in (Trial(died=FULL), Trial(base=GIB // 2, peak=GIB, died=FULL)):
        (one,) = _memory(trial, 8 * GIB)
        assert one.level == "obstacle" and "memory" in one.text and "training.micro_batch_tokens = 2048" in one.advice


def test_another_failure_of_a_trial_is_a_warning() -> None:
    (one,) = _memory(Trial(died="the wheel is off"), GIB)
    assert one.level == "warning" and one.text.endswith("too early: the wheel is off")


@pytest.mark.parametrize(
    "limits, by, updates",
    [({"max_updates": 70}, "max_updates", 70), ({"max_epochs": 2}, "max_epochs", 2000), ({"max_minutes": 1}, "", 30)],
)
def test_time(limits: dict[str, float], by: str, updates: int) -> None:
    found = time_of(_settings(**limits), 1000.0, 2.0)
    assert (found.updates, found.by, found.seconds) == (updates, by or "max_minutes", 2.0 * updates)
    assert found.epochs == updates / 1000


def test_too_much_or_too_little_time_is_a_warning() -> None:
    def found(**limits: float) -> list[str]:
        asked = _settings(**limits)
        return levels(time_findings(asked, time_of(asked, 1000.0, 2.0)))

    assert found(max_epochs=1.0) == []
    assert found(max_updates=10**7) == ["warning"]
    assert found(max_minutes=10.0) == ["warning"]
    assert found(max_updates=12, max_epochs=1.0) == ["warning"]  # mostly warmup


MACHINE = Machine("cpu", "laptop", 2, 8 << 30, precision="float32")


@pytest.mark.parametrize(
    ("machine", "precision", "warning"),
    [
        (MACHINE, "float32", ""),
        (replace(MACHINE, memory=1 << 20), "float32", "1 MiB are free; set training.micro_batch_tokens"),
        (MACHINE, "bfloat16", "set training.precision=float32"),
        (replace(MACHINE, precision="bfloat16"), "bfloat16", ""),
    ],
    ids=["enough", "too little memory", "emulated", "bfloat16"],
)
def test_warnings(machine: Machine, precision: str, warning: str, tmp_path: Path) -> None:
    settings, stream = toys.settings(precision=precision), io.StringIO()
    warn_of_resources(settings, build_model(settings.model, n_src=24, n_tgt=24), tmp_path, machine, Log(stream=stream))
    assert warning in stream.getvalue() and bool(warning) == bool(stream.getvalue())
