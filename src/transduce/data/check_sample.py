"""Windows of consecutive records from everywhere in each corpus, for checks of the text.

A training keeps them in its single pass over the text; `take_sample` reads the text for them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from transduce.data.sources import Source, Sources, memory_source
from transduce.errors import DataError

T = TypeVar("T")

WINDOW = 200
"""Consecutive records that are kept together."""

MOST_TRAIN, MOST_HELD_OUT = 1000, 50  # windows of `take_sample`


class Windows(Generic[T]):
    """Evenly spaced windows of one corpus, kept while it is read: at most `most`, so that memory is bounded.

    `total`: records that were read. `fault`: why reading ended early; empty if it did not.
    """

    def __init__(self, source: Source[T], most: int = 20) -> None:
        self.name, self.files, self.total, self.fault = source.name, source.files, 0, ""
        self.kept = list[list[T]]()
        self._most, self._every = most, 1

    def watch(self, records: Iterable[T]) -> Iterator[T]:
        """Yield the records unchanged, and keep some of them."""
        records = iter(records)
        while window := list(islice(records, WINDOW)):
            self.see(len(window), window.__getitem__)
            yield from window

    def see(self, n: int, record: Callable[[int], T]) -> None:
        """Keep some of the next `n` records: a multiple of WINDOW, or the last ones. `record` gives one of them."""
        for start in range(0, n, WINDOW):
            end = min(start + WINDOW, n)
            if self.total // WINDOW % self._every == 0:
                self.kept.append([record(i) for i in range(start, end)])
            self.total += end - start
            if len(self.kept) > self._most:
                self.kept, self._every = self.kept[::2], 2 * self._every

    @property
    def is_whole(self) -> bool:
        """Whether every record is kept."""
        return self.total == sum(map(len, self.kept)) and not self.fault

    def some(self, n: int) -> Source[T]:
        """About `n` of the records as a source: evenly spaced windows, one at least."""
        wanted = max(1, round(n / WINDOW))
        step = max(1.0, len(self.kept) / wanted)
        chosen = [self.kept[int(i * step)] for i in range(min(wanted, len(self.kept)))]
        return memory_source(self.name, list(chain.from_iterable(chosen)), self.files)


@dataclass(frozen=True, slots=True)
class Sample(Generic[T]):
    """Windows of the training corpora and of the held-out sets."""

    train: tuple[Windows[T], ...]
    valid: tuple[Windows[T], ...] = ()
    tests: tuple[Windows[T], ...] = ()

    @property
    def total(self) -> int:
        """Number of training records."""
        return sum(corpus.total for corpus in self.train)

    @property
    def is_whole(self) -> bool:
        """Whether it contains every training record."""
        return all(corpus.is_whole for corpus in self.train)

    def records(self) -> Iterator[T]:
        """The training records that are kept."""
        return chain.from_iterable(window for corpus in self.train for window in corpus.kept)


def take_sample(sources: Sources[T]) -> Sample[T]:
    """Read all text. Text that cannot be read is a fault of its corpus, of which the beginning is kept."""
    train, valid, tests = (
        tuple(_read(source, most) for source in some)
        for some, most in ((sources.train, MOST_TRAIN), (sources.valid, MOST_HELD_OUT), (sources.tests, MOST_HELD_OUT))
    )
    return Sample(train, valid, tests)


def _read(source: Source[T], most: int) -> Windows[T]:
    windows = Windows(source, most)
    try:
        for _ in windows.watch(source.read()):
            pass
    except DataError as error:
        windows.fault = str(error)
    return windows
