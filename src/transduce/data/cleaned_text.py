"""Keep what has passed cleaning until it is encoded, so that the corpus itself is read only once."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import zstandard

from transduce.data.workers import writing

T = TypeVar("T")
Stream = Callable[[], Iterator[T]]
"""Records that can be read again and again, from the start at each call; only one at a time."""

_CHUNK = 1000  # records compressed together


def spooled(
    records: Iterable[T], folder: Path | None, pack: Callable[[T], list[Any]], unpack: Callable[[list[Any]], T]
) -> Stream[T]:
    """Write records into an unnamed temporary file, compressed; the stream that reads them back.

    The file is gone when the stream is no longer used, or when the process ends, even by SIGKILL. Raises
    `RunFolderError` where the disk is full.

    Args:
        records: Are read to their end. They may come from another such stream.
        folder: Whose disk to use; None: that of the system's temporary folder.
        pack: Turns a record into a list of JSON values.
        unpack: Turns that back.
    """
    with writing(folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed when `read` is no longer used)
    writer, packed = zstandard.ZstdCompressor(level=1).stream_writer(file, closefd=False), map(pack, records)
    while chunk := list(islice(packed, _CHUNK)):
        line = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        with writing(folder):
            writer.write(line.encode("utf-8") + b"\n")
    with writing(folder):
        writer.close()

    def read() -> Iterator[T]:
        file.seek(0)
        reader = zstandard.ZstdDecompressor().stream_reader(file, closefd=False)
        for line in io.BufferedReader(cast(io.RawIOBase, reader), 1 << 20):
            yield from map(unpack, json.loads(line))

    return read
