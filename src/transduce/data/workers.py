"""Apply a function to chunks in worker processes, with the results in order; saved results are used again.

The result of a function depends only on its chunk. Neither the number of workers nor a kill changes the store.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import transduce
from transduce.data.spool import Arrays, ResultFile
from transduce.errors import TransduceError
from transduce.process import child_environment, collect_garbage_rarely, exit_with_parent, n_cores

ChunkT = TypeVar("ChunkT")

_FEW = 5  # with fewer chunks, starting processes takes longer than the work


@runtime_checkable
class Workers(Protocol):
    """Processes of this machine or of a cluster that compute results of chunks."""

    def map(self, function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Arrays]]:
        """Yield each chunk with its result, in order. Only a few chunks are in memory."""


@dataclass(frozen=True, slots=True)
class LocalWorkers:
    """Up to `n` processes of this machine (0: one per core), and not more than chunks.

    Little work is done in this process.
    """

    n: int = 0

    def map(self, function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT]) -> Iterator[tuple[ChunkT, Arrays]]:
        """See `Workers`. Raises `TransduceError` if a process is killed."""
        chunks, n = iter(chunks), self.n or n_cores()
        first = list(islice(chunks, max(n, _FEW)))
        n, is_little, chunks = min(n, len(first)), len(first) < _FEW, chain(first, chunks)
        del first
        if n == 1 or is_little:
            for chunk in chunks:
                yield chunk, function(chunk)
            return
        # Unlike multiprocessing's, these processes do not run the caller's script again.
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


_function: Callable[[Any], Arrays]  # of this worker process


def _start_worker(function: Callable[[Any], Arrays]) -> None:
    global _function
    _function = function
    collect_garbage_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process, which ends this one
    exit_with_parent()


def _call(chunk: Any) -> Arrays:
    return _function(chunk)


@dataclass(frozen=True, slots=True)
class Workplace:
    """Folder and workers of a preparation.

    folder: the folder for intermediate results (default: the system's temporary folder). keep: give them names, so that
    the same preparation resumes after a kill. workers: default: `data.workers` processes.
    """

    folder: Path | None = None
    keep: bool = False
    workers: Workers | None = None

    def results(self, name: str, *parts: object) -> ResultFile:
        """The file of intermediate results of this name, which `parts` and the version of transduce determine."""
        key = sha256(repr((transduce.__version__, *parts)).encode("utf-8", "surrogatepass")).hexdigest()
        return ResultFile(self.folder, f"{name}-{key[:16]}" if self.keep else "")


def compute(
    function: Callable[[ChunkT], Arrays], chunks: Iterable[ChunkT], workers: Workers, saved: ResultFile
) -> Iterator[tuple[ChunkT, Arrays]]:
    """Yield each chunk with its result, in order: first those in `saved`, then those of `workers`, which go there.

    What the caller adds to a new result is saved with it.
    """
    chunks, earlier = iter(chunks), saved.earlier()
    for chunk in chunks:
        if (result := next(earlier, None)) is not None:
            yield chunk, result
            continue
        for left, new in workers.map(function, chain([chunk], chunks)):
            yield left, new
            saved.append(new)
