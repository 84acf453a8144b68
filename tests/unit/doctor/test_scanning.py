"""Line counts and blocks of plain and compressed files."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from transduce.doctor import scanning
from transduce.doctor.scanning import BLOCK, Scan, scan
from transduce.errors import DataError

LINES = [f"line {i} {'x' * (i % 37)}" for i in range(3 * BLOCK + 123)]
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("ending", ["\n", ""])
@pytest.mark.parametrize("suffix", PACK)
def test_line_count_and_blocks(tmp_path: Path, suffix: str, ending: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix](("\n".join(LINES) + ending).encode()))
    found = scan(path, seconds=10)
    assert (found.whole, found.n_lines, found.total, found.fault) == (True, len(LINES), len(LINES), "")
    for number in range(4):
        want = [line.encode() for line in LINES[number * BLOCK : (number + 1) * BLOCK]]
        assert found.block(number) == want
    assert sorted(found.kept) == [0, 1, 2, 3]


def test_lines_are_read_from_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_CHUNK", 1000)  # many chunks with borders inside of lines
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES))
    found = scan(path, seconds=10)
    for first in (*range(0, len(LINES), 500), len(LINES) - 3):
        assert found.read(first, 5) == [line.encode() for line in LINES[first : first + 5]]
    assert found.tail(10) == [line.encode() for line in LINES[-10:]]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_are_estimated_without_time(tmp_path: Path, suffix: str) -> None:
    lines = [f"{i:07d} {(i * 2654435761) % 2**32:08x}" for i in range(400_000)]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix]("\n".join(lines).encode()))
    found = scan(path, seconds=0)
    assert not found.whole and 0 < found.n_lines < len(lines)
    assert found.total == pytest.approx(len(lines), rel=0.15)
    assert found.block(0)[:2] == [line.encode() for line in lines[:2]]


def test_files_of_different_length_keep_the_same_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks kept of the longer file are among those of the shorter one, as far as it reaches."""
    monkeypatch.setattr(scanning, "MOST_BLOCKS", 8)
    kept = []
    for n in (30, 90):
        path = tmp_path / f"{n}.gz"
        path.write_bytes(gzip.compress(b"a\n" * (BLOCK * n), 1))
        kept.append(set(scan(path, seconds=30).kept))
    short, long = kept
    assert 0 in long and len(long) <= 8 and {number for number in long if number < 30} <= short


def test_damage_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode())[:-20])
    assert "damaged or truncated" in scan(path, seconds=10).fault
    with pytest.raises(DataError, match="cannot read"):
        scan(tmp_path / "nothing", seconds=1)


def test_very_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * (3 << 20) + b"\n" + b"y" * (3 << 20) + b"\nz\n")
    found: Scan = scan(path, seconds=10)
    assert found.n_lines == 3
    assert [len(line) for line in found.block(0)] == [3 << 20]  # cut for its size
    assert found.read(2, 5) == [b"z"]
