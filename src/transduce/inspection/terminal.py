"""Attention in the terminal: shades that survive a pipe, or 256 colours."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Sequence

import numpy as np

from transduce.inspection.heatmap import HeatMap

SHADES = (" ", "·", "░", "▒", "▓", "█")
LEVELS = (0.04, 0.12, 0.3, 0.5, 0.75)  # the least weight that each shade but the first stands for
_RAMP = (234, 17, 18, 19, 25, 31, 37, 43, 79, 115, 151, 187, 230)  # xterm's numbers, dark to light
_CELL = 2  # columns of a cell: as wide as a Chinese character
_LABEL = 16  # columns of a label at most


def show_attention(heat: HeatMap) -> str:
    """The last layer, averaged over heads, for this terminal: in colour, or with a legend if stdout is no terminal."""
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    drawn = picture(heat.rows, heat.columns, heat.view(-1), width=width, colour=colour)
    return drawn if colour else f"{drawn}\n\n{legend()}"


def picture(
    rows: Sequence[str], columns: Sequence[str], weights: np.ndarray, *, width: int = 100, colour: bool = False
) -> str:
    """Weights [rows, columns] as text of at most `width` columns; the pieces attended to stand above, top to bottom.

    A picture that is too wide is cut into several, one below the other. `colour` uses xterm's 256 colours, which a pipe
    or a file should not get.

    >>> print(picture(["der", "Hund"], ["the", "dog"], np.array([[0.9, 0.1], [0.2, 0.8]])))
         t d
         h o
         e g
     der ██··
    Hund ░░██
    """
    assert weights.shape == (len(rows), len(columns)), weights.shape
    labels = [_fit(piece) for piece in rows]
    left = max(map(display_width, labels), default=0)
    n_fit = max(1, (width - left - 1) // _CELL)
    blocks = []
    for start in range(0, max(len(columns), 1), n_fit):
        part = slice(start, start + n_fit)
        lines = [" " * (left + 1) + line for line in _headings(columns[part])]
        for label, row in zip(labels, weights[:, part].tolist(), strict=True):
            cells = "".join(_coloured(w) if colour else shade(w) * _CELL for w in row)
            lines.append(
                " " * (left - display_width(label)) + label + " " + (cells + "\033[0m" if colour else cells.rstrip())
            )
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def legend() -> str:
    """What the shades stand for.

    >>> legend()
    '· 0.04  ░ 0.12  ▒ 0.3  ▓ 0.5  █ 0.75 and more'
    """
    return "  ".join(f"{s} {level:g}" for s, level in zip(SHADES[1:], LEVELS, strict=True)) + " and more"


def shade(weight: float) -> str:
    """The block that stands for a weight from 0 to 1."""
    return SHADES[sum(weight >= level for level in LEVELS)]


def display_width(text: str) -> int:
    """Columns that `text` takes in a terminal: two for East Asian wide characters, none for combining marks."""
    return sum(map(_character_width, text))


def _character_width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _clusters(text: str) -> list[str]:
    """Characters, each with the marks that combine with it."""
    clusters: list[str] = []
    for character in text:
        if clusters and _character_width(character) == 0:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters


def _fit(piece: str) -> str:
    """The piece without control characters, cut to the width of a label."""
    text = "".join(c if c.isprintable() else "?" for c in piece)
    if display_width(text) <= _LABEL:
        return text
    kept = ""
    for cluster in _clusters(text):
        if display_width(kept + cluster) > _LABEL - 1:
            break
        kept += cluster
    return kept + "…"


def _headings(pieces: Sequence[str]) -> list[str]:
    """Pieces written downwards, their ends on the last line."""
    cells = [_clusters(_fit(piece)) for piece in pieces]
    height = max(map(len, cells), default=0)
    cells = [[""] * (height - len(c)) + c for c in cells]
    return ["".join(c[i] + " " * (_CELL - display_width(c[i])) for c in cells).rstrip() for i in range(height)]


def _coloured(weight: float) -> str:
    step = round(min(max(weight, 0.0), 1.0) ** 0.7 * (len(_RAMP) - 1))  # small weights show too
    return f"\033[48;5;{_RAMP[step]}m" + " " * _CELL
