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
        try:
            label, *texts = labelled_row(line, n_texts)
        except ValueError as error:
            raise DataError(f"{name}, line {number}: {error}") from None
        n_texts = len(texts)
        yield Labelled(label, tuple(texts), (name, number))


def labelled_row(line: str, n_texts: int = 0) -> tuple[str, ...]:
    """The label and the texts of a line; a `ValueError` says what is wrong with it.

    `n_texts`: how many there must be, where lines before have told.
    """
    label, *texts = line.split("\t")
    if not texts or len(texts) > 2:
        found = "there is no tab" if not texts else f"there are {len(texts)} tabs"
        raise ValueError(f"expected label<TAB>text or label<TAB>text<TAB>text; {found}")
    if not label.strip() or not all(text.strip() for text in texts):
        raise ValueError(f"the {'text' if label.strip() else 'label'} is empty")
    if len(texts) != (n_texts or len(texts)):
        raise ValueError(f"{len(texts)} texts, where the lines before have {n_texts}")
    return label.strip(), *texts


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
