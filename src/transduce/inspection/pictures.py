"""The attention of a sentence in one picture, for the terminal, as SVG or as PNG."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from transduce.errors import UserError, needing
from transduce.inspection.inspection import Inspection
from transduce.inspection.page import theme_colour
from transduce.runs.atomic import write_aside

SHADES = (" ", "·", "░", "▒", "▓", "█")
LEVELS = (0.04, 0.12, 0.3, 0.5, 0.75)  # smallest weight drawn with each shade but the first
LEGEND = "  ".join(f"{shade} {level:g}" for shade, level in zip(SHADES[1:], LEVELS, strict=True)) + " and more"
_PALETTE = (234, 17, 18, 19, 25, 31, 37, 43, 79, 115, 151, 187, 230)  # xterm colours, dark to light
_CELL = 2  # columns per cell: the width of a Chinese character
_LABEL = 16  # maximum columns of a label
_KINDS = ("cross", "relay", "encoder", "decoder")  # kinds of attention; the first that a model has is drawn


def averaged_attention(inspection: Inspection) -> tuple[Sequence[str], Sequence[str], np.ndarray]:
    """Return the tokens of rows and columns, and the last layer's mean weights over heads; empty without attention."""
    views = sorted(inspection.recorded["attention"], key=lambda view: (-_KINDS.index(view["kind"]), view["layer"]))
    if not views:
        return [], [], np.zeros((0, 0))
    return views[-1]["row_tokens"], views[-1]["column_tokens"], inspection[f"{views[-1]['name']}.weights"].array.mean(0)


def show_attention(inspection: Inspection) -> str:
    """Draw the averaged attention for the terminal: in colour, or with a legend if stdout is no terminal."""
    rows, columns, weights = averaged_attention(inspection)
    if not rows:
        return "This model has no attention."
    colour = sys.stdout.isatty()
    drawn = picture(rows, columns, weights, width=shutil.get_terminal_size((100, 24)).columns, colour=colour)
    return drawn if colour else f"{drawn}\n\n{LEGEND}"


def picture(
    rows: Sequence[str], columns: Sequence[str], weights: np.ndarray, *, width: int = 100, colour: bool = False
) -> str:
    """Draw weights [rows, columns] as text of at most `width` columns, with numbered column labels written downwards.

    A picture that is too wide is split into several pictures, one below the other. `colour` uses xterm's 256 colours.

    >>> print(picture(["der", "Hund"], ["the", "dog"], np.array([[0.9, 0.1], [0.2, 0.8]])))
         t d
         h o
         e g
         1 2
     der ██··
    Hund ░░██
    """
    labels = [printable(row) for row in rows]
    # a number has the two columns of its cell
    headings = [_downwards(printable(column)).append(f"\n{n % 100}") for n, column in enumerate(columns, 1)]
    left = min(_LABEL, max(map(cell_len, labels), default=0))
    n_fit, drawn = max(1, (width - left - 1) // _CELL), list[str]()
    console = Console(
        width=left + 1 + _CELL * n_fit,
        color_system="256" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
    )
    for start in range(0, len(columns), n_fit):
        part = slice(start, start + n_fit)
        table = Table(
            Column(width=left, justify="right", no_wrap=True, overflow="ellipsis"),
            Column(width=1),
            *(Column(heading, width=_CELL, vertical="bottom") for heading in headings[part]),
            box=None,
            padding=0,
            header_style="",
        )
        for label, row in zip(labels, weights[:, part].tolist(), strict=True):
            table.add_row(Text(label), "", *(_coloured(w) if colour else shade(w) * _CELL for w in row))
        with console.capture() as captured:
            console.print(table)
        drawn += [line.rstrip() for line in captured.get().split("\n")]
    return "\n".join(drawn[:-1])


def shade(weight: float) -> str:
    """Return the block character for a weight from 0 to 1."""
    return SHADES[sum(weight >= level for level in LEVELS)]


def _coloured(weight: float) -> Text:
    # exponent below 1, so that small weights are visible
    step = round(min(max(weight, 0.0), 1.0) ** 0.7 * (len(_PALETTE) - 1))
    return Text(" " * _CELL, style=f"on color({_PALETTE[step]})")


def printable(piece: str) -> str:
    """Replace characters that control a terminal or the direction of writing by question marks."""
    return "".join(c if c.isprintable() else "?" for c in piece)


def _downwards(text: str) -> Text:
    """Write one character per line, each with its combining marks."""
    lines = list[str]()
    for character in text if cell_len(text) <= _LABEL else f"{set_cell_size(text, _LABEL - 1).rstrip()}…":
        if lines and cell_len(character) == 0:
            lines[-1] += character
        else:
            lines.append(character)
    return Text("\n".join(lines))


def save_picture(path: Path, rows: Sequence[str], columns: Sequence[str], weights: np.ndarray) -> None:
    """Draw averaged attention weights [rows, columns] to a .svg or .png file, depending on the suffix.

    Raises:
        UserError: The suffix is unknown, matplotlib is missing, or there are no weights.
    """
    if path.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"{path}: unknown picture format; use .svg or .png")
    with needing("plot", "a picture needs matplotlib (a page with --html needs nothing)"):
        from matplotlib import rc_context
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    if not rows:
        raise UserError("this model has no attention, so there is no picture of it; leave out --svg")
    figure = Figure(figsize=(1.6 + 0.28 * len(columns), 1.6 + 0.28 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("heat", [theme_colour("raised"), theme_colour("heat")])
    cells = axes.pcolormesh(weights, cmap=colours, vmin=0, vmax=1)
    figure.colorbar(cells, ax=axes, ticks=[0, 0.5, 1], label="weight", aspect=30, shrink=0.8)
    axes.set(aspect="equal", ylim=(len(rows), 0), xlabel="key", ylabel="query")
    axes.set_title("Attention, last layer,\nmean of its heads", fontsize="small")
    # matplotlib reads dollar signs as mathematics
    axes.set_xticks(np.arange(len(columns)) + 0.5, [c.replace("$", r"\$") for c in columns], rotation=90)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [r.replace("$", r"\$") for r in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    with (
        write_aside(path) as aside,
        warnings.catch_warnings(),
        rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}),
    ):
        warnings.simplefilter("ignore", UserWarning)  # a glyph that no font has is drawn as a box
        kind = path.suffix.lower()[1:]
        figure.savefig(aside, format=kind, metadata={"Date": None} if kind == "svg" else None)  # the same each time
