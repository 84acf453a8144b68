"""Read sentence pairs from two text files, TSV, JSON lines or TMX, and labelled texts; each with its file and line."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.config.settings import Corpus, DataSettings
from transduce.data.arrow import arrow_files, is_dataset, read_arrow, read_parquet
from transduce.data.json_lines import read_json_lines
from transduce.data.lines import (
    COMPRESSIONS,
    Digests,
    LineParser,
    bare_suffix,
    decode_block,
    decode_input,
    raw_inputs,
    raw_lines,
    read_rows,
)
from transduce.data.tmx import read_tmx
from transduce.data.tsv import read_tsv
from transduce.errors import DataError, SettingsError, nearest
from transduce.text.special import Vocabulary
from transduce.text.vectors import is_vectors, open_vectors

PairReader = Callable[[Path, str, str, Digests | None], Iterator[tuple[int, str, str]]]
"""Reads a file, given the language codes of source and target: the line, the source and the target of each pair."""


@dataclass(frozen=True, slots=True)
class PairFormat:
    """A format with both sides in one file. `by_line`: the first lines of a file are a shorter file of the format."""

    read: PairReader
    by_line: bool = True


PAIR_FORMATS: dict[str, PairFormat] = {
    ".tsv": PairFormat(read_tsv),
    ".jsonl": PairFormat(read_json_lines),
    ".tmx": PairFormat(read_tmx, by_line=False),
    ".parquet": PairFormat(read_parquet, by_line=False),
    ".arrow": PairFormat(read_arrow, by_line=False),
}
"""By suffix. A new format is a module with such a function, and an entry here."""


@dataclass(slots=True)
class Pair:
    """A source sentence, its translation, and the file and line that they come from.

    links: between their words, in Pharaoh format (`data.word_links`), where the run has an alignment.
    """

    src: str
    tgt: str
    place: tuple[str, int]
    links: str = ""

    @property
    def where(self) -> str:
        """File and line for people."""
        return f"{self.place[0]}:{self.place[1]}"


CHUNK = 10_000
"""Lines that are read, and pairs that are cleaned and encoded, at once."""


@dataclass(slots=True)
class RawPairs:
    """Lines of two parallel files, not yet decoded, or names of vectors; `n_before`: the lines before them."""

    files: tuple[str, str]
    n_before: int
    src: Sequence[bytes | str]
    tgt: Sequence[bytes | str]

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, i: int) -> Pair:
        """Decode a pair. Raises `DataError` with file and line."""
        number, (src, tgt) = self.n_before + i + 1, self.files
        return Pair(decode_input(self.src[i], src, number), decode_input(self.tgt[i], tgt, number), (src, number))

    def content(self) -> bytes:
        """All that the pairs depend on."""
        lines = (
            one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in (*self.src, *self.tgt)
        )
        return b"".join([f"{self.files}, {self.n_before}, {len(self)}".encode("utf-8", "surrogatepass"), *lines])

    def pairs(self) -> Iterator[Pair]:
        """Decode all pairs; those before a faulty line are yielded before the error."""
        sides = [decode_block(side, first=not self.n_before) for side in (self.src, self.tgt)]
        if None in sides:
            yield from map(self.__getitem__, range(len(self)))
            return
        for number, (src, tgt) in enumerate(zip(*sides, strict=True), self.n_before + 1):
            yield Pair(src, tgt, (self.files[0], number))


@dataclass(frozen=True, slots=True)
class Labelled:
    """One example: its label, one or two texts, and the file and line that it comes from."""

    label: str
    texts: tuple[str, ...]
    place: tuple[str, int]


def read_pairs(corpus: Corpus, *, src_lang: str, tgt_lang: str, digests: Digests | None = None) -> Iterator[Pair]:
    """Yield the pairs of a corpus in order, including pairs with an empty side.

    The language codes select the sides of TSV, JSONL and TMX files. `digests` receives the sha256 of each file that has
    been read to its end. Raises `DataError` with file and line for text that cannot be read, and immediately a
    `SettingsError` for a file of an unknown format.
    """
    if corpus.path is None:
        assert corpus.src is not None and corpus.tgt is not None, "Corpus checks that it names either both or path"
        raw = read_raw_pairs(corpus.src, corpus.tgt, digests)
        return itertools.chain.from_iterable(chunk.pairs() for chunk in raw)
    found = PAIR_FORMATS.get(".arrow" if is_dataset(corpus.path) else bare_suffix(corpus.path))
    if found is None:
        known, packed = ", ".join(PAIR_FORMATS), ", ".join(COMPRESSIONS)
        raise SettingsError(
            f"{corpus.path}: unknown format; known: {known} (also {packed}), a saved dataset, or two files src and tgt"
        )
    place = str(corpus.path)
    return (Pair(src, tgt, (place, line)) for line, src, tgt in found.read(corpus.path, src_lang, tgt_lang, digests))


def read_labelled(
    path: Path | str, vocabulary: Vocabulary | None = None, digests: Digests | None = None
) -> Iterator[Labelled]:
    """Yield the examples of a file (also .gz, .xz, .zst; `-`: standard input). All have one text, or all have two.

    Raises `DataError` with file and line for a line without a tab, with an empty label or text, or with another number
    of texts than the lines before. A file of vectors gives the names of its sequences and their labels, unless the
    model's `vocabulary` encodes text.
    """
    name = str(path)
    if (vectors := open_vectors(path, vocabulary)) is not None:
        for number, (label, text) in enumerate(zip(vectors.labels, vectors.names, strict=True), 1):
            yield Labelled(label, (text,), (name, number))
        return
    for number, (label, *texts) in read_rows(path, labelled_parser(), digests):
        yield Labelled(label, tuple(texts), (name, number))


def labelled_parser() -> LineParser:
    """Turns lines into a label and its texts; all have as many texts as the first."""
    n_texts = 0

    def parse(line: str, number: int) -> tuple[str, ...]:
        nonlocal n_texts
        label, *texts = line.split("\t")
        if not texts or len(texts) > 2:
            found = "no tab" if not texts else f"{len(texts)} tabs"
            raise ValueError(f"expected label<TAB>text or label<TAB>text<TAB>text, found {found}")
        if not label.strip() or not all(text.strip() for text in texts):
            raise ValueError(f"the {'text' if label.strip() else 'label'} is empty")
        n_texts = n_texts or len(texts)
        if len(texts) != n_texts:
            raise ValueError(f"{len(texts)} texts, but the lines before have {n_texts}")
        return label.strip(), *texts

    return parse


def sorted_labels(labels: Iterable[str]) -> tuple[str, ...]:
    """Sort labels: numerically if all are whole numbers, else alphabetically."""
    found = set(labels)
    if all(label.lstrip("-").isdecimal() for label in found):
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


def text_files(data: DataSettings) -> dict[str, Path]:
    """All files of the training, validation and test text, by their places in the settings."""
    return {
        f"data.{key}[{number}][{side}]": path
        for key in ("train", "valid", "test")
        for number, corpus in enumerate(getattr(data, key))
        for side, path in enumerate(corpus_files(corpus))
    }


def is_by_line(path: Path) -> bool:
    """Whether the first lines of a file of text are a shorter file of the same format."""
    known = PAIR_FORMATS.get(bare_suffix(path))
    return not is_vectors(path) and (known is None or known.by_line)


def corpus_name(corpus: Corpus) -> str:
    """The name of a corpus in reports: its file names."""
    return " + ".join(path.name for path in corpus_files(corpus))


def read_raw_pairs(src: Path, tgt: Path, digests: Digests | None = None, *, n: int = CHUNK) -> Iterator[RawPairs]:
    """Two files, `n` lines at a time. Files of different lengths are an error that names both lengths."""
    n_before, sides = 0, (raw_inputs(src, digests), raw_lines(tgt, digests))
    while True:
        chunks = [list(itertools.islice(side, n)) for side in sides]
        n_both = min(map(len, chunks))
        if n_both:
            yield RawPairs((str(src), str(tgt)), n_before, chunks[0][:n_both], chunks[1][:n_both])
        n_before += n_both
        if n_both < n:
            break
    left = [len(chunk) - n_both + sum(1 for _ in side) for chunk, side in zip(chunks, sides, strict=True)]
    if any(left):
        longer, shorter = (src, tgt) if left[0] else (tgt, src)
        raise DataError(
            f"{longer} has {n_before + max(left)} lines, {shorter} has {n_before}: line {n_before + 1} of "
            f"{longer.name} has no counterpart"
        )
