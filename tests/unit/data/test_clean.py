"""Cleaning: each rule, the report, and the search for held-out text in the training text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transduce.config import DataSettings
from transduce.data.clean import Cleaner, CleanReport, choose_held_out, clean, comparable, leaks, told
from transduce.data.corpus import Pair
from transduce.errors import DataError


def pairs_of(*sides: tuple[str, str]) -> list[Pair]:
    return [Pair(src, tgt, ("a.tsv", n)) for n, (src, tgt) in enumerate(sides, 1)]


def cleaned(pairs: list[Pair], **values: object) -> tuple[list[tuple[str, str]], CleanReport]:
    kept, report = clean(pairs, DataSettings(**values))
    return [(pair.src, pair.tgt) for pair in kept], report


PAIRS = pairs_of(("a", "b"), ("", "b"), ("a", " \t\u2028"), ("a", "b"), ("Same", " same"), ("a\x00b\x0cc", "d\x1b"))


def test_empty_sides_go_and_control_characters_are_removed() -> None:
    kept, report = cleaned(PAIRS)
    assert kept == [("a", "b"), ("a", "b"), ("Same", " same"), ("ab c", "d")]
    assert (report.read, report.kept) == (6, 4)
    lines = told(report.to_json())
    assert lines[0] == "cleaning: 6 pairs read, 4 kept"
    assert [line.split(", as ")[0] for line in lines[1:]] == [
        "  dropped 2, empty",
        "  changed 1, control characters removed",
    ]
    assert told(CleanReport(read=3).to_json()) == ["cleaning: 3 pairs read, 3 kept; nothing dropped"]
    assert report.to_json()["dropped"] == [
        {
            "reason": "empty",
            "count": 2,
            "samples": [
                {"src": "", "tgt": "b", "place": "a.tsv:2"},
                {"src": "a", "tgt": " \t\u2028", "place": "a.tsv:3"},
            ],
        }
    ]
    json.dumps(report.to_json(), allow_nan=False)


def test_copies_and_duplicates_go_when_asked() -> None:
    kept, report = cleaned(PAIRS, deduplicate=True, drop_copies=True)
    assert kept == [("a", "b"), ("ab c", "d")]
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {"empty": 2, "duplicate": 1, "copy": 1}


def test_duplicates_are_remembered_across_streams() -> None:
    cleaner = Cleaner(DataSettings(deduplicate=True))
    pairs = pairs_of(("a", "b"), ("a\nb", "c"), ("a", "b\nc"))
    assert [len(list(cleaner.texts(pairs))) for _ in range(2)] == [3, 0]
    assert cleaner.report.dropped["duplicate"].count == 3


def test_a_report_keeps_five_short_samples() -> None:
    _, report = cleaned(pairs_of(*[("", "x" * 1000)] * 20))
    tally = report.dropped["empty"]
    assert tally.count == 20 and len(tally.samples) == 5
    assert tally.samples[0]["tgt"] == "x" * 199 + "…"


def test_cleaning_streams() -> None:
    kept, report = clean(iter(PAIRS), DataSettings())
    next(kept)
    assert report.read == 1


@pytest.mark.parametrize(
    ("n_src", "n_tgt", "reason"),
    [
        (1, 10, None),
        (2, 19, "ratio of lengths"),
        (2, 18, None),
        (11, 1, "ratio of lengths"),
        (50, 50, None),
        (50, 51, "too long"),
        (51, 1, "too long"),
        (0, 3, "empty"),
        (3, 0, "empty"),
    ],
)
def test_lengths(n_src: int, n_tgt: int, reason: str | None) -> None:
    cleaner = Cleaner(DataSettings(max_length=50, max_ratio=9.0))
    assert cleaner.lengths_fit(PAIRS[0], n_src, n_tgt) == (reason is None)
    assert list(cleaner.report.dropped) == ([reason] if reason else [])


def test_nothing_left_says_why() -> None:
    settings_ = DataSettings(max_length=3)
    cleaner = Cleaner(settings_)
    for pair in cleaner.texts(pairs_of(("a", "b"), ("c", "d"), ("", "e"))):
        cleaner.lengths_fit(pair, 4, 4)
    with pytest.raises(DataError) as caught:
        cleaner.report.require_pairs(settings_, "training text")
    assert str(caught.value) == (
        "training text: no sentence pair is left of 3: 2 too long, 1 empty; "
        "raise data.max_length (3 tokens) or cut the text into sentences"
    )
    with pytest.raises(DataError, match="valid: there is no text, not one sentence pair"):
        CleanReport().require_pairs(settings_, "valid")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5))))
def test_every_pair_is_kept_or_counted(sides: list[tuple[str, str]]) -> None:
    kept, report = cleaned(pairs_of(*sides), deduplicate=True, drop_copies=True)
    assert report.read == len(sides) == len(kept) + sum(tally.count for tally in report.dropped.values())
    assert all(src.strip() and tgt.strip() for src, tgt in kept)
    assert len(set(kept)) == len(kept)


def test_leaks_are_found_whatever_their_case_and_spaces() -> None:
    train = pairs_of(("The  Dog", "der Hund"), ("x", "y"), ("a cat", "eine Katze"), ("x", "y"), ("x", "Y "), ("", ""))
    test = pairs_of(("the dog ", "Der Hund"), ("A Cat", "die Katze"), ("x", "y"), ("new", "neu"), ("x", "y"), ("", ""))
    report = leaks(train, test)
    assert (report.pairs, report.leaked, report.sources) == (6, 3, 4)
    assert report.samples[0] == {"src": "the dog ", "tgt": "Der Hund", "place": "a.tsv:1", "train": "a.tsv:1"}
    assert [sample["src"] for sample in report.samples] == ["the dog ", "x", "x", "A Cat"]
    assert report.warning("test") == (
        "test: 3 of 6 pairs stand in the training text too, and 1 more source with another translation; "
        "scores on it flatter. First: a.tsv:1 = a.tsv:1"
    )
    assert report.to_json("test")["leaked"] == 3
    other, same = leaks(train, test[1:2] + test[3:4]).warning("test"), leaks(train, test[:1]).warning("test")
    assert other.startswith(
        "test: 1 of 2 sources stands in the training text too, with another translation; scores on it flatter. "
    )
    assert same.startswith("test: 1 of 1 pairs stands in the training text too; scores on it flatter. First: ")
    clean_report = leaks(train, test[3:4])
    assert clean_report.warning("test") == "" and clean_report.samples == []


def test_comparable() -> None:
    assert comparable("\tGROẞE  Straße\u00a0x ") == comparable("grosse strasse x")


TEXTS = pairs_of(*[(f"Satz {n // 2} ", f"t{n}") for n in range(400)])  # each source twice


def test_held_out_sources_are_a_random_sample_by_seed() -> None:
    chosen = choose_held_out(TEXTS, 20, seed=1)
    assert len(chosen) == 20 and chosen <= {comparable(pair.src) for pair in TEXTS}
    assert choose_held_out(reversed(TEXTS), 20, seed=1) == chosen != choose_held_out(TEXTS, 20, seed=2)
    assert choose_held_out(TEXTS, 10, seed=1) < chosen
    assert len(choose_held_out(TEXTS, 1000, seed=1)) == 200
    assert choose_held_out(TEXTS, 0, seed=1) == frozenset() == choose_held_out([], 5, seed=1)


def test_what_is_held_out_does_not_leak() -> None:
    chosen = choose_held_out(TEXTS, 20, seed=1)
    held = [pair for pair in TEXTS if comparable(pair.src) in chosen]
    rest = [pair for pair in TEXTS if comparable(pair.src) not in chosen]
    assert len(held) == 40 and leaks(rest, held).sources == 0
