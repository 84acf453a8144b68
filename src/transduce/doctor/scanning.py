"""Look at a text file in bounded time: count or estimate its lines, and keep blocks of lines from several places.

A file is read from its beginning, compressed or not. Which blocks are kept depends on a hash of the block number, and
fewer are kept the more there are, so that source and target files keep blocks of the same numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from transduce.data.lines import COMPRESSIONS, MAX_LINE, TOO_LONG, check_is_text, open_bytes, open_watched
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
    kept: dict[int, bytes] = field(default_factory=dict)  # blocks by number
    limit: int = 1 << 32  # blocks with a hash up to this are kept

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed."""
        return self.path.suffix.lower() in COMPRESSIONS

    @property
    def total(self) -> int:
        """Number of lines, estimated unless the whole file was read."""
        return self.n_lines if self.whole or not self.share else round(self.n_lines / self.share)

    def block(self, number: int, *, n: int = BLOCK) -> list[bytes]:
        """The lines of a kept block; fewer at the end of what was read, or if they are very long."""
        return _split(self.kept.get(number, b""))[:n]

    def read(self, first: int, n: int) -> list[bytes]:
        """`n` lines from line `first` (counted from 0). Reads the file from its beginning."""
        with open_bytes(self.path) as file:
            return [line.removesuffix(b"\n") for line in islice(file, first, first + n)]

    def tail(self, n: int) -> list[bytes]:
        """At most the last `n` lines of a file that is not compressed."""
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
    number, rest, pending = 0, b"", 0
    try:
        with open_watched(path) as (file, position):
            n_bytes = max(1, path.stat().st_size)
            while chunk := file.read(_CHUNK):
                pending = _check_length(path, found.n_lines + rest.count(b"\n") + 1, pending, chunk)
                found.n_bytes += len(chunk)
                rest += chunk
                ends = np.flatnonzero(np.frombuffer(rest, np.uint8) == 10)
                begin = 0
                for last in ends[BLOCK - 1 :: BLOCK].tolist():
                    _keep(found, number, rest[begin : last + 1])
                    number, begin = number + 1, last + 1
                found.n_lines, rest = number * BLOCK, rest[begin:]
                if len(rest) > _MAX_PENDING or (time.monotonic() > until and number and len(chunk) == _CHUNK):
                    found.n_lines += rest.count(b"\n")
                    break
            else:
                found.n_lines += len(_split(rest))
                _keep(found, number, rest)
                found.whole = True
            found.share = min(1.0, position() / n_bytes)
    except DataError as error:
        if not found.n_bytes and not path.exists():
            raise
        found.fault = str(error)
    return found


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
