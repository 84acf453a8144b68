"""Cleaning: each rule, the report, duplicates, held-out sources, leaks, the sample that is checked, the spool."""

import json
import pickle
import tracemalloc
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hard_strings import HARD
from transduce.config.settings import DataSettings, Settings
from transduce.data.clean import (
    Cleaner,
    CleanReport,
    HeldOutSources,
    PairCleaning,
    SeenHashes,
    chunks_of,
    draws_of,
    format_cleaning,
    hashes_of,
)
from transduce.data.leaks import LeakCheck, comparable, watch
from transduce.data.lines import Unreadable
from transduce.data.pairs import Pair
from transduce.data.reading import WINDOW, Windows, line_sources, memory_source, pair_sources, take_sample
from transduce.data.workers import ResultFile, spooled
from transduce.errors import DataError, RunFolderError
from transduce.text.training import Reservoir


def pairs_of(*sides: tuple[str, str]) -> list[Pair]:
    return [Pair(src, tgt, "a.tsv", n) for n, (src, tgt) in enumerate(sides, 1)]


def cleaned(pairs: list[Pair], **values: object) -> tuple[list[tuple[str, str]], CleanReport]:
    cleaner = Cleaner(DataSettings(**values))
    kept = [pair[:2] for pair in map(cleaner.by_rules, pairs) if pair is not None]
    return kept, cleaner.report


PAIRS = pairs_of(("a", "b"), ("", "b"), ("a", " \t\u2028"), ("a", "b"), ("Same", " same"), ("a\x00b\x0cc", "d\x1b"))


def test_empty_sides_are_dropped_and_control_characters_removed() -> None:
    kept, report = cleaned(PAIRS)
    assert kept == [("a", "b"), ("a", "b"), ("Same", " same"), ("ab c", "d")]
    assert (report.read, report.kept) == (6, 4)
    lines = format_cleaning(report.to_json())
    assert lines[0] == "cleaning: 6 pairs read, 4 kept"
    assert [line.split(", e.g. ")[0] for line in lines[1:]] == [
        "  dropped 2: empty",
        "  changed 1: control characters removed",
    ]
    assert format_cleaning(CleanReport(read=3).to_json()) == ["cleaning: 3 pairs read, 3 kept; nothing dropped"]
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


def test_hashes_are_those_of_blake2b() -> None:
    def digest(text: str) -> bytes:
        return blake2b(text.encode(), digest_size=8).digest()

    pairs = pairs_of(("a", "b"), ("Größe  X", "日本"), ("", ""))
    assert hashes_of(pairs).tobytes() == b"".join(digest(f"{pair.src}\0{pair.tgt}") for pair in pairs)
    drawn = [int.from_bytes(digest(f"3\n{comparable(pair.src)}"), "big") for pair in pairs]
    assert draws_of(pairs, seed=3).tolist() == drawn


def test_names_of_files_that_are_not_utf8_are_hashed() -> None:
    pairs = pairs_of(("\udcff.safetensors#0", "a"), ("\udcfe.safetensors#0", "a"))
    assert len({*hashes_of(pairs).tolist(), *draws_of(pairs, seed=3).tolist()}) == 4


def test_copies_are_dropped_on_request() -> None:
    kept, report = cleaned(PAIRS, drop_copies=True)
    assert kept == [("a", "b"), ("a", "b"), ("ab c", "d")]
    assert {reason: tally.count for reason, tally in report.dropped.items()} == {"empty": 2, "copy": 1}


def test_chunks_have_the_pairs_in_another_process_too() -> None:
    for pairs in (
        PAIRS,
        pairs_of(("a\nb", "c"), ("", "\n"), ("x", "y")),
        [Pair("", "", "file", 7, "0-0", Unreadable("no tab", "!"))],
    ):
        chunks = list(chunks_of(3, pairs, 2))
        assert [pair for chunk in chunks for pair in chunk.pairs] == pairs
        assert all(len(chunk.pairs) == 2 for chunk in chunks[:-1])
        assert pickle.loads(pickle.dumps(chunks)) == chunks


