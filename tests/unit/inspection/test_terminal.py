"""Attention in the terminal: aligned in any script, and never wider than the terminal."""

from __future__ import annotations

import re

import numpy as np
import pytest
from rich.cells import cell_len

from transduce.inspection.terminal import LEVELS, SHADES, legend, picture, shade

COLUMNS = ["▁A", "▁dog", "▁runs", "▁.", "</s>"]


def cells_of(line: str, left: int) -> list[str]:
    line = line.ljust(left + 2 * len(COLUMNS))
    return [line[left + 2 * i : left + 2 * i + 2] for i in range(len(COLUMNS))]


def test_cells_are_below_their_headings() -> None:
    rows = ["▁Ein", "▁Hund", "▁läuft"]
    weights = np.array([[0.9, 0.05, 0, 0, 0.05], [0, 1, 0, 0, 0], [0.1, 0.1, 0.4, 0.2, 0.2]])
    lines = picture(rows, COLUMNS, weights).split("\n")
    n_heading, left = max(map(len, COLUMNS)), max(map(len, rows)) + 1
    for i, column in enumerate(COLUMNS):
        letters = [line.ljust(80)[left + 2 * i] for line in lines[:n_heading]]
        assert "".join(letters).strip() == column
    for row, line, weight in zip(rows, lines[n_heading:], weights, strict=True):
        assert line[: left - 1].strip() == row
        assert cells_of(line, left) == [shade(w) * 2 for w in weight]


def test_shades_grow_with_weights() -> None:
    assert [shade(level) for level in (0.0, *LEVELS)] == list(SHADES)
    assert shade(1.0) == SHADES[-1]
    assert all(s in legend() for s in SHADES[1:])


@pytest.mark.parametrize("colour", [False, True])
def test_wide_characters_and_marks_keep_the_columns(colour: bool) -> None:
    rows = ["猫", "e\u0301t\u0301e\u0301", "שלום", "x"]
    columns = ["日本語", "ต้", "a"]
    lines = picture(rows, columns, np.ones((4, 3)), colour=colour).split("\n")
    plain = [re.sub(r"\033\[[\d;]*m", "", line) for line in lines]
    rows_of_picture = plain[-4:]
    starts = {cell_len(line[: len(line) - len(line.lstrip(" "))]) for line in rows_of_picture}
    assert len(starts) > 1, "labels are aligned right"
    widths = {cell_len(line.rstrip("█ ")) + len(re.findall("█", line)) for line in rows_of_picture}
    if not colour:
        assert len({cell_len(line) for line in rows_of_picture}) == 1
        assert len(widths) == 1


def test_colour_is_optional_and_reset_on_every_line() -> None:
    weights = np.full((2, 5), 0.2)
    assert "\033" not in picture(["a", "b"], COLUMNS, weights)
    coloured = picture(["a", "b"], COLUMNS, weights, colour=True).split("\n")
    assert [line.endswith("\033[0m") for line in coloured[-2:]] == [True, True]
    assert "\033" not in "".join(coloured[:-2])


def test_a_picture_fits_the_width() -> None:
    columns = [f"piece{i}" for i in range(90)]
    text = picture(["row"] * 3, columns, np.ones((3, 90)), width=60)
    assert max(map(cell_len, text.split("\n"))) <= 60
    assert text.count("█") == 2 * 3 * 90
    tiny = picture(["a very long label that is cut"], ["x"], np.ones((1, 1)), width=4)
    assert "…" in tiny and "█" in tiny


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = picture(["a\033[31m"], ["b\n\t"], np.ones((1, 1)))
    assert "\033" not in text and "\t" not in text and "b" in text


def test_no_pieces_make_an_empty_picture() -> None:
    assert picture([], [], np.zeros((0, 0))) == ""
