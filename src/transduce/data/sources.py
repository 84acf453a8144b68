"""Sources of training text: files or memory. Tasks read sources, never paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.corpus import (
    Labelled,
    Pair,
    PairColumns,
    corpus_files,
    corpus_name,
    read_columns,
    read_labelled,
    read_pairs,
)
from transduce.data.lines import content_mark, read_lines
from transduce.text.vectors import is_vectors

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """Text of one corpus: `Pair`s, `Labelled` texts, or lines of running text without their ends.

    Each call of `read` starts at the beginning, and raises `DataError` with file and line for text that cannot be read.
    `files`: their names, for reports. `mark`: changes with the content of the files (`content_mark`). `columns`: for
    two text files, reads the given number of pairs at a time.
    """

    name: str
    read: Callable[[], Iterator[T]]
    files: tuple[str, ...] = ()
    mark: Callable[[], bytes] = bytes
    columns: Callable[[int], Iterator[PairColumns]] | None = None


@dataclass(frozen=True, slots=True)
class Sources(Generic[T]):
    """The text of a run: training corpora, validation corpora (none: hold out training text) and test sets."""

    train: tuple[Source[T], ...]
    valid: tuple[Source[T], ...] = ()
    tests: tuple[Source[T], ...] = ()


def memory_source(name: str, records: Sequence[T], files: tuple[str, ...] = ()) -> Source[T]:
    """Records in memory, such as a sample of a file. Their places, where they have any, are what errors name."""
    return Source(name, lambda: iter(records), files)


def pair_sources(settings: Settings) -> Sources[Pair]:
    """The sentence pairs of the files that the settings name."""
    data = settings.data

    def read(corpus: Corpus) -> Iterator[Pair]:
        return read_pairs(corpus, src_lang=data.src_lang, tgt_lang=data.tgt_lang)

    return _file_sources(data, read)


def line_sources(settings: Settings) -> Sources[str]:
    """The lines of plain text that the settings name."""
    return _file_sources(settings.data, lambda corpus: read_lines(_path(corpus)))


def labelled_sources(settings: Settings) -> Sources[Labelled]:
    """The labelled texts that the settings name."""
    return _file_sources(settings.data, lambda corpus: read_labelled(_path(corpus)))


def _file_sources(data: DataSettings, read: Callable[[Corpus], Iterator[T]]) -> Sources[T]:
    def source(corpus: Corpus) -> Source[T]:
        files = corpus_files(corpus)
        names = tuple(path.name for path in files)
        columns = None
        if corpus.src and corpus.tgt and not is_vectors(corpus.src):
            columns = partial(read_columns, corpus.src, corpus.tgt)
        return Source(
            corpus_name(corpus), lambda: read(corpus), names, lambda: b"".join(map(content_mark, files)), columns
        )

    train, valid, tests = (tuple(map(source, corpora)) for corpora in (data.train, data.valid, data.test))
    return Sources(train, valid, tests)


def _path(corpus: Corpus) -> Path:
    assert corpus.path is not None, "tasks on one-sided text check this"
    return corpus.path
