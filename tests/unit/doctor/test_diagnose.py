"""Checks of the text before training; memory, time and advice from a trial."""

import io
import json
import random
import re
from collections.abc import Callable
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
from transduce.doctor.checks import CHECKS, Finding, find_shift, run_checks
from transduce.doctor.diagnose import TRAINED, _for_trial, _unknown, diagnose, memory_findings, time_findings, time_of
from transduce.doctor.resources import (
    FULL,
    TIMEOUT,
    Trial,
    largest,
    measure,
    rehearse,
    tokens_at_once,
    warn_of_resources,
    why_it_crashed,
)
from transduce.logging import Log
from transduce.machine import Machine
from transduce.models.registry import build_model
from transduce.tasks.resolve import find_task
from transduce.text.special import UNK, Vocabulary
from transduce.training.feed import PairFeeder
from transduce.training.step import DoesNotFit
from unit.doctor.corpora import Pairs, check, check_pairs, corpus, good, sample_of, serious, settings, write

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
    with mock.patch("transduce.doctor.resources.RunFolder.open", side_effect=error):
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


Make = Callable[[Pairs], Pairs]


def _shifted(at: int, by: int) -> Make:
    """From pair `at` on, a target is missing (`by` > 0: sources are)."""

    def make(pairs: Pairs) -> Pairs:
        src, tgt = [s for s, _ in pairs], [t for _, t in pairs]
        del (src if by > 0 else tgt)[at : at + abs(by)]
        return list(zip(src, tgt, strict=False))

    return make


@pytest.mark.parametrize("shift", [-20, -4, -1, 1, 7, 20])
def test_shift_of_a_window(shift: int) -> None:
    pairs = good(240)[:200]
    found = find_shift([(pairs[i][0], pairs[(i - shift) % 200][1]) for i in range(200)])
    assert (found.shift, found.is_sure) == (shift, True)


def test_aligned_short_and_sorted_windows_have_no_shift() -> None:
    assert find_shift(good(240)[:200]).shift == 0
    assert not find_shift(good(240)[1:50]).is_sure
    assert not find_shift([("same", "same")] * 200).is_sure
    pairs = sorted(good(800), key=lambda pair: len(pair[0]))  # neighbours fit as well as the right lines
    assert not any(find_shift(pairs[i : i + 200]).is_sure for i in range(0, 800, 100) if len(pairs[i : i + 200]) > 60)


@pytest.mark.parametrize("at, by", [(0, 1), (0, -3), (700, 1), (1501, -1), (2400, 2)])
def test_shifts_are_found_between_two_lines(tmp_path: Path, at: int, by: int) -> None:
    (one,) = check_pairs("alignment", tmp_path, _shifted(at, by)(good(3000)))
    assert (one.level, one.figures["shift"]) == ("obstacle", by)
    if at:
        found = re.search(r"between lines ([\d,]+) and ([\d,]+) on", one.text)
        assert found is not None
        low, high = (int(n.replace(",", "")) for n in found.groups())
        assert low - 10 <= at <= high + 10 and high - low <= 400
    else:
        assert "from the beginning" in one.text


def test_a_shuffled_side_is_a_warning(tmp_path: Path) -> None:
    pairs = good(1000)
    targets = [t for _, t in pairs]
    random.Random(3).shuffle(targets)
    found = check_pairs("alignment", tmp_path, [(s, t) for (s, _), t in zip(pairs, targets, strict=True)])
    assert [level for level, _ in serious(found)] == ["warning"] and "misaligned" in found[0].text


