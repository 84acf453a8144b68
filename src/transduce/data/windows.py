"""Windows of consecutive records, kept while a corpus is read, for checks and trials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, TypeVar

from transduce.data.reading import Source, Sources, memory_source
from transduce.data.workers import batched
from transduce.errors import DataError

T = TypeVar("T")

WINDOW = 200
"""Consecutive records that are kept together."""

MOST_TRAIN, MOST_HELD_OUT = 1000, 50  # windows of `take_sample`


class Windows(Generic[T]):
    """Evenly spaced windows of one corpus, kept while it is read: at most `most`, so that memory is bounded.

    `total`: number of records read. `fault`: reason why reading ended early, or empty.
    """

    def __init__(self, source: Source[T], most: int = 20) -> None:
        self.source, self.name, self.files, self.total, self.fault = source, source.name, source.files, 0, ""
        self.kept = list[list[T]]()
        self._most, self._every = most, 1

    def read(self) -> Iterator[T]:
        """Read the corpus, and keep some of its records."""
        for window in batched(self.source.read(), WINDOW):
            if self.total // WINDOW % self._every == 0:
                self.kept.append(window)
            self.total += len(window)
            if len(self.kept) > self._most:
                self.kept, self._every = self.kept[::2], 2 * self._every
            yield from window

    @property
    def is_whole(self) -> bool:
        return self.total == sum(map(len, self.kept)) and not self.fault

    def some(self, n: int) -> Source[T]:
        """A source of about `n` of the records: evenly spaced windows, at least one."""
        wanted = max(1, round(n / WINDOW))
        step = max(1.0, len(self.kept) / wanted)
        chosen = [self.kept[int(i * step)] for i in range(min(wanted, len(self.kept)))]
        records = list(chain.from_iterable(chosen))
        return replace(memory_source(self.name, records, self.files), direction=self.source.direction)


@dataclass(frozen=True, slots=True)
class Sample(Generic[T]):
    """Windows of the training corpora and of the held-out sets."""

    train: tuple[Windows[T], ...]
    valid: tuple[Windows[T], ...] = ()
    tests: tuple[Windows[T], ...] = ()

    @property
    def total(self) -> int:
        return sum(corpus.total for corpus in self.train)

    @property
    def is_whole(self) -> bool:
        return all(corpus.is_whole for corpus in self.train)

    def records(self) -> Iterator[T]:
        return chain.from_iterable(window for corpus in self.train for window in corpus.kept)


def take_sample(sources: Sources[T]) -> Sample[T]:
    """Read all text. If text of a corpus cannot be read, the text before it is kept and the corpus gets a `fault`."""
    train = tuple(_read(source, MOST_TRAIN) for source in sources.train)
    valid, tests = (
        tuple(_read(source, MOST_HELD_OUT) for source in held_out) for held_out in (sources.valid, sources.tests)
    )
    return Sample(train, valid, tests)


def _read(source: Source[T], most: int) -> Windows[T]:
    windows = Windows(source, most)
    try:
        for _ in windows.read():
            pass
    except DataError as error:
        windows.fault = str(error)
    return windows
