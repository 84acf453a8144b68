r"""Plain text as a stream of pieces, cut into documents as the settings say; and a part of it held out.

A piece is a line with its end: a document of any size goes through without being in memory. Files are read as
everywhere (`lines.py`): strict UTF-8, plain or compressed, `\r\n` as `\n`; a last line gets its end if it has none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from transduce.data.lines import read_lines


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text; `ends` where its document ends behind it."""

    text: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Size:
    """How much text there is. `documents`: the bytes of each, in order."""

    documents: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of all documents, in UTF-8."""
        return sum(self.documents)


Pieces = Iterator[Piece]


def read_pieces(path: Path | str, documents: str) -> Pieces:
    """The text of a file (`-`: standard input); `documents` is a name in DOCUMENTS. A `DataError` names the line."""
    return DOCUMENTS[documents](read_lines(path))


def measure(pieces: Iterable[Piece]) -> Size:
    """Read it all, and say how much it is."""
    sizes, size = list[int](), 0
    for piece in pieces:
        size += len(piece.text.encode("utf-8"))
        if piece.ends:
            sizes.append(size)
            size = 0
    return Size(tuple(sizes))


def choose_held_out(size: Size, *, share: float, most: int, seed: int, whole: bool) -> dict[int, int]:
    """What to hold out: of each of these documents all pieces that end behind this byte; nothing of too little text.

    `whole`: documents drawn at random, until they make up the share, at most `most` bytes; else the end of each.
    """
    wanted = min(most, size.n_bytes * share)
    if not whole:
        return {i: math.ceil(n * (1 - wanted / size.n_bytes)) for i, n in enumerate(size.documents)}
    held, order = dict[int, int](), list(range(len(size.documents)))
    random.Random(seed).shuffle(order)
    for i in order[:-1]:
        held[i] = 0
        wanted -= size.documents[i]
        if wanted <= 0:
            break
    return held


def part_of(pieces: Iterable[Piece], held: Mapping[int, int], *, held_out: bool) -> Pieces:
    """What is held out, or the rest. A document that is cut ends where the cut is."""
    number = position = 0
    open_ = False  # whether what was handed out of this document still needs an end
    for piece in pieces:
        end = position + len(piece.text.encode("utf-8"))
        ours = (end > held.get(number, math.inf)) == held_out
        if ours:
            yield piece
            open_ = not piece.ends
        elif open_:
            yield Piece("", ends=True)
            open_ = False
        position = end
        if piece.ends:
            number, position, open_ = number + 1, 0, False


def _file(lines: Iterator[str]) -> Pieces:
    """The whole file is one document."""
    last = None
    for line in lines:
        if last is not None:
            yield Piece(last)
        last = f"{line}\n"
    if last is not None:
        yield Piece(last, ends=True)


def _blank_line(lines: Iterator[str]) -> Pieces:
    """A document ends at a blank line; neither that nor its own last line end belongs to it."""
    last = None
    for line in lines:
        blank = not line.strip()
        if last is not None:
            yield Piece(last) if not blank else Piece(last.removesuffix("\n"), ends=True)
        last = None if blank else f"{line}\n"
    if last is not None:
        yield Piece(last.removesuffix("\n"), ends=True)


def _line(lines: Iterator[str]) -> Pieces:
    """Every line that is not blank is a document, without its end."""
    return (Piece(line, ends=True) for line in lines if line.strip())


DOCUMENTS: dict[str, Callable[[Iterator[str]], Pieces]] = {"file": _file, "blank_line": _blank_line, "line": _line}
