"""Read labelled texts, and running text as documents, and define sources of all kinds of text.

A `Source` is the text of one corpus, in files or in memory. Tasks read sources, never paths. `Windows` keeps samples of
consecutive records while a corpus is read, for checks and trials.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from transduce.config.settings import Corpus, DataSettings, Direction, Settings
from transduce.data.lines import aligned, content_mark, format_path, read_inputs, read_lines
from transduce.data.pairs import Pair, corpus_files, read_pairs
from transduce.data.word_links import checked_links
from transduce.data.workers import batched
from transduce.errors import DataError, nearest
from transduce.text.special import Vocabulary


class Labelled(NamedTuple):
    """An example for classification: its label, one or two texts, and the file and line that it comes from."""

    label: str
    texts: tuple[str, ...]
    file: str
    line: int


def read_labelled(
    path: Path | str, vocabulary: Vocabulary | None = None, *, max_record: int | None = None
) -> Iterator[Labelled]:
    """Yield the examples of a file with lines label<TAB>text or label<TAB>text<TAB>text; `-` is standard input.

    Raises `DataError` with file and line for a line without a tab, with an empty label or text, or with a different
    number of texts than the lines before. vocabulary, max_record: see `read_inputs`.
    """
    name, n_texts = format_path(Path(path)), 0
    for number, line in enumerate(read_inputs(path, vocabulary, labelled=True, max_record=max_record), 1):
        label, *texts = line.split("\t")
        n_texts = n_texts or len(texts)
        if not texts or len(texts) > 2:
            tabs = f"{len(texts)} tabs" if texts else "no tab"
            fault = f"expected label<TAB>text or label<TAB>text<TAB>text, found {tabs}"
        elif not label.strip() or not all(text.strip() for text in texts):
            fault = f"the {'text' if label.strip() else 'label'} is empty"
        elif len(texts) != n_texts:
            fault = f"{len(texts)} texts, but the lines before have {n_texts}"
        else:
            yield Labelled(label.strip(), tuple(texts), name, number)
            continue
        raise DataError(f"{name}, line {number}: {fault}")


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort distinct labels: numerically if all are integers, or else alphabetically."""
    distinct = set(labels)
    if all(label.removeprefix("-").isdecimal() for label in distinct):
        return tuple(sorted(distinct, key=lambda label: (int(label), label)))
    return tuple(sorted(distinct))


def number_of(example: Labelled, labels: Sequence[str]) -> int:
    """The index of an example's label. Raises `DataError` with file and line for an unknown label."""
    try:
        return labels.index(example.label)
    except ValueError:
        hint = nearest(example.label, labels)
        raise DataError(
            f"{example.file}, line {example.line}: unknown label {example.label!r}{hint}; known: {', '.join(labels)}"
        ) from None


class Piece(NamedTuple):
    """A piece of running text, such as a line, and whether its document ends after it."""

    text: str
    ends: bool = False


Pieces = Iterator[Piece]


def read_pieces(path: Path | str, documents: str) -> Pieces:
    """Read a file (`-`: standard input) as documents. `documents`: a key of `DOCUMENTS`, such as blank_line."""
    return DOCUMENTS[documents](read_lines(path))


def _documents(lines: Iterator[str], *, blank_line: bool) -> Pieces:
    """Read one document or, if `blank_line`, documents between blank lines, without the line end before these."""
    last = None
    for line in lines:
        ends = blank_line and not line.strip()
        if last is not None:
            yield Piece(last.removesuffix("\n") if ends else last, ends)
        last = None if ends else f"{line}\n"
    if last is not None:
        yield Piece(last.removesuffix("\n") if blank_line else last, ends=True)


def _line(lines: Iterator[str]) -> Pieces:
    """Read each line that is not blank as a document, without its line end."""
    return (Piece(line, ends=True) for line in lines if line.strip())


