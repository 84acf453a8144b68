"""Keep what has passed cleaning until it is encoded, so that the corpus itself is read only once."""

from __future__ import annotations

import contextlib
import json
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from transduce.errors import RunFolderError

T = TypeVar("T")
Stream = Callable[[], Iterator[T]]
"""Records that can be read again and again, from the start at each call."""

_CHUNK = 1000  # records compressed together


class Spool:
    """Records in an unnamed temporary file, compressed.

    The file is gone when the object is no longer used, or when the process ends, even by SIGKILL. Records are written
    in parts, of which one can be read at a time.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: whose disk to use; None: that of the system's temporary folder."""
        self._folder = folder or Path(tempfile.gettempdir())
        with self._disk():
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by the finalizer)
        weakref.finalize(self, self._file.close)

    def write(
        self, records: Iterable[T], pack: Callable[[T], list[Any]], unpack: Callable[[list[Any]], T]
    ) -> Stream[T]:
        """Write one part; the stream that reads it back. Raises `RunFolderError` where the disk is full.

        `pack` turns a record into a list of JSON values, `unpack` turns that back.
        """
        with self._disk():
            begin = self._file.seek(0, 2)
        compressor, chunk = zstandard.ZstdCompressor(level=1).compressobj(), list[list[Any]]()

        def flush() -> None:
            line = json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"
            with self._disk():
                self._file.write(compressor.compress(line))
            chunk.clear()

        n = 0
        for record in records:
            n += 1
            chunk.append(pack(record))
            if len(chunk) == _CHUNK:
                flush()
        flush()
        with self._disk():
            self._file.write(compressor.flush())
        return lambda: islice(self._read(begin, unpack), n)

    def _read(self, begin: int, unpack: Callable[[list[Any]], T]) -> Iterator[T]:
        self._file.seek(begin)
        reader = zstandard.ZstdDecompressor().stream_reader(self._file, closefd=False)
        rest = b""
        while block := reader.read(1 << 20):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                yield from map(unpack, json.loads(line))

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFolderError(f"cannot write temporary data in {self._folder}: {error.strerror or error}") from error
