"""Look at a text file in bounded time: count or estimate its lines, and keep blocks of lines from several places.

A file is read from its beginning, compressed or not. Every 2^k-th block is kept, fewer the more there are, so that
source and target files keep blocks of the same numbers.
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
    every: int = 1  # block whose number is a multiple of this is kept

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
    number, rest = 0, b""
    try:
        with open_watched(path) as (file, position):
            n_bytes = max(1, path.stat().st_size)
            while chunk := file.read(_CHUNK):
                found.n_bytes += len(chunk)
                rest += chunk
                ends = np.flatnonzero(np.frombuffer(rest, np.uint8) == 10)
                lengths = np.diff(ends, prepend=-1, append=len(rest)) - 1
                if lengths.max() >= MAX_LINE:
                    raise DataError(f"{path}, line {found.n_lines + int(lengths.argmax()) + 1}: {TOO_LONG}")
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
    """Keep a block if its turn comes; the first always does."""
    if number % found.every:
        return
    if len(block) > MOST_BYTES:  # whole lines; at least one of the first block, which shows the columns
        end = block.rfind(b"\n", 0, MOST_BYTES) + 1
        block = block[: end or (0 if number else block.find(b"\n") + 1 or len(block))]
    if block:
        found.kept[number] = block
    if len(found.kept) > MOST_BLOCKS:
        found.every *= 2
        found.kept = {n: kept for n, kept in found.kept.items() if not n % found.every}


def _split(data: bytes) -> list[bytes]:
    return data.removesuffix(b"\n").split(b"\n") if data else []
