"""Every check finds its problem in a corpus that has it, and no serious one in a good corpus."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from transduce.doctor.checks import CHECKS, run_checks
from transduce.doctor.sampling import Sample, take_sample
from unit.doctor.corpora import Pairs, check, corpus, good, sample, serious, settings, write

Make = Callable[[Pairs], Pairs]


def _shifted(at: int, by: int) -> Make:
    """From pair `at` on, a target is missing (`by` > 0: sources are)."""
    src, tgt = (lambda p: [s for s, _ in p]), (lambda p: [t for _, t in p])

    def make(pairs: Pairs) -> Pairs:
        s, t = src(pairs), tgt(pairs)
        del (s if by > 0 else t)[at : at + abs(by)]
        return list(zip(s, t, strict=False))

    return make


@pytest.mark.parametrize("at, by", [(0, 1), (0, -3), (700, 1), (1501, -1), (2400, 2)])
def test_shifts_are_found_with_their_line(tmp_path: Path, at: int, by: int) -> None:
    found = check("alignment", sample(tmp_path, _shifted(at, by)(good(3000))))
    (one,) = found
    assert (one.level, one.figures["shift"]) == ("obstacle", by)
    if not at:
        assert "from the beginning" in one.text
        return
    line = int(one.text.split("about line ")[1].split(" ")[0].replace(",", ""))
    assert abs(line - at) <= 10


def test_the_line_of_a_shift_in_a_large_corpus_is_searched(tmp_path: Path) -> None:
    pairs = good(20_000)
    pairs = pairs * (-(-60_000 // len(pairs)))
    part = take_sample(settings(corpus(tmp_path, _shifted(33_333, -1)(pairs))), most_blocks=4)
    (one,) = check("alignment", part)
    assert one.level == "obstacle" and not part.whole
    assert abs(int(one.text.split("about line ")[1].split(" ")[0].replace(",", "")) - 33_333) <= 10


def test_a_shuffled_side_is_a_warning(tmp_path: Path) -> None:
    pairs = good(1000)
    targets = [t for _, t in pairs]
    random.Random(3).shuffle(targets)
    found = check("alignment", sample(tmp_path, [(s, t) for (s, _), t in zip(pairs, targets, strict=True)]))
    assert [level for level, _ in serious(found)] == ["warning"]
    assert "misaligned" in found[0].text


FAULTS: dict[str, tuple[str, Make, str, str]] = {
    "swapped": ("languages", lambda p: [(t, s) for s, t in p], "obstacle", "swapped"),
    "other script": ("languages", lambda p: [(s, "Собака бежит по снегу") for s, _ in p], "warning", "should be de"),
    "untranslated": (
        "languages",
        lambda p: p[100:] + [(s, s[::-1] + " " + s) for s, _ in p[:100]],
        "warning",
        "untranslated",
    ),
    "the same": ("copies", lambda p: [(s, s) for s, _ in p], "obstacle", "have the same text on both"),
    "copies": ("copies", lambda p: p + [(s, s.upper()) for s, _ in p[:60]], "warning", "have the same text on both"),
    "one side empty": ("empty", lambda p: p + [(s, "") for s, _ in p[:100]], "warning", "have an empty side"),
    "all empty": ("empty", lambda p: [("", t) for _, t in p], "obstacle", "every pair has an empty side"),
    "far ratios": ("ratios", lambda p: p + [(s, t * 6) for s, t in p[:60]], "warning", "factor of 3"),
    "lost characters": ("characters", lambda p: [*p, ("a \ufffd dog", "ein Hund")], "warning", "U+FFFD"),
    "mojibake": (
        "characters",
        lambda p: p + [(s, "schöne Straße für alle".encode().decode("cp1252")) for s, _ in p[:9]],
        "warning",
        "read as Latin-1",
    ),
    "controls": ("characters", lambda p: p + [(s + "\x07", t) for s, t in p[:40]], "warning", "control characters"),
    "markup": ("characters", lambda p: p + [(f"<b>{s}</b>", t) for s, t in p[:40]], "warning", "HTML"),
    "duplicates": ("duplicates", lambda p: p + p[:200], "warning", "of the pairs are duplicates"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_pairs_are_found(tmp_path: Path, name: str) -> None:
    which, make, level, text = FAULTS[name]
    found = serious(check(which, sample(tmp_path, make(good()))))
    assert [one for one in found if one[0] == level and text in one[1]], found


def test_a_good_corpus_has_no_warnings(tmp_path: Path) -> None:
    valid = corpus(tmp_path, good(100, split="held_out_combinations"), "valid")
    found = run_checks(sample(tmp_path, good(3000), valid=[valid]))
    assert serious(found) == []
    assert {one.check for one in found} >= {"alignment", "languages"}


def test_files_with_different_numbers_of_lines(tmp_path: Path) -> None:
    files = corpus(tmp_path, good(500))
    with open(files["src"], "a", encoding="utf-8") as file:
        file.write("one more\n")
    ((level, text),) = serious(check("lines", take_sample(settings(files))))
    n = len(good(500))
    assert level == "obstacle" and f"has {n + 1:,} lines" in text and f"has {n:,}" in text


def test_unreadable_lines_are_obstacles(tmp_path: Path) -> None:
    files = corpus(tmp_path, good(50))
    with open(files["tgt"], "ab") as file:
        file.write(b"gr\xfc\xdfe\n")
    with open(files["src"], "ab") as file:
        file.write(b"greetings\n")
    ((level, text),) = serious(check("readable", take_sample(settings(files))))
    assert level == "obstacle" and f"{files['tgt']}, line {len(good(50)) + 1}: not valid UTF-8" in text


def test_markup_is_searched_in_each_side_alone(tmp_path: Path) -> None:
    pairs = good(300)
    assert serious(check("characters", sample(tmp_path, [(f"{s} <b", f"{t} c>") for s, t in pairs]))) == []
    ((level, text),) = serious(check("characters", sample(tmp_path, [(f"{s} &amp;", f"&amp; {t}") for s, t in pairs])))
    assert level == "warning" and text.startswith("100 % of the lines") and "\\n" not in text


def test_leaks_are_counted(tmp_path: Path) -> None:
    pairs = good(1000)
    valid = corpus(tmp_path, [(s.upper(), t) for s, t in pairs[:30]] + good(80, split="valid")[:20], "valid")
    found = check("leaks", sample(tmp_path, pairs, valid=[valid]))
    ((level, text),) = serious(found)
    assert level == "warning" and "also in the training text" in text
    assert 30 <= found[0].figures["seen"] <= 50


def test_leaks_of_a_part_are_extrapolated(tmp_path: Path) -> None:
    """Half of a held-out set is in the training text, of which a quarter is sampled."""
    train = [(f"source {i} of many", f"target {i} of many") for i in range(40_000)]
    held = train[:40_000:200] + [(f"other {i}", f"other {i}") for i in range(200)]
    files, valid = corpus(tmp_path, train), corpus(tmp_path, held, "valid")
    whole = take_sample(settings(files, valid=[valid]))
    part = Sample(whole.form, whole.settings, (_thinned(whole.parts[0]),), whole.held)
    (one,) = check("leaks", part)
    assert "extrapolated" in one.text and one.figures["share"] == pytest.approx(0.5, abs=0.12)


def test_duplicates_of_a_part_are_extrapolated(tmp_path: Path) -> None:
    """Every pair occurs twice, far apart, so that a quarter of the blocks contains few duplicates."""
    train = [(f"source {i * 7919 % 20_000}", f"target {i * 7919 % 20_000}") for i in range(40_000)]
    order = list(range(40_000))
    random.Random(1).shuffle(order)
    whole = take_sample(settings(corpus(tmp_path, [train[i] for i in order])))
    part = Sample(whole.form, whole.settings, (_thinned(whole.parts[0]),), ())
    (one,) = check("duplicates", part)
    assert one.level == "warning" and one.figures["share"] == pytest.approx(0.5, abs=0.1)
    assert one.figures["seen"] < 0.2 * one.figures["looked_at"]


def _thinned(part):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(part, blocks=part.blocks[::4])


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
    found = serious(check("labels", take_sample(settings({"path": str(path)}, task="classification"))))
    assert (found == []) if not level else any(one[0] == level and text in one[1] for one in found), found


@pytest.mark.parametrize("blank, reported", [(True, True), (False, False)])
def test_blank_lines_that_may_end_documents(tmp_path: Path, blank: bool, reported: bool) -> None:
    lines = ["" if blank and not i % 10 else f"a line of text, number {i}" for i in range(300)]
    path = write(tmp_path / "a.txt", lines)
    assert bool(check("documents", take_sample(settings({"path": str(path)}, task="causal")))) is reported


def test_every_check_is_tested() -> None:
    tested = {"readable", "lines", "alignment", "leaks", "labels", "documents"} | {
        which for which, *_ in FAULTS.values()
    }
    assert {one.name for one in CHECKS} == tested


def test_an_empty_side_is_reported_once(tmp_path: Path) -> None:
    src, tgt = write(tmp_path / "a.en", [src for src, _ in good(300)]), write(tmp_path / "a.de", [])
    tgt.write_bytes(b"")
    found = [
        one for one in run_checks(take_sample(settings({"src": str(src), "tgt": str(tgt)}))) if one.level != "note"
    ]
    assert [one.level for one in found] == ["obstacle"] and f"{src} has 300 lines, {tgt} has 0" in found[0].text