def test_long_pairs_are_in_memory_in_small_numbers() -> None:
    pairs = (Pair("x" * (1 << 20), "y", "a.tsv", n) for n in range(100))
    assert max(len(chunk.pairs) for chunk in chunks_of(0, pairs, 10_000)) == 32


def test_duplicates_are_remembered_across_corpora() -> None:
    cleaning = PairCleaning(DataSettings(deduplicate=True), 1, Reservoir(9, seed=1), None)
    pairs = pairs_of(("a", "b"), ("a\nb", "c"), ("a", "b\nc"), ("a\x00", "b"))
    streams = cleaning.clean([pairs, pairs], ResultFile(None), n=3)
    assert [[pair[:2] for pair in stream()] for stream in streams] == [[pair[:2] for pair in pairs[:3]], []]
    assert cleaning.report.dropped["duplicate"].count == 5 and cleaning.report.kept == len(cleaning.sample.items) == 3


def test_a_report_keeps_five_short_samples() -> None:
    _, report = cleaned(pairs_of(*[("", "x" * 1000)] * 20))
    tally = report.dropped["empty"]
    assert tally.count == 20 and len(tally.samples) == 5
    assert tally.samples[0]["tgt"] == "x" * 199 + "…"


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
    for pair in filter(None, map(cleaner.by_rules, pairs_of(("a", "b"), ("c", "d"), ("", "e")))):
        cleaner.lengths_fit(pair, 4, 4)
    with pytest.raises(DataError) as caught:
        cleaner.report.require_pairs(settings_, "training text")
    for part in ("training text: ", "no sentence pair of 3 is left: 2 too long, 1 empty", "data.max_length (3 tokens)"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match="valid: no sentence pair"):
        CleanReport().require_pairs(settings_, "valid")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5))))
def test_every_pair_is_kept_or_counted(sides: list[tuple[str, str]]) -> None:
    kept, report = cleaned(pairs_of(*sides), drop_copies=True)
    assert report.read == len(sides) == len(kept) + sum(tally.count for tally in report.dropped.values())
    assert all(src.strip() and tgt.strip() for src, tgt in kept)


TEXTS = pairs_of(*[(f"Satz {n // 2} ", f"t{n}") for n in range(400)])  # each source twice


def chosen_of(pairs: Iterable[Pair], n: int, *, seed: int, most: int = 1000) -> tuple[dict[str, Pair], int]:
    held_out, pairs = HeldOutSources(most), list(pairs)
    for begin in range(0, len(pairs), 7):
        some = pairs[begin : begin + 7]
        held_out.see(draws_of(some, seed=seed), some.__getitem__)
    chosen, n_pairs = held_out.choose(n, 1 << 30)
    return {source: held.pair for source, held in chosen.items()}, n_pairs


def test_held_out_sources_are_a_random_sample_by_seed() -> None:
    chosen, n_pairs = chosen_of(TEXTS, 20, seed=1)
    assert n_pairs == 40 and len(chosen) == 20 and chosen.keys() <= {comparable(pair.src) for pair in TEXTS}
    again, other = chosen_of(reversed(TEXTS), 20, seed=1)[0], chosen_of(TEXTS, 20, seed=2)[0]
    assert again.keys() == chosen.keys() != other.keys()
    assert chosen_of(TEXTS, 20, seed=1, most=20) == (chosen, n_pairs)
    assert chosen_of(TEXTS, 10, seed=1)[0].keys() < chosen.keys()
    assert len(chosen_of(TEXTS, 1000, seed=1)[0]) == 200
    assert chosen_of(TEXTS, 0, seed=1) == ({}, 0) == chosen_of([], 5, seed=1)


