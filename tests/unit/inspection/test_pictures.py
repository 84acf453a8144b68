"""Attention as a picture: aligned in any script, never wider than the terminal; SVG and PNG have the same weights."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread
from rich.cells import cell_len

from attentions import attention_maps
from text_runs import make_run
from transduce.data.batch import collate
from transduce.data.store import Example
from transduce.errors import UserError
from transduce.inspection.inspected_models import open_subject
from transduce.inspection.inspection import inspect_sentence
from transduce.inspection.pictures import LEGEND, LEVELS, SHADES, averaged_attention, picture, save_picture, shade

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
    assert all(s in LEGEND for s in SHADES[1:])


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


# --- files


@pytest.mark.parametrize("kind", ["transformer", "star", "rnn"])
def test_the_picture_is_the_last_layer_averaged_over_its_heads(kind: str, tmp_path: Path) -> None:
    subject = open_subject(make_run(tmp_path / "run", kind=kind))
    found = inspect_sentence(subject, "the cat sat on a mat")
    batch = collate([Example(found.sentence.sides["src"].ids[:-1], found.sentence.targets.tolist()[:-1])])
    expected = attention_maps(subject.model, batch.src, batch.tgt_in)["cross"][-1].mean(0)
    rows, columns, weights = averaged_attention(found)
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    sides = found.sentence.sides
    assert (rows, columns) == (sides["tgt_out"].tokens, (("relay",) if kind == "star" else ()) + sides["src"].tokens)


def test_an_svg_has_the_weights_and_the_tokens(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).dirichlet(np.ones(3), size=5)
    rows, columns = ("r0", "<r1>", "r2", "r$3$", "猫"), ("c0", "c&1", "c2")
    save_picture(tmp_path / "a.svg", rows, columns, weights)
    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = ["".join(one.itertext()).strip() for one in root.iter("{http://www.w3.org/2000/svg}text")]
    titles = ("key", "query", "Attention, last layer,", "mean of its heads")
    assert sorted(texts) == sorted(rows + columns + titles)
    (cells,) = (one for one in root.iter() if one.get("id", "").startswith("QuadMesh"))
    fills = [re.search(r"fill: #(\w{6})", one.get("style", "")) for one in cells if one.tag.endswith("path")]
    shown = [[int(fill[1][i : i + 2], 16) for i in (0, 2, 4)] for fill in fills if fill]
    expected = [[round(255 * x) for x in colormaps["Blues"](w)[:3]] for w in weights.flat]
    np.testing.assert_allclose(shown, expected, atol=1)


def test_a_png_shows_the_weights(tmp_path: Path) -> None:
    """Pixels are dark where the weight is."""
    weights = np.zeros((3, 3), np.float32)
    weights[0, 2] = weights[1, 0] = weights[2, 1] = 1
    save_picture(tmp_path / "a.png", [""] * 3, [""] * 3, weights)
    pixels = imread(tmp_path / "a.png")[..., :3]
    blue = (pixels[..., 2] - pixels[..., 0]) > 0.2
    ys, xs = np.nonzero(blue)
    thirds = (np.stack([ys - ys.min(), xs - xs.min()]) * 3 // (np.array([[np.ptp(ys)], [np.ptp(xs)]]) + 1)).T
    found, counts = np.unique(thirds, axis=0, return_counts=True)
    dark = {tuple(cell) for cell, n in zip(found.tolist(), counts, strict=True) if n > 0.5 * counts.max()}
    assert dark == {(0, 2), (1, 0), (2, 1)}


def test_other_formats_and_no_attention_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"use \.svg or \.png"):
        save_picture(tmp_path / "a.gif", ["a"], ["b"], np.ones((1, 1)))
    with pytest.raises(UserError, match="no attention"):
        save_picture(tmp_path / "a.svg", [], [], np.zeros((0, 0)))
    assert not list(tmp_path.glob("a.*"))
