"""Text files looked at in a bounded time: lines counted or estimated, blocks of lines from several places.

A plain file is counted as fast as the disk gives it, which also tells where its lines lie, so that blocks are read by
seeking. A compressed file is read from its beginning; of its blocks those are kept that a hash of their number draws,
fewer the more there are, so that two files read for different times keep blocks of the same numbers.
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
MOST_BYTES = 1 << 22  # of one block: of longer ones the first lines are taken
_CHUNK = 1 << 20
_PATIENCE = 1 << 26  # bytes without an end of a block: no text of sentences


@dataclass(slots=True)
class Scan:
    """What a look at a file gave. `n_lines` were counted; all of them where it is `whole`."""

    path: Path
    n_lines: int = 0
    n_bytes: int = 0  # of text, decompressed
    whole: bool = False
    share: float = 0.0  # of the file as it lies there that was read
    fault: str = ""
    offsets: list[int] = field(default_factory=list)  # of a plain file: where its chunks begin,
    lines: list[int] = field(default_factory=list)  # and the number of line ends before
    kept: dict[int, bytes] = field(default_factory=dict)  # of a compressed file: blocks by number
    limit: int = 1 << 32  # and the hash up to which all were kept

    @property
    def seekable(self) -> bool:
        """Whether blocks are read by seeking."""
        return self.path.suffix.lower() not in COMPRESSIONS

    @property
    def total(self) -> int:
        """Lines in all; estimated where the file was not read to its end."""
        return self.n_lines if self.whole or not self.share else round(self.n_lines / self.share)

    def has(self, number: int) -> bool:
        """Whether the block of this number can be had."""
        return number * BLOCK < self.n_lines if self.seekable else number in self.kept

    def block(self, number: int, *, n: int = BLOCK) -> list[bytes]:
        """The lines of a block, without their ends; fewer at the end of what was read, or where they are long.

        None where nothing was kept: `fault` tells why.
        """
        if not self.seekable:
            return _lines(self.kept.get(number, b""))[:n]
        return self.read(number * BLOCK, n)

    def read(self, first: int, n: int) -> list[bytes]:
        """`n` lines of a plain file from line `first` (from 0) on, by seeking."""
        if first >= self.n_lines:
            return []
        place = max(0, bisect_left(self.lines, first) - 1)  # a chunk that begins before the line does
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
        return _lines(data)[: min(n, self.n_lines - first)]

    def tail(self, n: int) -> list[bytes]:
        """The last lines of a plain file, at most `n`."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - MOST_BYTES))
            data = file.read(MOST_BYTES)
        lines = data.removesuffix(b"\n").split(b"\n")
        return lines[-n:] if size <= MOST_BYTES else lines[1:][-n:]


def scan(path: Path, *, seconds: float) -> Scan:
    """Look at a file for about so long. Damage is told in `fault`; a missing file is a `DataError`."""
    check_is_text(path)
    found = Scan(path)
    until = time.monotonic() + seconds
    try:
        with open_watched(path) as (file, position):
            size = max(1, path.stat().st_size)
            (_count if found.seekable else _draw)(found, file, until)
            found.share = min(1.0, position() / size)
    except DataError as error:
        if not found.n_bytes and not path.exists():
            raise
        found.fault = str(error)
    return found


def _count(found: Scan, file: io.BufferedIOBase, until: float) -> None:
    """Count the lines of a plain file, and note where they lie. A line that is too long ends it."""
    last, open_ = b"\n", 0  # bytes of the line that goes on
    while chunk := file.read(_CHUNK):
        found.offsets.append(found.n_bytes)
        found.lines.append(found.n_lines)
        open_ = _open(found.path, found.n_lines + 1, open_, chunk)
        found.n_lines += int(np.count_nonzero(np.frombuffer(chunk, np.uint8) == 10))
        found.n_bytes += len(chunk)
        last = chunk[-1:]
        if time.monotonic() > until and len(chunk) == _CHUNK:
            return
    found.n_lines += last != b"\n"
    found.whole = True


def _draw(found: Scan, file: io.BufferedIOBase, until: float) -> None:
    """Read on, and keep some blocks."""
    number, rest, open_ = 0, b"", 0
    while chunk := file.read(_CHUNK):
        open_ = _open(found.path, found.n_lines + rest.count(b"\n") + 1, open_, chunk)
        found.n_bytes += len(chunk)
        rest += chunk
        ends = np.flatnonzero(np.frombuffer(rest, np.uint8) == 10)
        begin = 0
        for last in ends[BLOCK - 1 :: BLOCK].tolist():
            _keep(found, number, rest[begin : last + 1])
            number, begin = number + 1, last + 1
        found.n_lines = number * BLOCK
        rest = rest[begin:]
        if len(rest) > _PATIENCE or (time.monotonic() > until and number):
            return
    if rest:
        found.n_lines += rest.count(b"\n") + (not rest.endswith(b"\n"))
        _keep(found, number, rest)
    found.whole = True


def _keep(found: Scan, number: int, block: bytes) -> None:
    """Keep a block if its number is drawn; the first one always is."""
    if rank(number) > found.limit:
        return
    if len(block) > MOST_BYTES:  # whole lines only; of the first block one at least, as it tells the columns
        end = block.rfind(b"\n", 0, MOST_BYTES) + 1
        block = block[: end or (0 if number else block.find(b"\n") + 1 or len(block))]
    if not block:
        return
    found.kept[number] = block
    while len(found.kept) > MOST_BLOCKS:
        found.limit //= 2
        found.kept = {n: b for n, b in found.kept.items() if rank(n) <= found.limit}


def rank(number: int) -> int:
    """A hash of a block's number, the same everywhere; of 0 it is 0."""
    value = number * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    value = (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return value >> 32


def _lines(data: bytes) -> list[bytes]:
    """Lines without their ends."""
    return data.removesuffix(b"\n").split(b"\n") if data else []


def _open(path: Path, number: int, before: int, chunk: bytes) -> int:
    """Bytes of the line that goes on behind a chunk; `before`: behind the last one, of the line of this number.

    A line that is longer than any text's is a `DataError`.
    """
    end = chunk.find(b"\n")
    if before + (len(chunk) if end < 0 else end) >= MAX_LINE:
        raise DataError(f"{path}, line {number}: {TOO_LONG}")
    return before + len(chunk) if end < 0 else len(chunk) - 1 - chunk.rfind(b"\n")