DOCUMENTS: dict[str, Callable[[Iterator[str]], Pieces]] = {
    "file": partial(_documents, blank_line=False),
    "blank_line": partial(_documents, blank_line=True),
    "line": _line,
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source(Generic[T]):
    """The text of one corpus: `Pair`s, `Labelled` texts, or lines of running text without their line ends.

    `read`: starts at the beginning in each call, and raises `DataError` with file and line for text that cannot be
    read. `files`: names of the files, for reports. `mark`: returns a hash of the content of the files (`content_mark`).
    `direction`: the languages of sentence pairs.
    """

    name: str
    read: Callable[[], Iterator[T]]
    files: tuple[str, ...] = ()
    mark: Callable[[], bytes] = bytes
    direction: Direction = ("src", "tgt")


@dataclass(frozen=True, slots=True)
class Sources(Generic[T]):
    """The text of a run. If `valid` is empty, a part of the training text is held out for validation."""

    train: tuple[Source[T], ...]
    valid: tuple[Source[T], ...] = ()
    tests: tuple[Source[T], ...] = ()


def with_links(source: Source[Pair], path: Path) -> Source[Pair]:
    """Give each pair its word links, from a file in Pharaoh format."""

    def read() -> Iterator[Pair]:
        for number, pair, line in aligned(source.read(), read_lines(path), (source.name, path)):
            if not pair.fault:
                checked_links(line, pair.src, pair.tgt, f"{path}, line {number}")
            yield pair._replace(links=line)

    files = (*source.files, path.name)
    return replace(source, read=read, files=files, mark=lambda: source.mark() + content_mark(path))


def memory_source(name: str, records: Sequence[T], files: tuple[str, ...] = ()) -> Source[T]:
    """Make a source of records in memory, such as a sample of a file. `files`: their names, for reports."""
    return Source(name, lambda: iter(records), files)


def pair_sources(settings: Settings) -> Sources[Pair]:
    data = settings.data
    return _file_sources(data, lambda corpus, held_out: read_pairs(corpus, data, held_out=held_out))


def line_sources(settings: Settings) -> Sources[str]:
    data = settings.data
    return _file_sources(data, lambda corpus, _: read_lines(_path(corpus), data.max_record))


def labelled_sources(settings: Settings) -> Sources[Labelled]:
    data = settings.data
    return _file_sources(data, lambda corpus, _: read_labelled(_path(corpus), max_record=data.max_record))


def _file_sources(data: DataSettings, read: Callable[[Corpus, bool], Iterator[T]]) -> Sources[T]:
    """Make sources of the corpora in the settings. `read`: reads a corpus; the bool says whether it is held out."""

    def source(corpus: Corpus, *, held_out: bool) -> Source[T]:
        files = corpus_files(corpus)
        names, mark = tuple(path.name for path in files), lambda: b"".join(map(content_mark, files))
        return Source(" + ".join(names), lambda: read(corpus, held_out), names, mark, data.direction_of(corpus))

    train = tuple(source(corpus, held_out=False) for corpus in data.train)
    valid, tests = (tuple(source(corpus, held_out=True) for corpus in part) for part in (data.valid, data.test))
    return Sources(train, valid, tests)


def _path(corpus: Corpus) -> Path:
    assert corpus.path is not None, "tasks on one-sided text check this"
    return corpus.path


WINDOW = 200
"""Number of consecutive records that are kept together."""

MOST_TRAIN, MOST_HELD_OUT = 1000, 50  # maximum windows per corpus in `take_sample`


class Windows(Generic[T]):
    """Evenly spaced samples of consecutive records, kept while a corpus is read.

    `most`: maximum number of samples, which bounds the memory. `total`: number of records read. `fault`: reason why
    reading ended early, or empty.
    """

    def __init__(self, source: Source[T], most: int = 20) -> None:
        self.source, self.name, self.files, self.total, self.fault = source, source.name, source.files, 0, ""
        self.kept = list[list[T]]()
        self._most, self._every = most, 1

    def read(self) -> Iterator[T]:
        """Yield the records of the corpus, and keep some of them."""
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
        """Return a source of about `n` of the kept records: evenly spaced windows, at least one."""
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
    """Read all text and keep a sample. If some text cannot be read, its corpus ends there and has a `fault`."""
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
