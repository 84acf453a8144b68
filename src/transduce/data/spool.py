"""Intermediate results on disk: what has passed cleaning, until it is encoded, so that the corpus is read only once."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from transduce.data.lines import zstd
from transduce.errors import RunFolderError, cannot_write

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
Stream = Callable[[], Iterator[T]]
"""Records that can be read again and again, from the start at each call."""

_HEADER = struct.Struct("<QI")  # bytes of a result, and their CRC-32
_CHUNK = 1000  # records compressed together


class ResultFile:
    """Results in order. Raises `RunFolderError` where the disk is full.

    A file without a name is gone when it is no longer used, or when the process ends, even by SIGKILL. `earlier` gives
    what is in one with a name.
    """

    def __init__(self, folder: Path | None, name: str = "") -> None:
        """`folder`: None for that of temporary files."""
        self._folder, self._ends = folder, [0]  # of each result in the file
        with writing(folder):
            self._file: IO[bytes] = (
                (folder / name).open("a+b") if folder and name else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            )

    def __len__(self) -> int:
        return len(self._ends) - 1

    def earlier(self) -> Iterator[Arrays]:
        """The results that an earlier process has written. A damaged one and what follows it are cut off."""
        while (found := self._read(self._ends[-1])) is not None:
            self._ends.append(self._file.tell())
            yield found
        with writing(self._folder):
            self._file.truncate(self._ends[-1])

    def append(self, result: Arrays) -> None:
        """Write a result."""
        data = save(result)
        with writing(self._folder):
            self._file.seek(self._ends[-1])
            self._file.write(_HEADER.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
        self._ends.append(self._file.tell())

    def read(self, numbers: Iterable[int]) -> Iterator[Arrays]:
        """The results with these numbers."""
        for number in numbers:
            found = self._read(self._ends[number])
            if found is None:
                raise RunFolderError(f"temporary data in {self._folder or tempfile.gettempdir()} is damaged")
            yield found

    def _read(self, start: int) -> Arrays | None:
        self._file.seek(start)
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        size, checksum = _HEADER.unpack(header)
        data = self._file.read(size)
        if len(data) < size or zlib.crc32(data) != checksum:
            return None
        with contextlib.suppress(SafetensorError):
            return load(data)
        return None


def spooled(records: Iterable[T], folder: Path | None, unpack: Callable[[list[Any]], T]) -> Stream[T]:
    """Write records, tuples of JSON values, into a temporary file in `folder`; the stream that reads them back.

    `unpack` turns a list of the values into a record. Raises `RunFolderError` where the disk is full.
    """
    file, records = ResultFile(folder), iter(records)
    while chunk := list(islice(records, _CHUNK)):
        file.append({"records": compressed(json.dumps(chunk, ensure_ascii=False))})

    def read() -> Iterator[T]:
        for result in file.read(range(len(file))):
            yield from map(unpack, json.loads(decompressed(result["records"])))

    return read


def compressed(text: str) -> np.ndarray:
    """Text as an array of bytes."""
    return np.frombuffer(zstd.compress(text.encode("utf-8", "surrogatepass"), 1), np.uint8)


def decompressed(data: np.ndarray) -> str:
    """The text in an array."""
    return zstd.decompress(data.tobytes()).decode("utf-8", "surrogatepass")


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Inside, temporary data is written: a failure becomes a one-line `RunFolderError`."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise cannot_write(f"temporary data in {where}", error) from error
