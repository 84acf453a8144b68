"""Every check finds its problem in a corpus that has it, and no serious one in a good corpus."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from transduce.doctor.checks import CHECKS, find_shift, run_checks
from unit.doctor.corpora import Pairs, check, check_pairs, corpus, good, sample_of, serious, settings, write

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
