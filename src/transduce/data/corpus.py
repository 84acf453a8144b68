"""Read sentence pairs from two text files, TSV, JSON lines or TMX, and labelled texts; each with its file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat, zip_longest
from pathlib import Path
from typing import NamedTuple

from transduce.config.settings import Corpus, DataSettings
from transduce.data.arrow import arrow_files, is_dataset, read_arrow, read_parquet
from transduce.data.json_lines import read_json_lines
from transduce.data.lines import (
    COMPRESSIONS,
    EncodedLines,
    aligned,
    bare_suffix,
    format_path,
    read_encoded,
    read_inputs,
    read_lines,
)
from transduce.data.tmx import read_tmx
from transduce.errors import DataError, SettingsError, nearest
from transduce.text.special import Vocabulary
from transduce.text.vectors import is_vectors, open_vectors

PairReader = Callable[[Path, str, str], Iterator[tuple[int, str, str]]]
"""Reads a file, given the language codes of source and target: the line, the source and the target of each pair."""


def read_tsv(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each pair: the first two columns, or those that a header names by language.

    There is no quoting. A blank line is a pair with two empty sides.
    """
    n, first, src, tgt = 0, 0, 0, 1
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if not n and line.strip():
            if len(fields) < 2:
                raise DataError(f"{format_path(path)}, line {number}: no tab; expected source<TAB>target")
            n, first, names = len(fields), number, [field.strip().lower() for field in fields]
            if src_lang.lower() in names and tgt_lang.lower() in names:
                src, tgt = names.index(src_lang.lower()), names.index(tgt_lang.lower())
                continue
        if len(fields) != n and line.strip():
            raise DataError(
                f"{format_path(path)}, line {number}: line {first} has {n} columns, this line has {len(fields)}"
            )
        yield (number, fields[src], fields[tgt]) if len(fields) == n else (number, "", "")


