"""Apply a function to chunks in worker processes, with the results in order, and keep results for a resume.

The result of a function depends only on its chunk. Neither the number of workers nor a kill changes the store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from transduce.errors import RunFolderError, TransduceError
from transduce.process import n_cores, send_at_parent_exit

Arrays = dict[str, np.ndarray]
ChunkT = TypeVar("ChunkT")
ContraT = TypeVar("ContraT", contravariant=True)

_FEW = 5  # with fewer chunks, starting processes takes longer than the work
_HEADER = struct.Struct("<QI")  # bytes of a result, and their CRC-32


@runtime_checkable
class ChunkFunction(Protocol[ContraT]):
    """A function of a chunk that can be sent to other processes.

    `key` identifies function and chunk; it is in the result under this name.
    """

    def __call__(self, chunk: ContraT, /) -> Arrays: ...

    def key(self, chunk: ContraT, /) -> bytes: ...


@runtime_checkable
class Workers(Protocol):
    """Processes of this machine or of a cluster that compute results of chunks."""

    def map(self, function: ChunkFunction[ChunkT], chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Arrays]]:
        """Yield each chunk with its result, in order. Only a few chunks are in memory."""


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """Up to `n` processes of this machine (0: one per core). Little work is done in this process."""

    n: int = 0

    def map(self, function: ChunkFunction[ChunkT], chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Arrays]]:
        """See `Workers`. Raises `TransduceError` if a process is killed."""
        chunks, n = iter(chunks), self.n or n_cores()
        first = list(islice(chunks, _FEW))
        chunks = chain(first, chunks)
        if n == 1 or len(first) < _FEW:
            for chunk in chunks:
                yield chunk, function(chunk)
            return
        # Unlike multiprocessing's, these processes do not run the caller's script again.
        from loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

        one_thread = {"OMP_NUM_THREADS": "1"}
        pool = ProcessPoolExecutor(n, initializer=_start_worker, initargs=(function, os.getpid()), env=one_thread)
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


_function: ChunkFunction[Any]  # of this worker process


def _start_worker(function: ChunkFunction[Any], parent: int) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends this one
    send_at_parent_exit(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _call(chunk: Any) -> Arrays:
    return _function(chunk)


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where text is prepared.

    folder: the folder for intermediate results (default: the system's temporary folder). keep: give them names, so that
    the same preparation resumes after a kill. workers: default: `data.workers` processes.
    """

    folder: Path | None = None
    keep: bool = False
    workers: Workers | None = None

    def results(self, name: str) -> ResultFile:
        """The file of intermediate results of this name."""
        return ResultFile(self.folder, name if self.keep else "")


class ResultFile:
    """Results of chunks, in order. Raises `RunFolderError` where the disk is full.

    A file without a name is gone when it is no longer used, or when the process ends, even by SIGKILL. In one with a
    name, results that an earlier process has written are used again if their keys are the same; what follows the first
    other or damaged one is cut off.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._folder, self.ends = folder, [0]  # of each result in the file
        with writing(folder):
            self._file: IO[bytes] = (
                (folder / name).open("a+b") if folder and name else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            )
        self._is_used_up = False

    def __len__(self) -> int:
        return len(self.ends) - 1

    def reuse(self, key: Callable[[], bytes]) -> Arrays | None:
        """The next result of an earlier process if it has this key."""
        if self._is_used_up:
            return None
        found = self._read(self.ends[-1])
        if found is None or found["key"].tobytes() != key():
            self._is_used_up = True
            with writing(self._folder):
                self._file.truncate(self.ends[-1])
            return None
        self.ends.append(self._file.tell())
        return found

    def append(self, result: Arrays) -> None:
        """Write a result."""
        data = save(result)
        with writing(self._folder):
            self._file.seek(self.ends[-1])
            self._file.write(_HEADER.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
        self.ends.append(self._file.tell())

    def read(self, numbers: Iterable[int]) -> Iterator[Arrays]:
        """The results with these numbers."""
        for number in numbers:
            found = self._read(self.ends[number])
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


def compute(
    function: ChunkFunction[ChunkT], chunks: Iterable[ChunkT], workers: Workers, saved: ResultFile | None
) -> Iterator[tuple[ChunkT, Arrays]]:
    """Yield each chunk with its result, in order, from `saved`, if there is such a file, or by `workers`.

    What the caller adds to a new result is saved with it.
    """
    if saved is None:
        yield from workers.map(function, chunks)
        return
    chunks = iter(chunks)
    for chunk in chunks:
        found = saved.reuse(lambda chunk=chunk: function.key(chunk))  # type: ignore[misc]
        if found is None:
            for left, result in workers.map(function, chain([chunk], chunks)):
                yield left, result
                saved.append(result)
            return
        yield chunk, found


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """Inside, temporary data is written: a failure becomes a one-line `RunFolderError`."""
    try:
        yield
    except OSError as error:
        where = folder or tempfile.gettempdir()
        raise RunFolderError(f"cannot write temporary data in {where}: {error.strerror or error}") from error
