"""Batches side by side on a CPU's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

MOST_WORKERS = 4  # beyond these, threads mostly wait for each other's Python


class Workers:
    """A few threads, each with its share of the cores: small products gain little from more than one.

    With one worker, on a GPU and where PyTorch has one thread, everything happens in the caller's thread.
    """

    def __init__(self, pool: ThreadPoolExecutor | None, n_workers: int, n_threads: int) -> None:
        self._pool, self.n_workers, self._n_threads = pool, n_workers, n_threads

    def map(self, work: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """The result of `work` for each batch, in order."""
        if self._pool is None or len(batches) < 2:
            return [work(batch) for batch in batches]
        each = self._n_threads // self.n_workers

        def task(batch: Any) -> Any:
            if torch.get_num_threads() != each:  # a thread's own number; a new thread begins with the last one set
                torch.set_num_threads(each)
            return work(batch)

        try:
            return list(self._pool.map(task, batches))
        finally:
            torch.set_num_threads(self._n_threads)


@contextmanager
def workers(device: torch.device) -> Iterator[Workers]:
    """Threads for the time of a translation; what is not begun is dropped when it ends early."""
    n_threads = torch.get_num_threads()
    if device.type != "cpu" or n_threads < 2:
        yield Workers(None, 1, n_threads)
        return
    n_workers = min(MOST_WORKERS, n_threads)
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="translate")
    try:
        yield Workers(pool, n_workers, n_threads)
    finally:
        pool.shutdown(cancel_futures=True)
