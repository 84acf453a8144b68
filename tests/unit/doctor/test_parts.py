"""Pure functions: shifts, languages, extrapolated memory, time, disk space, advice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from transduce.config import Settings
from transduce.doctor.alignment import fit, turning_point
from transduce.doctor.estimates import (
    Disk,
    Point,
    Speed,
    Trial,
    disk_findings,
    estimate_disk,
    estimate_time,
    extrapolate,
    fitting_tokens,
    memory_findings,
    speed_of,
    time_findings,
)
from transduce.doctor.findings import Finding
from transduce.doctor.languages import is_clearly, language, looks_like, main_script, script, scripts
from transduce.doctor.lengths import EDGES, Lengths, histogram
from transduce.doctor.trial import why_it_died
from unit.doctor.corpora import good

GIB = 1 << 30


@pytest.mark.parametrize("shift", [-20, -4, -1, 1, 7, 20])
def test_shift_of_a_window(shift: int) -> None:
    pairs = good(240)[:200]
    rows = [(pairs[i][0], pairs[(i - shift) % 200][1]) for i in range(200)]
    found = fit(rows)
    assert (found.shift, found.sure) == (shift, True)


def test_aligned_and_short_windows_have_no_shift() -> None:
    assert fit(good(240)[:200]).shift == 0
    assert not fit(good(240)[1:50]).sure
    assert not fit([("same", "same")] * 200).sure


def test_a_sorted_corpus_has_no_shift() -> None:
    """Sorted by length, neighbours fit as well as the right lines."""
    rows = sorted(good(800), key=lambda pair: len(pair[0]))
    assert not any(fit(rows[i : i + 200]).sure for i in range(0, 800, 100) if len(rows[i : i + 200]) > 60)


@pytest.mark.parametrize("at", [20, 100, 170])
def test_the_turning_point(at: int) -> None:
    pairs = good(260)[:221]
    src, tgt = [s for s, _ in pairs], [t for _, t in pairs]
    rows = list(zip(src[:220], tgt[:at] + tgt[at + 1 :], strict=True))
    assert abs(turning_point(rows, -1) - at) <= 8


def test_scripts_and_languages() -> None:
    assert [script(c) for c in "aжαあ漢한שع1 "] == [
        *("Latin", "Cyrillic", "Greek", "Kana", "Han", "Hangul", "Hebrew", "Arabic", "", "")
    ]
    assert scripts(["abc", "жж", "1"]) == {"Latin": 0.6, "Cyrillic": 0.4}
    assert main_script("漢字 and かな漢字かな") == "Han" or main_script("かなかな a") == "Kana"
    assert [language(code) for code in ("eng", "en-US", "DE_at", "tok")] == ["en", "en", "de", "tok"]
    english, german = ([pair[side] for pair in good(300)] for side in (0, 1))
    assert (looks_like(english), looks_like(german), looks_like(["xyzzy"] * 300)) == ("en", "de", "")
    assert is_clearly("the dog is at home", "en", "de") and not is_clearly("der Hund ist the", "en", "de")


def test_memory_is_extrapolated_linearly() -> None:
    points = [Point(share, round(4000 * share), GIB + round(GIB * share), 1.0) for share in (0.0625, 0.125, 0.25)]
    memory = extrapolate(points)
    assert memory is not None and not memory.measured
    assert memory.worst == pytest.approx(2 * GIB) and memory.base == pytest.approx(GIB)
    assert memory.bytes_per_micro_batch == pytest.approx(GIB)
    assert extrapolate([]) is None


def test_a_whole_batch_is_measured_even_if_its_rows_were_rounded() -> None:
    """A small share may have more positions than tokens: one row of the greatest length."""
    points = [Point(0.1, 500, 500, 1.0), Point(1.0, 3500, 800, 1.0)]
    memory = extrapolate(points)
    assert memory is not None and memory.measured and memory.worst == 800
    assert memory.base == 450


def _trial(worst: int, *, died: str = "") -> Trial:
    points = (Point(0.5, 500, worst * 5 // 8, 1.0), Point(1.0, 1000, worst, 1.0))  # a quarter without a batch
    return Trial(parameters=10, points=points, speed=Speed(3, 1.0, 500.0, 2.0, 100), died=died)


def _settings(**training: object) -> Settings:
    given = {"batch_tokens": 4096, "micro_batch_tokens": 4096, "valid_updates": 50, **training}
    return Settings.from_mapping({"training": {"warmup_updates": 10, **given}, "tokenizer": {"vocab_size": 1000}})


def levels(found: list[Finding]) -> list[str]:
    return [one.level for one in found]


def test_too_little_memory_is_an_obstacle_with_advice() -> None:
    settings = _settings()
    assert memory_findings(settings, _trial(2 * GIB), 8 * GIB) == []
    (near,) = memory_findings(settings, _trial(7 * GIB), 8 * GIB)
    assert near.level == "warning"
    (one,) = memory_findings(settings, _trial(8 * GIB), 15 * GIB // 2)
    assert one.level == "obstacle" and "--set training.micro_batch_tokens=" in one.advice
    tokens = int(one.advice.split("micro_batch_tokens=")[1].split(" ")[0])
    assert tokens == fitting_tokens(settings, _trial(8 * GIB), 15 * GIB // 2)
    assert 2 * GIB + tokens / 4096 * 6 * GIB == pytest.approx(6 * GIB, rel=0.05)  # 0.8 of what is free


def test_a_model_that_does_not_fit_at_all_is_an_obstacle() -> None:
    (one,) = memory_findings(_settings(), _trial(8 * GIB), GIB)
    assert one.level == "obstacle" and "smaller model" in one.advice
    (died,) = memory_findings(_settings(), Trial(died="out of memory"), GIB)
    assert died.level == "obstacle"


@pytest.mark.parametrize(
    ("code", "err"),
    [
        (1, "transduce.training.step.DoesNotFit: of 771 slots"),
        (1, "Traceback\nMemoryError"),
        (1, "RuntimeError: could not create a primitive"),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 bytes"),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc"),
        (-9, ""),
    ],
)
def test_a_trial_without_memory_is_an_obstacle(code: int, err: str) -> None:
    for trial in (Trial(died=why_it_died(code, err)), _trial(GIB, died=why_it_died(code, err))):
        (one,) = memory_findings(_settings(), trial, 8 * GIB)
        assert one.level == "obstacle" and "memory" in one.text and "--set" in one.advice
        assert "DoesNotFit" not in one.line


def test_another_failure_of_a_trial_is_a_warning_without_class_names() -> None:
    (one,) = memory_findings(_settings(), Trial(died=why_it_died(1, "a.b.OddError: the wheel is off")), GIB)
    assert one.level == "warning" and one.text.endswith("too early: the wheel is off")


def test_advice_after_out_of_memory_is_less_than_what_fitted() -> None:
    (one,) = memory_findings(_settings(), _trial(2 * GIB, died="out of memory"), 8 * GIB)
    assert one.level == "obstacle"
    assert int(one.advice.split("micro_batch_tokens=")[1].split(" ")[0]) <= 4096


def test_peak_of_real_updates_counts() -> None:
    trial = replace(_trial(2 * GIB), speed=Speed(30, 1.0, 500.0, 2.0, 100, peak=9 * GIB))
    (one,) = memory_findings(_settings(), trial, 8 * GIB)
    assert one.level == "obstacle" and "9.0 GiB of the 8.0 GiB free" in one.text
    assert int(one.advice.split("micro_batch_tokens=")[1].split(" ")[0]) < 4096


def test_disk(tmp_path: Path) -> None:
    trial = Trial(checkpoint_bytes=1000, weight_bytes=100)
    few = estimate_disk(_settings(keep_checkpoints=1), trial, tmp_path / "not" / "there", n_tokens=0, n_rows=0)
    more = estimate_disk(_settings(keep_checkpoints=5), trial, tmp_path, n_tokens=1000, n_rows=10)
    assert more.needed - few.needed == 4 * 1000 + 2 * 1000 + 160
    assert few.free > 0 and disk_findings(few) == []
    assert levels(disk_findings(Disk(1, 10, 9, "x"))) == ["obstacle"]
    snapshots = estimate_disk(_settings(average="best", average_n=7), trial, tmp_path, n_tokens=0, n_rows=0)
    assert snapshots.needed > estimate_disk(_settings(), trial, tmp_path, n_tokens=0, n_rows=0).needed


@pytest.mark.parametrize(
    "limits, by, updates",
    [({"max_updates": 70}, "max_updates", 70), ({"max_epochs": 2}, "max_epochs", 2000), ({"max_minutes": 1}, "", 30)],
)
def test_time(limits: dict[str, float], by: str, updates: int) -> None:
    """A tenth of the text was tried: 100 batches of 2 seconds."""
    settings = _settings(**limits)
    time = estimate_time(settings, _trial(GIB), scale=10.0, sampled=(100, 100), preparing=5.0)
    assert time is not None
    assert (time.updates, time.by, time.updates_per_epoch) == (updates, by or "max_minutes", 1000.0)
    assert time.updating == 2.0 * updates and time.epoch == 2000.0


def test_too_much_or_too_little_time_is_a_warning() -> None:
    def findings(**limits: float) -> list[str]:
        settings = _settings(**limits)
        return levels(
            time_findings(settings, estimate_time(settings, _trial(GIB), scale=10.0, sampled=(1, 1), preparing=0.0))
        )

    assert findings(max_epochs=1.0) == []
    assert findings(max_updates=10**7) == ["warning"]
    assert findings(max_minutes=10.0) == ["warning"]


def test_fixed_cost_of_smaller_updates_is_counted_once() -> None:
    points = [Point(0.5, 10, 100, 1.5), Point(1.0, 20, 120, 2.5)]
    speed = speed_of(points, share=0.5, updates=4, targets=10, seconds=2.0, batches=9, peak=0)
    assert speed.seconds_per_update == pytest.approx(0.5 + (2.0 - 0.5) / 0.5)
    assert speed.targets_per_second == pytest.approx(20 / 3.5)


def test_histogram() -> None:
    counts = [0] * (len(EDGES) + 1)
    counts[1], counts[2], counts[-1] = 30, 60, 10
    lines = histogram([Lengths("source", tuple(counts), 9.0, 8, 2000)])
    assert len(lines) == 1 + len(EDGES)
    assert [line.rsplit(" ", 1)[1] for line in lines[1:3]] == ["30%", "60%"] and lines[-1].endswith("10%")
    assert "5 - 8" in lines[1] and "1025 +" in lines[-1]
