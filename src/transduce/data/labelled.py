"""Texts with labels from files: `label<TAB>text`, or `label<TAB>text<TAB>text`, one example a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.data.lines import read_lines
from transduce.errors import DataError, nearest


@dataclass(frozen=True, slots=True)
class Labelled:
    """One example; `texts` are one or two. `place`: file and line, from 1 on."""

    label: str
    texts: tuple[str, ...]
    place: tuple[str, int]


def read_labelled(path: Path | str) -> Iterator[Labelled]:
    """The examples of a file (.gz, .xz, .zst too; `-`: standard input). All have one text, or all have two.

    Raises `DataError` with file and line: a line without a tab, an empty label or text, another number of texts.
    """
    name, n_texts = str(path), 0
    for number, line in enumerate(read_lines(path), 1):
        label, *texts = line.split("\t")
        where = f"{name}, line {number}"
        if not texts or len(texts) > 2:
            found = "there is no tab" if not texts else f"there are {len(texts)} tabs"
            raise DataError(f"{where}: expected label<TAB>text or label<TAB>text<TAB>text; {found}")
        if not label.strip() or not all(text.strip() for text in texts):
            raise DataError(f"{where}: the {'text' if label.strip() else 'label'} is empty")
        n_texts = n_texts or len(texts)
        if len(texts) != n_texts:
            raise DataError(f"{where}: {len(texts)} texts, where the lines before have {n_texts}")
        yield Labelled(label.strip(), tuple(texts), (name, number))


def labels_in(examples: Iterable[Labelled]) -> tuple[str, ...]:
    """The labels that occur, whole numbers in their order, others in the alphabet's."""
    found = {example.label for example in examples}
    if all(label.lstrip("-").isdecimal() for label in found):
        return tuple(sorted(found, key=lambda label: (int(label), label)))
    return tuple(sorted(found))


def number_of(example: Labelled, labels: Sequence[str]) -> int:
    """The number of an example's label; a `DataError` with file and line names one that is not known."""
    try:
        return labels.index(example.label)
    except ValueError:
        file, line = example.place
        hint = nearest(example.label, labels)
        raise DataError(
            f"{file}, line {line}: label {example.label!r} is not known{hint}; known: {', '.join(labels)}"
        ) from None
