"""Apply a function to chunks of text in worker processes. Results are in order, and saved results are reused.

The result of the function depends only on its chunk. Neither the number of workers nor a kill changes the store.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from safetensors.numpy import load, save

import transduce
from transduce.data.lines import zstd
from transduce.errors import RunFolderError, TransduceError, cannot_write
from transduce.process import child_environment, collect_garbage_rarely, exit_with_parent, n_cores

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
Stream = Callable[[], Iterator[T]]
"""A function that yields all records, from the start at each call."""

_HEADER = struct.Struct("<QI")  # number of bytes of a result, and their CRC-32
_CHUNK = 1000  # records compressed together


class ResultFile:
    """A file of results, in order. Raises `RunFolderError` if the disk is full.

    A file without a name is deleted when it is closed or the process ends, even by SIGKILL. A file with a name is
    kept; `earlier` yields its results.
    """

    def __init__(self, folder: Path | None, name: str = "") -> None:
        """`folder`: the file's folder, or None for the system's folder for temporary files."""
        self._folder, self._ends = folder, [0]  # offset of each result's end in the file
        with writing(folder):
            self._file: IO[bytes] = (
                (folder / name).open("a+b") if folder and name else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            )

    def __len__(self) -> int:
        return len(self._ends) - 1

    def earlier(self) -> Iterator[Arrays]:
        """Yield the results of an earlier process. The file is truncated at the first damaged result."""
        while (result := self._read(self._ends[-1])) is not None:
            self._ends.append(self._file.tell())
            yield result
        with writing(self._folder):
            self._file.truncate(self._ends[-1])

    def append(self, result: Arrays) -> None:
        data = save(result)
        with writing(self._folder):
            self._file.seek(self._ends[-1])
            self._file.write(_HEADER.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
        self._ends.append(self._file.tell())

    def read(self, numbers: Iterable[int]) -> Iterator[Arrays]:
        for number in numbers:
            result = self._read(self._ends[number])
            if result is None:
                raise RunFolderError(f"temporary data in {self._folder or tempfile.gettempdir()} is damaged")
            yield result

    def _read(self, start: int) -> Arrays | None:
        """Read the result at offset `start`. Returns None at the end of the file, or if the result is damaged."""
        self._file.seek(start)
        size, checksum = _HEADER.unpack(self._file.read(_HEADER.size).ljust(_HEADER.size, b"\0"))
        data = self._file.read(size)
        return load(data) if data and zlib.crc32(data) == checksum else None


def spooled(records: Iterable[T], folder: Path | None, unpack: Callable[[list[Any]], T]) -> Stream[T]:
    """Write records, tuples of JSON values, into a temporary file in `folder`. Returns a stream that reads them.

    `unpack` turns a list of JSON values into a record. Raises `RunFolderError` if the disk is full.
    """
    file = ResultFile(folder)
    for chunk in batched(records, _CHUNK):
        file.append({"records": compressed(json.dumps(chunk, ensure_ascii=False))})

    def read() -> Iterator[T]:
        for result in file.read(range(len(file))):
            yield from map(unpack, json.loads(decompressed(result["records"])))

    return read


def batched(records: Iterable[T], n: int) -> Iterator[list[T]]:
    """Yield the records in lists of `n`. The last list may be shorter."""
    records = iter(records)
    while batch := list(islice(records, n)):
        yield batch


def compressed(text: str) -> np.ndarray:
    return np.frombuffer(zstd.compress(text.encode("utf-8", "surrogatepass"), 1), np.uint8)


def decompressed(data: np.ndarray) -> str:
    return zstd.decompress(data.tobytes()).decode("utf-8", "surrogatepass")


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Context manager that turns a failure to write temporary data into a one-line `RunFolderError`."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise cannot_write(f"temporary data in {where}", error) from error


ChunkT = TypeVar("ChunkT")

_FEW = 5  # with fewer chunks, starting processes takes longer than the work


def _map(
    function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT], n_workers: int
) -> Iterator[tuple[ChunkT, Arrays]]:
    """Yield each chunk with its result, in order. Only a few chunks are in memory.

    Up to `n_workers` processes (0: one per core) compute the results. If there are few chunks, this process computes
    them. Raises `TransduceError` if a process is killed.
    """
    chunks, n = iter(chunks), n_workers or n_cores()
    first = list(islice(chunks, max(n, _FEW)))
    n, is_little, chunks = min(n, len(first)), len(first) < _FEW, chain(first, chunks)
    del first
    if n == 1 or is_little:
        for chunk in chunks:
            yield chunk, function(chunk)
        return
    # Unlike the processes of multiprocessing, these do not run the caller's script again.
    from loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

    environment = {**child_environment(), "OMP_NUM_THREADS": "1"}
    pool = ProcessPoolExecutor(n, initializer=_start_worker, initargs=(function,), env=environment)
    waiting: deque[tuple[ChunkT, Any]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(_call, chunk)))
            if len(waiting) > 2 * n:
                done, result = waiting.popleft()
                yield done, result.result()
        for done, result in waiting:
            yield done, result.result()
    except BaseException as error:
        pool.shutdown(kill_workers=True)
        if isinstance(error, BrokenProcessPool):
            raise TransduceError(
                "a worker process was killed, perhaps because memory ran out; lower data.workers "
                f"({n}); the same command resumes"
            ) from error
        raise
    pool.shutdown()


_function: Callable[[Any], Arrays]  # the function of this worker process


def _start_worker(function: Callable[[Any], Arrays]) -> None:
    global _function
    _function = function
    collect_garbage_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the main process, which ends this worker
    exit_with_parent()


def _call(chunk: Any) -> Arrays:
    return _function(chunk)


@dataclass(frozen=True, slots=True)
class Workplace:
    """Folder and number of processes for the preparation of text.

    folder: The folder for intermediate results (default: the system's temporary folder). keep: Keep their files, so
    that the preparation resumes after a kill. n_workers: Number of processes that clean and encode sentence pairs
    (0: one per core).
    """

    folder: Path | None = None
    keep: bool = False
    n_workers: int = 0

    def results(self, name: str, *parts: object) -> ResultFile:
        """Open the file of intermediate results with this name.

        Results that depend on different `parts`, or another version of transduce, are in different files.
        """
        key = sha256(repr((transduce.__version__, *parts)).encode("utf-8", "surrogatepass")).hexdigest()
        return ResultFile(self.folder, f"{name}-{key[:16]}" if self.keep else "")


def compute(
    function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT], saved: ResultFile, *, n_workers: int
) -> Iterator[tuple[ChunkT, Arrays]]:
    """Yield each chunk with its result, in order. Results in `saved` are reused, and new results are added to it.

    A new result is saved after the caller has received it, with any value that the caller puts into it.
    """
    chunks, earlier = iter(chunks), saved.earlier()
    for chunk in chunks:
        if (result := next(earlier, None)) is not None:
            yield chunk, result
            continue
        for left, new in _map(function, chain([chunk], chunks), n_workers):
            yield left, new
            saved.append(new)
