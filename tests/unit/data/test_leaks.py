"""Held-out examples that also occur in the training text are found and reported."""

from __future__ import annotations

from hard_strings import HARD
from transduce.data.leaks import LeakCheck, comparable, watch

Examples = list[tuple[str, ...]]


def checked(train: Examples, test: Examples, **options: object) -> LeakCheck:
    check = LeakCheck("test", test, **options)  # type: ignore[arg-type]
    assert list(watch(train, lambda one: one, [check], lambda one: f"train:{train.index(one) + 1}")) == train
    return check


TRAIN: Examples = [("The  Dog", "der Hund"), ("x", "y"), ("a cat", "eine Katze"), ("x", "y"), ("x", "Y "), ("", "")]
TEST: Examples = [("the dog ", "Der Hund"), ("A Cat", "die Katze"), ("x", "y"), ("new", "neu"), ("x", "y"), ("", "")]


def test_leaked_pairs_and_sources_are_found_ignoring_case_and_spaces() -> None:
    check = checked(TRAIN, TEST, places=[f"test:{i}" for i in range(1, 7)])
    assert (check.n, check.leaked, check.met) == (6, 3, 4)
    report = check.to_json()
    assert (report["pairs"], report["leaked"], report["sources"]) == (6, 3, 4)
    assert report["samples"][0] == {"src": "the dog ", "tgt": "Der Hund", "place": "test:1", "train": "train:1"}
    assert [sample["src"] for sample in report["samples"]] == ["the dog ", "x", "x", "A Cat"]


def test_warning_names_the_numbers_and_the_first_example() -> None:
    both = checked(TRAIN, TEST, places=[f"test:{i}" for i in range(1, 7)]).warning()
    for part in ("test: ", "3 of 6 pairs", "1 of 6 sources", "test:1 = train:1"):
        assert part in both
    other, same = checked(TRAIN, TEST[1:2] + TEST[3:4]).warning(), checked(TRAIN, TEST[:1]).warning()
    assert "1 of 2 sources" in other and "another translation" in other
    assert "1 of 1 pairs" in same and "another translation" not in same
    nothing = checked(TRAIN, TEST[3:4])
    assert nothing.warning() == "" and nothing.to_json()["samples"] == []


def test_short_lines_are_not_compared() -> None:
    train: Examples = [("a short line",), ("A line that is long enough to be compared",)]
    test: Examples = [
        ("A short line",),
        ("a line that is  long enough to be compared\n",),
        ("another one, long enough too",),
    ]
    check = checked(train, test, unit="lines")
    assert (check.n, check.leaked) == (2, 1) and check.to_json()["unit"] == "lines"
    assert check.to_json()["samples"] == [{"text": test[1][0].strip()}]
    assert "1 of 2 lines" in check.warning() and "20 characters" in check.warning()


def test_comparable_texts_have_single_spaces() -> None:
    for text in (*HARD, "one two", "one  two", " a", "a ", "\u3000a", "A\x1cb"):
        assert comparable(text) == " ".join(text.casefold().split()), text


def test_comparable() -> None:
    assert comparable("\tGROẞE  Straße\u00a0x ") == comparable("grosse strasse x")
