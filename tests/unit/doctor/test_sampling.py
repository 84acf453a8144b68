"""A sample contains the rows of the files with their line numbers, for every format, and reports unreadable lines."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from transduce.config import Corpus
from transduce.data.corpus import read_labelled, read_pairs
from transduce.data.lines import MAX_LINE
from transduce.doctor import sampling
from transduce.doctor.checks import readable, run_checks
from transduce.doctor.sampling import BLOCK, Sample, take_sample
from transduce.errors import DataError
from unit.doctor.corpora import corpus, good, settings, write

TMX = """<?xml version="1.0"?><tmx version="1.4"><header srclang="en"/><body>
{}</body></tmx>"""
UNIT = '<tu><tuv xml:lang="en"><seg>{}</seg></tuv><tuv xml:lang="de"><seg>{}</seg></tuv></tu>\n'


@pytest.mark.parametrize("suffix", [".tsv", ".jsonl", ".tmx", "header.tsv"])
def test_every_format_gives_its_pairs(tmp_path: Path, suffix: str) -> None:
    pairs = good(300)
    lines = {
        ".tsv": [f"{s}\t{t}" for s, t in pairs],
        "header.tsv": ["id\tde\ten", *(f"7\t{t}\t{s}" for s, t in pairs)],
        ".jsonl": [json.dumps({"translation": {"en": s, "de": t}}) for s, t in pairs],
        ".tmx": [TMX.format("".join(UNIT.format(s, t) for s, t in pairs))],
    }[suffix]
    path = write(tmp_path / f"a{suffix}", lines)
    found = take_sample(settings({"path": str(path)}))
    assert list(found.rows()) == pairs
    assert (found.total, found.whole, found.faults) == (len(pairs), True, ())


def test_large_files_are_sampled_in_several_places(tmp_path: Path) -> None:
    pairs = [(f"a {i}", f"b {i}") for i in range(20 * BLOCK)]
    found = take_sample(settings(corpus(tmp_path, pairs)), most_blocks=5)
    part = found.parts[0]
    assert (found.total, part.counted, found.whole) == (20 * BLOCK, True, False)
    assert part.how == "all lines counted, 6 places examined"
    assert [block.first // BLOCK for block in part.blocks] == [0, 4, 8, 12, 16, 19]
    for block in part.blocks:
        assert block.rows[7] == pairs[block.first + 6] and block.numbers[7] == block.first + 7
    assert part.reread is not None and part.reread(123, 2) == tuple(pairs[122:124])


def test_the_end_of_very_large_files_is_sampled(tmp_path: Path) -> None:
    """Without time to count: the beginning, and the last lines of both files, counted from the end."""
    pairs = [(f"a {i} {'x' * 200}", f"b {i} {'y' * 200}") for i in range(20 * BLOCK)]
    found = take_sample(settings(corpus(tmp_path, pairs)), seconds=0.0)
    part = found.parts[0]
    assert not part.counted and "and the end" in part.how and "estimated" in part.how
    assert part.total == pytest.approx(len(pairs), rel=0.1)
    assert part.blocks[-1].from_end and list(part.blocks[-1].rows) == pairs[-BLOCK:]


def test_unreadable_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"one\teins\nonly one\ntwo\tzw\xfferi\nthree\tdrei\n")
    found = take_sample(settings({"path": str(path)}))
    assert list(found.rows()) == [("one", "eins"), ("three", "drei")]
    assert list(found.faults) == [
        f"{path}, line 2: line 1 has 2 columns, this line has 1",
        f"{path}, line 3: not valid UTF-8 (byte 0xff at byte 7 of the line); convert it to UTF-8",
    ]


FAULTY = {
    "columns.tsv": b"a\tb\tc\n" * 70 + b"a\tb\n",
    "header.tsv": b"de\ten\nx\ty\nx\ty\tz\n",
    "none.tsv": b"a b\n",
    "half.jsonl": b'{"src": "a", "tgt": "b"}\n{"src": "\\ud800", "tgt": "b"}\n',
    "not.jsonl": b'{"src": "a", "tgt": "b"}\n\n{"src": 1}\n',
    "utf16.jsonl": "{}".encode("utf-16"),
    "long.tsv": b"a\tb\n" + b"x" * MAX_LINE + b"\ty\n",
    "long.tsv.gz": gzip.compress(b"a\tb\n" + b"x" * MAX_LINE + b"\ty\n", 1),
    "no.tsv.gz": b"this is not gzip",
    "mixed.txt": b"1\ta\n0\ta\tb\n",
    "empty.txt": b"1\ta\n\n",
    "label.txt": b"1\ta\n\ta\n",
}


@pytest.mark.parametrize("name", FAULTY)
def test_unreadable_lines_have_the_message_of_training(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FAULTY[name])
    task = "classification" if name.endswith(".txt") else "translation"
    with pytest.raises(DataError) as refused:
        if task == "classification":
            list(read_labelled(path))
        else:
            list(read_pairs(Corpus(path=path), src_lang="en", tgt_lang="de"))
    found = take_sample(settings({"path": str(path)}, task=task))
    assert found.faults[0] == str(refused.value)
    assert next(one.level for one in readable(found)) == "obstacle"


def test_byte_order_marks_and_line_ends_are_read_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufeffde\ten\r\nx\ty\r\n\nz\t\n".encode())
    corpus = Corpus(path=path)
    read = [(pair.src, pair.tgt) for pair in read_pairs(corpus, src_lang="en", tgt_lang="de")]
    assert list(take_sample(settings({"path": str(path)})).rows()) == read == [("y", "x"), ("", ""), ("", "z")]


def test_an_empty_side_is_an_obstacle(tmp_path: Path) -> None:
    given = corpus(tmp_path, good(50))
    Path(given["src"]).write_bytes(b"")
    found = take_sample(settings(given))
    assert (found.n_rows, found.total) == (0, 0)
    assert next(one.level for one in run_checks(found)) == "obstacle"


def test_sources_contain_the_rows_and_their_places(tmp_path: Path) -> None:
    pairs = good(50)
    (part,) = take_sample(settings(corpus(tmp_path, pairs))).parts
    source = part.source(part.blocks, "pairs")
    assert [(pair.src, pair.tgt) for pair in source.read()] == pairs
    path = write(tmp_path / "mine.tsv", [f"{'ab'[i % 2]}\ttext {i}" for i in range(1000)])
    (part,) = take_sample(settings({"path": str(path)}, task="classification")).parts
    example = list(part.source(list(part.blocks[0].windows())[2:4], "labelled").read())[7]
    assert (example.texts, example.place) == (("text 407",), (str(path), 408))
    assert part.source([], "labelled").name == "mine.tsv"


def test_corpora_are_sampled_in_proportion_to_their_size(tmp_path: Path) -> None:
    big = corpus(tmp_path, [(f"big {i}", "b") for i in range(9000)], "big")
    little = corpus(tmp_path, [(f"little {i}", "l") for i in range(1000)], "little")
    rows = take_sample(settings(big, little)).some(2000)
    assert len(rows) == 2000
    assert sum(row[1] == "l" for row in rows) == 200


LINES = [f"line {i} {'x' * (i % 37)}" for i in range(3 * BLOCK + 123)]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def text_sample(path: Path, **given: Any) -> Sample:
    return take_sample(settings({"path": str(path)}, task="causal"), **given)


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files_are_read_completely(tmp_path: Path, suffix: str, ending: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](("\n".join(LINES) + ending).encode()))
    found = text_sample(path)
    (part,) = found.parts
    assert (found.whole, found.faults, part.counts) == (True, (), (len(LINES),))
    assert [row for (row,) in part.rows()] == LINES and len(part.blocks) == 4
    assert part.reread is not None
    for first in (*range(0, len(LINES), 500), len(LINES) - 3):
        assert [row for (row,) in part.reread(first + 1, 5)] == LINES[first : first + 5]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_estimated_without_time(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{i:07d} {(i * 2654435761) % 2**32:08x}" for i in range(400_000)]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix]("\n".join(lines).encode()))
    clock = itertools.count()
    monkeypatch.setattr(sampling.time, "monotonic", lambda: next(clock))
    found = text_sample(path, seconds=100)  # 80 blocks
    (part,) = found.parts
    assert not part.counted and not found.whole
    assert part.total == pytest.approx(len(lines), rel=0.15)
    assert list(part.blocks[0].rows[:2]) == [(line,) for line in lines[:2]]


def test_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode())[:-20])
    assert "damaged or truncated" in text_sample(path).faults[0]
    with pytest.raises(DataError, match="cannot read"):
        text_sample(tmp_path / "nothing")


def test_very_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%d " % i + b"x" * (1 << 18) + b"\n" for i in range(150)))
    (part,) = text_sample(path).parts
    assert part.counts == (150,)
    assert 0 < part.n_rows < 100  # a block is cut for its size
    assert part.reread is not None and [row[0][:4] for row in part.reread(149, 5)] == ["148 ", "149 "]
