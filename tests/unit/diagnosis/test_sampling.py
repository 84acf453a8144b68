"""A sample holds what the files hold, with its places, whatever the format; what cannot be read is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from transduce.data.corpus import read_pairs
from transduce.diagnosis import sampling
from transduce.diagnosis.sampling import take_sample, write_rows
from transduce.diagnosis.scanning import BLOCK
from unit.diagnosis.corpora import corpus, good, settings, write

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
    assert (found.total, found.whole, found.faults) == (
        len(pairs) + (suffix == "header.tsv"),
        suffix != "header.tsv",
        (),
    )


def test_large_files_are_looked_at_in_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_BLOCKS", 5)
    pairs = [(f"a {i}", f"b {i}") for i in range(20 * BLOCK)]
    found = take_sample(settings(corpus(tmp_path, pairs)), most_blocks=5)
    part = found.parts[0]
    assert (found.total, part.counted, found.whole) == (20 * BLOCK, True, False)
    assert part.how == "lines counted, 5 places looked at"
    assert [block.first for block in part.blocks][::4] == [1, 19 * BLOCK + 1]
    for block in part.blocks:
        assert block.rows[7] == pairs[block.first + 6] and block.numbers[7] == block.first + 7
    assert part.reread is not None and part.reread(123, 2) == pairs[122:124]


def test_of_very_large_files_the_end_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the time to count, what is read from the beginning, and the last lines of both, counted from the end."""
    pairs = [(f"a {i} {'x' * 200}", f"b {i} {'y' * 200}") for i in range(20 * BLOCK)]
    found = take_sample(settings(corpus(tmp_path, pairs)), seconds=0.0)
    part = found.parts[0]
    assert not part.counted and "and the end; lines estimated" in part.how
    assert part.total == pytest.approx(len(pairs), rel=0.1)
    assert part.blocks[-1].from_end and list(part.blocks[-1].rows) == pairs[-BLOCK:]


def test_lines_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"one\teins\nonly one\ntwo\tzw\xfferi\nthree\tdrei\n")
    found = take_sample(settings({"path": str(path)}))
    assert list(found.rows()) == [("one", "eins"), ("three", "drei")]
    assert [(fault.place, fault.why) for fault in found.faults] == [
        (f"{path}, line 2", "1 columns; expected source<TAB>target"),
        (f"{path}, line 3", "not valid UTF-8 (byte 0xff at byte 7)"),
    ]


def test_written_rows_are_read_again(tmp_path: Path) -> None:
    pairs = good(50)
    written = write_rows(pairs, "pairs", tmp_path, "sample")
    assert [(p.src, p.tgt) for p in read_pairs(written, src_lang="en", tgt_lang="de")] == pairs


def test_some_takes_of_each_corpus_what_its_size_asks_for(tmp_path: Path) -> None:
    big = corpus(tmp_path, [(f"big {i}", "b") for i in range(9000)], "big")
    little = corpus(tmp_path, [(f"little {i}", "l") for i in range(1000)], "little")
    rows = take_sample(settings(big, little)).some(2000)
    assert len(rows) == 2000
    assert sum(row[1] == "l" for row in rows) == 200