def test_the_folder_of_a_file_of_vectors_does_not_change_what_is_held_out() -> None:
    def numbers(path: str) -> list[str]:
        pairs = [Pair(f"{path}#{n}", f"t{n}", path, n) for n in range(200)]
        return [pair.tgt for pair in chosen_of(pairs, 20, seed=1)[0].values()]

    here = numbers("train.safetensors")
    assert here == numbers("/data/of #1/train.safetensors") == numbers("../train.safetensors")
    assert here != numbers("other.safetensors")


def test_the_first_pair_of_a_held_out_source_is_kept_in_order_of_appearance() -> None:
    chosen, _ = chosen_of(TEXTS, 30, seed=3)
    firsts = {comparable(pair.src): pair for pair in reversed(TEXTS)}
    assert list(chosen.values()) == [
        pair for pair in TEXTS if firsts[comparable(pair.src)] is pair and pair in chosen.values()
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=12))
def test_hashes_are_new_once(chunks: list[list[int]]) -> None:
    seen, known = SeenHashes(), set[int]()
    for chunk in chunks:
        found = seen.add(np.array(chunk, dtype=np.uint64))
        for number, new in zip(chunk, found.tolist(), strict=True):
            assert new == (number not in known)
            known.add(number)


def test_deduplication_takes_at_most_16_bytes_per_pair() -> None:
    seen, n, chunk = SeenHashes(), 400_000, 10_000
    draw = np.random.default_rng(0)
    tracemalloc.start()
    for _ in range(n // chunk):
        seen.add(draw.integers(0, 1 << 63, chunk, dtype=np.uint64))
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 8.5 * n and peak < 16 * n + 40 * chunk


def test_a_read_error_of_the_source_is_not_reported_as_a_write_error(tmp_path: Path) -> None:
    def records() -> Iterator[int]:
        yield 1
        raise OSError(5, "Input/output error", "corpus.txt")

    with pytest.raises(OSError, match=r"corpus.txt"):
        spooled(records(), tmp_path, int)


def test_a_folder_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write temporary data in .*missing: No such file"):
        spooled([1], tmp_path / "missing", int)


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


@pytest.mark.parametrize("n", [0, 1, WINDOW, 7 * WINDOW + 3, 1000 * WINDOW])
def test_windows_are_evenly_spaced_and_bounded(n: int) -> None:
    windows = Windows(memory_source("numbers", range(n)), most=8)
    assert list(windows.read()) == list(range(n)) and windows.total == n
    assert all(window == list(range(window[0], window[0] + len(window))) for window in windows.kept)
    starts = [window[0] for window in windows.kept]
    assert len(starts) <= 8 and len(set(np.diff(starts))) <= 1
    assert windows.is_whole == (n <= 8 * WINDOW)
    if n > 8 * WINDOW:
        assert len(starts) >= 4 and starts[-1] > 0.7 * n


def test_some_are_drawn_from_everywhere() -> None:
    windows = Windows(memory_source("numbers", range(10_000)), most=100)
    assert list(windows.read())
    some = list(windows.some(1000).read())
    assert len(some) == 1000 and some[0] == 0 and max(some) > 8000
    assert list(Windows(memory_source("nothing", [])).some(10).read()) == []


def test_a_fault_ends_its_corpus_only(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("line\n" * 500)
    bad.write_bytes(b"line\n" * 500 + b"\xff\n" + b"line\n" * 500)
    train = [{"path": str(bad)}, {"path": str(good)}]
    sample = take_sample(line_sources(Settings.from_mapping({"task": "causal", "data": {"train": train}})))
    assert [one.total for one in sample.train] == [400, 500] and not sample.is_whole
    assert f"{bad}, line 501: not valid UTF-8" in sample.train[0].fault and not sample.train[1].fault


def test_records_of_pairs_name_their_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("".join(f"a {i}\tb {i}\n" for i in range(50)))
    sample = take_sample(pair_sources(Settings.from_mapping({"data": {"train": [{"path": str(tmp_path / "a.tsv")}]}})))
    pair = sample.train[0].kept[0][7]
    assert (pair.src, pair.tgt, pair.file, pair.line) == ("a 7", "b 7", str(tmp_path / "a.tsv"), 8)