FAULTS: dict[str, tuple[str, Make, str, str]] = {
    "swapped": ("languages", lambda p: [(t, s) for s, t in p], "obstacle", "swapped"),
    "one language": ("languages", lambda p: [(t, t) for s, t in p], "warning", "both sides look like de"),
    "the same": ("copies", lambda p: [(s, s) for s, _ in p], "obstacle", "have the same text on both"),
    "copies": ("copies", lambda p: p + [(s, s.upper()) for s, _ in p[:60]], "warning", "have the same text on both"),
    "one side empty": ("empty", lambda p: p + [(s, "") for s, _ in p[:100]], "warning", "have an empty side"),
    "all empty": ("empty", lambda p: [("", t) for _, t in p], "obstacle", "every pair has an empty side"),
    "lost characters": ("characters", lambda p: [*p, ("a \ufffd dog", "ein Hund")], "warning", "U+FFFD"),
    "mojibake": (
        "characters",
        lambda p: p + [(s, "schöne Straße für alle".encode().decode("cp1252")) for s, _ in p[:9]],
        "warning",
        "read as Latin-1",
    ),
    "controls": ("characters", lambda p: p + [(s + "\x07", t) for s, t in p[:40]], "warning", "control characters"),
    "markup": ("characters", lambda p: p + [(f"<b>{s}</b>", t) for s, t in p[:40]], "warning", "HTML"),
    "duplicates": ("duplicates", lambda p: p + p[:200], "warning", "duplicates"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_pairs_are_found(tmp_path: Path, name: str) -> None:
    which, make, level, text = FAULTS[name]
    found = serious(check_pairs(which, tmp_path, make(good())))
    assert [one for one in found if one[0] == level and text in one[1]], found


def test_a_good_corpus_has_no_warnings(tmp_path: Path) -> None:
    valid = corpus(tmp_path, good(100, split="held_out_combinations"), "valid")
    asked = settings(corpus(tmp_path, good(3000)), valid=[valid])
    sample = sample_of(asked)
    assert serious(run_checks(sample, asked.data, "pairs")) == []


def test_files_with_different_numbers_of_lines_are_refused_and_their_shift_is_found(tmp_path: Path) -> None:
    asked = settings(corpus(tmp_path, good(900)))
    lines = (tmp_path / "train.de").read_text().splitlines()
    write(tmp_path / "train.de", lines[1:])
    sample = sample_of(asked)
    found = run_checks(sample, asked.data, "pairs")
    ((level, text),) = serious([one for one in found if one.check == "readable"])
    assert level == "obstacle" and f"has {len(lines)} lines" in text and f"has {len(lines) - 1}" in text
    assert [one.figures["shift"] for one in found if one.check == "alignment"] == [-1]


def test_unreadable_and_empty_files_are_obstacles(tmp_path: Path) -> None:
    files = corpus(tmp_path, good(50))
    for side, line in (("tgt", b"gr\xfc\xdfe\n"), ("src", b"greetings\n")):
        with open(files[side], "ab") as file:
            file.write(line)
    ((level, text),) = serious(check("readable", settings(files)))
    assert level == "obstacle" and f"{files['tgt']}, line {len(good(50)) + 1}: not valid UTF-8" in text
    empty = write(tmp_path / "empty.txt", [])
    ((level, text),) = serious(check("readable", settings({"path": str(empty)}, task="causal")))
    assert (level, text) == ("obstacle", "there is no text")


def test_markup_is_searched_in_each_side_alone(tmp_path: Path) -> None:
    pairs = good(300)
    assert serious(check_pairs("characters", tmp_path, [(f"{s} <b", f"{t} c>") for s, t in pairs])) == []
    ((level, text),) = serious(check_pairs("characters", tmp_path, [(f"{s} &amp;", f"&amp; {t}") for s, t in pairs]))
    assert level == "warning" and text.startswith("100 % of the lines") and "\\n" not in text


def test_leaks_are_counted(tmp_path: Path) -> None:
    pairs = good(1000)
    valid = corpus(tmp_path, [(s.upper(), t) for s, t in pairs[:30]] + good(80, split="valid")[:20], "valid")
    found = check_pairs("leaks", tmp_path, pairs, valid=[valid])
    ((level, text),) = serious(found)
    assert level == "warning" and "also occur in the training text" in text and "compared)" not in text
    assert 30 <= found[0].figures["found"] <= 50


LABELS: dict[str, tuple[list[str], str, str]] = {
    "one label": (["good\tfine film"] * 30, "obstacle", "one label only"),
    "columns turned": ([f"film number {i}\tgood" for i in range(30)], "warning", "30 labels in 30"),
    "several labels": (
        [f"{'ab'[i % 2]}\ttext {i // 2 if i < 20 else i}" for i in range(100)],
        "warning",
        "several labels",
    ),
    "a rare label": ([f"{'ab'[i % 2]}\ttext {i}" for i in range(100)] + ["c\tother"], "warning", "fewer than 5"),
    "nothing": ([f"{'ab'[i % 2]}\ttext {i}" for i in range(100)], "", ""),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(tmp_path: Path, name: str) -> None:
    lines, level, text = LABELS[name]
    path = write(tmp_path / "a.tsv", lines)
    found = serious(check("labels", settings({"path": str(path)}, task="classification")))
    assert (found == []) if not level else any(one[0] == level and text in one[1] for one in found), found


@pytest.mark.parametrize("blank", [True, False])
def test_blank_lines_that_may_end_documents(tmp_path: Path, blank: bool) -> None:
    lines = ["" if blank and not i % 10 else f"a line of text, number {i}" for i in range(300)]
    path = write(tmp_path / "a.txt", lines)
    assert bool(check("documents", settings({"path": str(path)}, task="causal"))) is blank


def test_pairs_that_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in good(300)) + "one\n" * 30, encoding="utf-8")
    (one,) = check("unreadable", settings({"path": str(path)}, on_error="skip"))
    assert one.level == "warning" and f"no tab; first: {path}:301" in one.text and one.figures["share"] == 0.09091
    assert not check("empty", settings({"path": str(path)}, on_error="skip"))
    assert not check("duplicates", settings({"path": str(path)}, on_error="skip"))


def test_every_check_is_tested() -> None:
    tested = {"readable", "unreadable", "alignment", "leaks", "labels", "documents"} | {
        which for which, *_ in FAULTS.values()
    }
    assert {one.name for one in CHECKS} == tested
