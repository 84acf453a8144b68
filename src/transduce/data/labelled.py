"""Read labelled texts: `label<TAB>text` or `label<TAB>text<TAB>text`, one example per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transduce.data.lines import Digests, read_lines
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
    name, n_texts = str(path), 0
    for number, line in enumerate(read_lines(path, digests), 1):
        try:
            label, *texts = labelled_row(line, n_texts)
        except ValueError as error:
            raise DataError(f"{name}, line {number}: {error}") from None
        n_texts = len(texts)
        yield Labelled(label, tuple(texts), (name, number))


def labelled_row(line: str, n_texts: int = 0) -> tuple[str, ...]:
    """The label and the texts of a line. `n_texts`: the required number, 0 for the first line. Raises `ValueError`."""
    label, *texts = line.split("\t")
    if not texts or len(texts) > 2:
        found = "no tab" if not texts else f"{len(texts)} tabs"
        raise ValueError(f"expected label<TAB>text or label<TAB>text<TAB>text, found {found}")
    if not label.strip() or not all(text.strip() for text in texts):
        raise ValueError(f"the {'text' if label.strip() else 'label'} is empty")
    if len(texts) != (n_texts or len(texts)):
        raise ValueError(f"{len(texts)} texts, but the lines before have {n_texts}")
    return label.strip(), *texts


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
