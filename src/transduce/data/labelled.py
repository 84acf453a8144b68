"""Read labelled texts: `label<TAB>text` or `label<TAB>text<TAB>text`, one example per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.data.lines import Digests, LineParser, read_rows
from transduce.errors import DataError, nearest


@dataclass(frozen=True, slots=True)
class Labelled:
    """One example: its label, one or two texts, and the file and line that it comes from."""

    label: str
    texts: tuple[str, ...]
    place: tuple[str, int]


def read_labelled(path: Path | str, digests: Digests | None = None) -> Iterator[Labelled]:
    """Yield the examples of a file (also .gz, .xz, .zst; `-`: standard input). All have one text, or all have two.

    Raises `DataError` with file and line for a line without a tab, with an empty label or text, or with another number
    of texts than the lines before.
    """
    name = str(path)
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
