"""Look at a text file in bounded time: count or estimate its lines, and read blocks of lines from several places.

A plain file is counted at the speed of the disk, which also records where its lines are, so that blocks are read by
seeking. A compressed file is read from the beginning. Which of its blocks are kept depends on a hash of the block
number, and fewer are kept the more there are, so that source and target files keep blocks of the same numbers.
"""

from __future__ import annotations

import io
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from transduce.data.lines import COMPRESSIONS, MAX_LINE, TOO_LONG, check_is_text, open_watched
from transduce.errors import DataError

BLOCK = 2_000  # lines
MOST_BLOCKS = 100  # kept of one file
MOST_BYTES = 1 << 22  # of one block; only the first lines of a longer one are used
_CHUNK = 1 << 20
_MAX_PENDING = 1 << 26  # bytes without the end of a block: not a text of sentences


@dataclass(slots=True)
class Scan:
    """Result of a scan. `n_lines` were counted: all lines if `whole`, otherwise those of the `share` that was read."""

    path: Path
    n_lines: int = 0
    n_bytes: int = 0  # decompressed
    whole: bool = False
    share: float = 0.0
    fault: str = ""
    offsets: list[int] = field(default_factory=list)  # plain file: where chunks begin
    lines: list[int] = field(default_factory=list)  # plain file: number of line ends before each chunk
    kept: dict[int, bytes] = field(default_factory=dict)  # compressed file: blocks by number
    limit: int = 1 << 32  # compressed file: blocks with a hash up to this are kept

    @property
    def seekable(self) -> bool:
        """Whether blocks are read by seeking."""
        return self.path.suffix.lower() not in COMPRESSIONS

    @property
    def total(self) -> int:
        """Number of lines, estimated unless the whole file was read."""
        return self.n_lines if self.whole or not self.share else round(self.n_lines / self.share)

    def has(self, number: int) -> bool:
        """Whether a block is available."""
        return number * BLOCK < self.n_lines if self.seekable else number in self.kept

    def block(self, number: int, *, n: int = BLOCK) -> list[bytes]:
        """The lines of a block; fewer at the end of what was read, or if they are very long."""
        if self.seekable:
            return self.read(number * BLOCK, n)
        return _split(self.kept.get(number, b""))[:n]

    def read(self, first: int, n: int) -> list[bytes]:
        """`n` lines of a plain file from line `first` (counted from 0)."""
        if first >= self.n_lines:
            return []
        place = max(0, bisect_left(self.lines, first) - 1)  # a chunk that begins before the line
        with self.path.open("rb") as file:
            file.seek(self.offsets[place])
            skip, data = first - self.lines[place], b""
            while chunk := file.read(_CHUNK):
                data += chunk
                if skip:
                    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
                    if len(ends) < skip:
                        skip, data = skip - len(ends), data[ends[-1] + 1 if len(ends) else 0 :]
                        continue
                    skip, data = 0, data[ends[skip - 1] + 1 :]
                if (len(data) > MOST_BYTES and b"\n" in data) or data.count(b"\n") >= n:
                    data = data[: data.rindex(b"\n") + 1]
                    break
        return _split(data)[: min(n, self.n_lines - first)]

    def tail(self, n: int) -> list[bytes]:
        """At most the last `n` lines of a plain file."""
        n_bytes = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, n_bytes - MOST_BYTES))
            lines = _split(file.read(MOST_BYTES))
        return lines[-n:] if n_bytes <= MOST_BYTES else lines[1:][-n:]


def scan(path: Path, *, seconds: float) -> Scan:
    """Scan a file for about `seconds`. Damage is reported in `fault`; a missing file raises `DataError`."""
    check_is_text(path)
    found = Scan(path)
    until = time.monotonic() + seconds
    try:
        with open_watched(path) as (file, position):
            n_bytes = max(1, path.stat().st_size)
            (_count if found.seekable else _keep_some)(found, file, until)
            found.share = min(1.0, position() / n_bytes)
    except DataError as error:
        if not found.n_bytes and not path.exists():
            raise
        found.fault = str(error)
    return found


def _count(found: Scan, file: io.BufferedIOBase, until: float) -> None:
    """Count the lines of a plain file, and record where they are."""
    last, pending = b"\n", 0
    while chunk := file.read(_CHUNK):
        found.offsets.append(found.n_bytes)
        found.lines.append(found.n_lines)
        pending = _check_length(found.path, found.n_lines + 1, pending, chunk)
        found.n_lines += chunk.count(b"\n")
        found.n_bytes += len(chunk)
        last = chunk[-1:]
        if time.monotonic() > until and len(chunk) == _CHUNK:
            return
    found.n_lines += last != b"\n"
    found.whole = True


def _keep_some(found: Scan, file: io.BufferedIOBase, until: float) -> None:
    """Read a compressed file, and keep some of its blocks."""
    number, rest, pending = 0, b"", 0
    while chunk := file.read(_CHUNK):
        pending = _check_length(found.path, found.n_lines + rest.count(b"\n") + 1, pending, chunk)
        found.n_bytes += len(chunk)
        rest += chunk
        ends = np.flatnonzero(np.frombuffer(rest, np.uint8) == 10)
        begin = 0
        for last in ends[BLOCK - 1 :: BLOCK].tolist():
            _keep(found, number, rest[begin : last + 1])
            number, begin = number + 1, last + 1
        found.n_lines = number * BLOCK
        rest = rest[begin:]
        if len(rest) > _MAX_PENDING or (time.monotonic() > until and number):
            return
    if rest:
        found.n_lines += len(_split(rest))
        _keep(found, number, rest)
    found.whole = True


def _keep(found: Scan, number: int, block: bytes) -> None:
    """Keep a block if its hash is small enough; the first block always is."""
    if rank(number) > found.limit:
        return
    if len(block) > MOST_BYTES:  # whole lines; at least one of the first block, which shows the columns
        end = block.rfind(b"\n", 0, MOST_BYTES) + 1
        block = block[: end or (0 if number else block.find(b"\n") + 1 or len(block))]
    if block:
        found.kept[number] = block
    while len(found.kept) > MOST_BLOCKS:
        found.limit //= 2
        found.kept = {n: b for n, b in found.kept.items() if rank(n) <= found.limit}


def rank(number: int) -> int:
    """A hash of a block number, the same on every machine; 0 for block 0."""
    value = number * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    value = (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return value >> 32


def _split(data: bytes) -> list[bytes]:
    return data.removesuffix(b"\n").split(b"\n") if data else []


def _check_length(path: Path, number: int, pending: int, chunk: bytes) -> int:
    """Raise `DataError` for a line that is too long for text. `pending`: bytes of the line before this chunk."""
    end = chunk.find(b"\n")
    if pending + (len(chunk) if end < 0 else end) >= MAX_LINE:
        raise DataError(f"{path}, line {number}: {TOO_LONG}")
    return pending + len(chunk) if end < 0 else len(chunk) - 1 - chunk.rfind(b"\n")
