r"""Split plain text into documents, and hold a part of it out.

Text is processed in pieces, usually lines with their line end, so that a document of any size fits in memory. Lines are
those of `lines.py`: strict UTF-8, `\r\n` becomes `\n`, and the last line always gets a line end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transduce.data.lines import read_lines


class Piece(NamedTuple):
    """Some text, and whether its document ends after it."""

    text: str
    ends: bool = False


Pieces = Iterator[Piece]


def read_pieces(path: Path | str, documents: str) -> Pieces:
    """Read a file (`-`: standard input) as documents; `documents` is a name in DOCUMENTS. Raises `DataError`."""
    return DOCUMENTS[documents](read_lines(path))


class Meter:
    """Counts the bytes, in UTF-8, of documents that flow through `watch`."""

    def __init__(self) -> None:
        self.sizes, self.position = list[int](), 0
        """Bytes of each document that has ended, and of the current one so far."""

    @property
    def document(self) -> int:
        """The number of the current document."""
        return len(self.sizes)

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces unchanged. Document and position are those at the end of the piece that is yielded."""
        for piece in pieces:
            self.position += len(piece.text.encode("utf-8"))
            yield piece
            if piece.ends:
                self.sizes.append(self.position)
                self.position = 0


def choose_held_out(sizes: Sequence[int], *, share: float, most: int, seed: int, whole: bool) -> dict[int, int]:
    """Choose what to hold out: for some documents, the byte from which on they are held out.

    sizes: bytes of each document. share, most: how much of the text, at most so many bytes. whole: hold out whole
    documents, drawn by `seed`, instead of the end of each document. At least one document is left.
    """
    total = sum(sizes)
    wanted = min(most, total * share)
    if not whole:
        return {i: math.ceil(n * (1 - wanted / total)) for i, n in enumerate(sizes)}
    held, order = dict[int, int](), list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    for i in order[:-1]:
        held[i] = 0
        wanted -= sizes[i]
        if wanted <= 0:
            break
    return held


def part_of(pieces: Iterable[Piece], held: Mapping[int, int], *, held_out: bool) -> Pieces:
    """The text that `choose_held_out` has held out, or the rest. A document that is cut ends at the cut."""
    meter, begun = Meter(), False  # begun: some of the document has been yielded, and its end has not
    for piece in meter.watch(pieces):
        if is_held_out(held, meter.document, meter.position) == held_out:
            yield piece
            begun = not piece.ends
        elif begun:
            yield Piece("", ends=True)
            begun = False


def is_held_out(held: Mapping[int, int], document: int, end: int) -> bool:
    """Whether the piece that ends at this byte of this document is held out."""
    return end > held.get(document, math.inf)


def _file(lines: Iterator[str]) -> Pieces:
    """A file is one document."""
    last = None
    for line in lines:
        if last is not None:
            yield Piece(last)
        last = f"{line}\n"
    if last is not None:
        yield Piece(last, ends=True)


def _blank_line(lines: Iterator[str]) -> Pieces:
    """A document ends at a blank line. Neither that nor its own last line end belongs to the document."""
    last = None
    for line in lines:
        blank = not line.strip()
        if last is not None:
            yield Piece(last) if not blank else Piece(last.removesuffix("\n"), ends=True)
        last = None if blank else f"{line}\n"
    if last is not None:
        yield Piece(last.removesuffix("\n"), ends=True)


def _line(lines: Iterator[str]) -> Pieces:
    """Every line that is not blank is a document, without its line end."""
    return (Piece(line, ends=True) for line in lines if line.strip())


DOCUMENTS: dict[str, Callable[[Iterator[str]], Pieces]] = {"file": _file, "blank_line": _blank_line, "line": _line}
