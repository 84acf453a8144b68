"""Attention in the terminal: in 256 colours, or as block characters."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size

from transduce.inspection.heatmap import HeatMap

SHADES = (" ", "·", "░", "▒", "▓", "█")
LEVELS = (0.04, 0.12, 0.3, 0.5, 0.75)  # lowest weight of each shade after the first
_PALETTE = (234, 17, 18, 19, 25, 31, 37, 43, 79, 115, 151, 187, 230)  # xterm colours, dark to light
_CELL = 2  # columns per cell: the width of a Chinese character
_LABEL = 16  # maximum columns of a label


def show_attention(heat: HeatMap) -> str:
    """The last layer, averaged over heads, for this terminal: in colour, or with a legend if stdout is no terminal."""
    colour = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns
    drawn = picture(heat.rows, heat.columns, heat.view(-1), width=width, colour=colour)
    return drawn if colour else f"{drawn}\n\n{legend()}"


def picture(
    rows: Sequence[str], columns: Sequence[str], weights: np.ndarray, *, width: int = 100, colour: bool = False
) -> str:
    """Draw weights [rows, columns] as text of at most `width` columns, with the column labels written downwards.

    A picture that is too wide is split into several, one below the other. `colour` uses xterm's 256 colours.

    >>> print(picture(["der", "Hund"], ["the", "dog"], np.array([[0.9, 0.1], [0.2, 0.8]])))
         t d
         h o
         e g
     der ██··
    Hund ░░██
    """
    assert weights.shape == (len(rows), len(columns)), weights.shape
    labels = [_fit(piece) for piece in rows]
    left = max(map(cell_len, labels), default=0)
    n_fit = max(1, (width - left - 1) // _CELL)
    blocks = []
    for start in range(0, max(len(columns), 1), n_fit):
        part = slice(start, start + n_fit)
        lines = [" " * (left + 1) + line for line in _headings(columns[part])]
        for label, row in zip(labels, weights[:, part].tolist(), strict=True):
            cells = "".join(_coloured(w) if colour else shade(w) * _CELL for w in row)
            lines.append(
                " " * (left - cell_len(label)) + label + " " + (cells + "\033[0m" if colour else cells.rstrip())
            )
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def legend() -> str:
    """Explain the shades.

    >>> legend()
    '· 0.04  ░ 0.12  ▒ 0.3  ▓ 0.5  █ 0.75 and more'
    """
    return "  ".join(f"{s} {level:g}" for s, level in zip(SHADES[1:], LEVELS, strict=True)) + " and more"


def shade(weight: float) -> str:
    """Return the block character for a weight from 0 to 1."""
    return SHADES[sum(weight >= level for level in LEVELS)]


def _clusters(text: str) -> list[str]:
    """Split into characters, each with its combining marks."""
    clusters: list[str] = []
    for character in text:
        if clusters and cell_len(character) == 0:
            clusters[-1] += character
        else:
            clusters.append(character)
    return clusters


def _fit(piece: str) -> str:
    """Remove control characters and cut to the width of a label."""
    text = "".join(c if c.isprintable() else "?" for c in piece)
    return text if cell_len(text) <= _LABEL else set_cell_size(text, _LABEL - 1).rstrip() + "…"


def _headings(pieces: Sequence[str]) -> list[str]:
    """Write pieces downwards, aligned at the bottom."""
    cells = [_clusters(_fit(piece)) for piece in pieces]
    height = max(map(len, cells), default=0)
    cells = [[""] * (height - len(c)) + c for c in cells]
    return ["".join(c[i] + " " * (_CELL - cell_len(c[i])) for c in cells).rstrip() for i in range(height)]


def _coloured(weight: float) -> str:
    step = round(min(max(weight, 0.0), 1.0) ** 0.7 * (len(_PALETTE) - 1))  # below 1, so that small weights are visible
    return f"\033[48;5;{_PALETTE[step]}m" + " " * _CELL
