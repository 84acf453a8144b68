"""Where training text comes from: files or memory. Tasks read sources, never paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from transduce.config.settings import Corpus, DataSettings, Settings
from transduce.data.corpus import (
    Labelled,
    Pair,
    RawPairs,
    corpus_files,
    corpus_name,
    read_labelled,
    read_pairs,
    read_raw_pairs,
)
from transduce.data.lines import Digests, bare_suffix, open_bytes, read_lines

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """Text of one corpus: `Pair`s, `Labelled` texts, or lines of running text without their ends.

    Each call of `read` starts at the beginning, and raises `DataError` with file and line for text that cannot be read.
    `files`: their names, for reports. `digest`: a fingerprint of the content of the files, if there are any.
    `read_raw`: reads pairs in chunks of a size without decoding them, if that is possible.
    """

    name: str
    read: Callable[[], Iterator[T]]
    files: tuple[str, ...] = ()
    digest: Callable[[], bytes] = bytes
    read_raw: Callable[[int], Iterator[RawPairs]] | None = None


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

    def reader(corpus: Corpus, digests: Digests) -> Iterator[Pair]:
        return read_pairs(corpus, src_lang=data.src_lang, tgt_lang=data.tgt_lang, digests=digests)

    return _file_sources(data, reader, has_format=True)


def line_sources(settings: Settings) -> Sources[str]:
    """The lines of plain text that the settings name."""
    return _file_sources(settings.data, lambda corpus, digests: read_lines(_path(corpus), digests))


def labelled_sources(settings: Settings) -> Sources[Labelled]:
    """The labelled texts that the settings name."""
    return _file_sources(settings.data, lambda corpus, digests: read_labelled(_path(corpus), digests=digests))


Reader = Callable[[Corpus, Digests], Iterator[T]]


def _file_sources(data: DataSettings, reader: Reader[T], *, has_format: bool = False) -> Sources[T]:
    train, valid, tests = (
        tuple(_file_source(corpus, reader, has_format) for corpus in corpora)
        for corpora in (data.train, data.valid, data.test)
    )
    return Sources(train, valid, tests)


def _file_source(corpus: Corpus, reader: Reader[T], has_format: bool) -> Source[T]:
    """The files of a corpus, which are hashed while they are read. `has_format`: the suffix decides how."""
    files, digests = corpus_files(corpus), Digests()

    def digest() -> bytes:
        parts = []
        for path in files:
            if has_format:
                parts.append(f"{bare_suffix(path) if path == corpus.path else 'text'}\n".encode())
            if path not in digests:
                with open_bytes(path, digests):
                    pass  # hashed to its end on leaving
            parts.append(digests[path])
        return b"".join(parts)

    names = tuple(path.name for path in files)
    source, (src, tgt) = (
        Source(corpus_name(corpus), lambda: reader(corpus, digests), names, digest),
        (corpus.src, corpus.tgt),
    )
    if src is None or tgt is None:
        return source
    return replace(source, read_raw=lambda n: read_raw_pairs(src, tgt, digests, n=n))


def _path(corpus: Corpus) -> Path:
    assert corpus.path is not None, "tasks on one-sided text check this"
    return corpus.path
