"""Where training text comes from: files, or records in memory.

A task reads `Source`s, never paths. A source gives records: `Pair` (translation), `Labelled` (classification) or `str`,
a line without its end (running text).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

from transduce.config import Corpus, DataSettings
from transduce.data.corpus import Pair, corpus_files, corpus_name, read_pairs
from transduce.data.labelled import Labelled, read_labelled
from transduce.data.lines import Digests, bare_suffix, digest, read_lines

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Source(Protocol[T_co]):
    """Text of one corpus. Each call of `read` starts at the beginning."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files, for reports."""

    def read(self) -> Iterator[T_co]:
        """The records in order. Raises `DataError` with file and line for text that cannot be read."""

    def digest(self) -> bytes:
        """A fingerprint of the content."""


Reader = Callable[[Corpus, Digests], Iterator[T]]


@dataclass(frozen=True, slots=True)
class FileSource(Generic[T]):
    """The files of a corpus. They are hashed while they are read."""

    corpus: Corpus
    reader: Reader[T]
    has_format: bool = False
    """Whether the suffix of the file decides how it is read."""
    _digests: Digests = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file names, joined by +."""
        return corpus_name(self.corpus)

    @property
    def files(self) -> tuple[str, ...]:
        """The file names."""
        return tuple(path.name for path in corpus_files(self.corpus))

    def read(self) -> Iterator[T]:
        """The records of the files."""
        return self.reader(self.corpus, self._digests)

    def digest(self) -> bytes:
        """The format, where the suffix decides it, and the sha256 of each file, as it was when it was last read."""
        parts = []
        for path in corpus_files(self.corpus):
            if self.has_format:
                parts.append(f"{bare_suffix(path) if path == self.corpus.path else 'text'}\n".encode())
            parts.append(self._digests.get(path) or digest(path))
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class MemorySource(Generic[T]):
    """Records in memory, such as a sample of a file. Their places, where they have any, are what errors name."""

    name: str
    records: Sequence[T]
    files: tuple[str, ...] = ()

    def read(self) -> Iterator[T]:
        """The records."""
        return iter(self.records)

    def digest(self) -> bytes:
        """Nothing: what is in memory has no file to compare with later."""
        return b""


@dataclass(frozen=True, slots=True)
class Sources(Generic[T]):
    """The text of a run: training corpora, validation corpora (none: hold out training text) and test sets."""

    train: tuple[Source[T], ...]
    valid: tuple[Source[T], ...] = ()
    tests: tuple[Source[T], ...] = ()


def pair_sources(data: DataSettings) -> Sources[Pair]:
    """The sentence pairs that the settings name."""

    def reader(corpus: Corpus, digests: Digests) -> Iterator[Pair]:
        return read_pairs(corpus, src_lang=data.src_lang, tgt_lang=data.tgt_lang, digests=digests)

    return _sources(data, reader, has_format=True)


def line_sources(data: DataSettings) -> Sources[str]:
    """The lines of plain text that the settings name."""
    return _sources(data, lambda corpus, digests: read_lines(_path(corpus), digests))


def labelled_sources(data: DataSettings) -> Sources[Labelled]:
    """The labelled texts that the settings name."""
    return _sources(data, lambda corpus, digests: read_labelled(_path(corpus), digests))


def _sources(data: DataSettings, reader: Reader[T], *, has_format: bool = False) -> Sources[T]:
    train, valid, tests = (
        tuple(FileSource(corpus, reader, has_format) for corpus in corpora)
        for corpora in (data.train, data.valid, data.test)
    )
    return Sources(train, valid, tests)


def _path(corpus: Corpus) -> Path:
    assert corpus.path is not None, "tasks on one-sided text check this"
    return corpus.path
