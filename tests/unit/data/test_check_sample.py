"""Windows of a corpus: everywhere in it, in bounded memory; faults end a corpus but not the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from transduce.config.settings import Settings
from transduce.data.reading import line_sources, memory_source, pair_sources
from transduce.data.windows import WINDOW, Windows, take_sample


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