PAIR_FORMATS: dict[str, PairReader] = {
    ".tsv": read_tsv,
    ".jsonl": read_json_lines,
    ".tmx": read_tmx,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
"""By suffix. A new format is a module with such a function, an entry here and, perhaps, in `NOT_BY_LINE`."""
NOT_BY_LINE = (".tmx", ".parquet", ".arrow")
"""Formats in which the first lines of a file are not a shorter file of the format."""


class Pair(NamedTuple):
    """A source sentence, its translation, and the file and line that they come from.

    links: between their words, in Pharaoh format (`data.word_links`), where the run has an alignment.
    """

    src: str
    tgt: str
    file: str
    line: int
    links: str = ""

    @property
    def where(self) -> str:
        """File and line for people."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class PairColumns:
    """Consecutive pairs of one file: faster to read, and to send to another process, than as many `Pair`s.

    links: of each pair; empty where none has any.
    """

    file: str
    src: Sequence[str] | EncodedLines
    tgt: Sequence[str] | EncodedLines
    lines: Sequence[int]
    links: Sequence[str] = ()

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> PairColumns:
        """The columns of at least one pair."""
        src, tgt, files, lines, links = zip(*pairs, strict=True)
        return cls(files[0], src, tgt, lines, links)

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Pair]:
        return map(Pair, self.src, self.tgt, repeat(self.file), self.lines, self.links or repeat(""))

    def pair(self, i: int) -> Pair:
        """One of the pairs."""
        return Pair(self.src[i], self.tgt[i], self.file, self.lines[i], self.links[i] if self.links else "")


class Labelled(NamedTuple):
    """One example: its label, one or two texts, and the file and line that it comes from."""

    label: str
    texts: tuple[str, ...]
    place: tuple[str, int]


def read_pairs(corpus: Corpus, *, src_lang: str, tgt_lang: str) -> Iterator[Pair]:
    """Yield the pairs of a corpus in order, including pairs with an empty side.

    The language codes select the sides of TSV, JSONL and TMX files. Raises `DataError` with file and line for text that
    cannot be read, and immediately a `SettingsError` for a file of an unknown format.
    """
    if corpus.path is None:
        assert corpus.src is not None and corpus.tgt is not None, "Corpus checks that it names either both or path"
        names = format_path(corpus.src), format_path(corpus.tgt)
        lines = aligned(read_inputs(corpus.src), read_lines(corpus.tgt), names)
        return (Pair(src, tgt, names[0], line) for line, src, tgt in lines)
    file = format_path(corpus.path)
    found = PAIR_FORMATS.get(".arrow" if is_dataset(corpus.path) else bare_suffix(corpus.path))
    if found is None:
        known, packed = ", ".join(PAIR_FORMATS), ", ".join(COMPRESSIONS)
        raise SettingsError(
            f"{file}: unknown format; known: {known} (also {packed}), a saved dataset, or two files src and tgt"
        )
    return (Pair(src, tgt, file, line) for line, src, tgt in found(corpus.path, src_lang, tgt_lang))


def columns_of(pairs: Iterable[Pair], n: int) -> Iterator[PairColumns]:
    """The pairs of one file, `n` at a time."""
    pairs = iter(pairs)
    while some := list(islice(pairs, n)):
        yield PairColumns.of(some)


def read_columns(src: Path, tgt: Path, n: int) -> Iterator[PairColumns]:
    """The pairs that `read_pairs` yields of two text files, `n` at a time."""
    sides = zip_longest(read_encoded(src, n), read_encoded(tgt, n), fillvalue=())
    names = format_path(src), format_path(tgt)
    try:
        for first, (srcs, tgts) in zip(count(1, n), sides, strict=False):
            if len(srcs) != len(tgts):
                raise DataError(f"{names[0]} and {names[1]} have different numbers of lines")
            yield PairColumns(names[0], srcs, tgts, range(first, first + len(srcs)))
    except DataError:
        for _ in aligned(read_lines(src), read_lines(tgt), names):
            pass  # until the first error of the two files, which names its line
        raise


def read_labelled(path: Path | str, vocabulary: Vocabulary | None = None) -> Iterator[Labelled]:
    """Yield the examples of a file (also .gz, .xz, .zst; `-`: standard input). All have one text, or all have two.

    Raises `DataError` with file and line for a line without a tab, with an empty label or text, or with another number
    of texts than the lines before. A file of vectors gives the names of its sequences and their labels, unless the
    model's `vocabulary` encodes text.
    """
    name = format_path(Path(path))
    if (vectors := open_vectors(path, vocabulary)) is not None:
        for number, (label, text) in enumerate(zip(vectors.labels, vectors.names, strict=True), 1):
            yield Labelled(label, (text,), (name, number))
        return
    n_texts = 0
    for number, line in enumerate(read_lines(path), 1):
        label, *texts = line.split("\t")
        n_texts = n_texts or len(texts)
        if not texts or len(texts) > 2:
            found = "no tab" if not texts else f"{len(texts)} tabs"
            fault = f"expected label<TAB>text or label<TAB>text<TAB>text, found {found}"
        elif not label.strip() or not all(text.strip() for text in texts):
            fault = f"the {'text' if label.strip() else 'label'} is empty"
        elif len(texts) != n_texts:
            fault = f"{len(texts)} texts, but the lines before have {n_texts}"
        else:
            yield Labelled(label.strip(), tuple(texts), (name, number))
            continue
        raise DataError(f"{name}, line {number}: {fault}")


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort labels: numerically if all are whole numbers, else alphabetically."""
    found = set(labels)
    if all(label.removeprefix("-").isdecimal() for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def number_of(example: Labelled, labels: Sequence[str]) -> int:
    """The index of an example's label. Raises `DataError` with file and line for an unknown one."""
    try:
        return labels.index(example.label)
    except ValueError:
        file, line = example.place
        hint = nearest(example.label, labels)
        raise DataError(
            f"{file}, line {line}: unknown label {example.label!r}{hint}; known: {', '.join(labels)}"
        ) from None


def corpus_files(corpus: Corpus) -> list[Path]:
    """The files that a corpus is read from."""
    paths = (path for path in (corpus.src, corpus.tgt, corpus.path) if path is not None)
    return [file for path in paths for file in arrow_files(path)]


def text_files(data: DataSettings) -> list[Path]:
    """All files of the training, validation and test text."""
    return [file for corpus in (*data.train, *data.valid, *data.test) for file in corpus_files(corpus)]


def is_by_line(path: Path) -> bool:
    """Whether the first lines of a file of text are a shorter file of the same format."""
    return not is_vectors(path) and bare_suffix(path) not in NOT_BY_LINE


def corpus_name(corpus: Corpus) -> str:
    """The name of a corpus in reports: its file names."""
    return " + ".join(path.name for path in corpus_files(corpus))
