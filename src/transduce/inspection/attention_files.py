"""Attention as files: a page with every layer and head that works offline, an SVG, or a PNG."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from transduce.errors import UserError
from transduce.inspection.heatmap import HeatMap, heat_map_figures, heat_map_svg
from transduce.inspection.html import render
from transduce.runs.atomic import write_aside


def attention_page(src: str, tgt: str, maps: Sequence[HeatMap]) -> str:
    """Render a page about one sentence pair, with a choice of layer and head for each map."""
    return render("attention.html", title=f"attention: {src}", src=src, tgt=tgt, figures=heat_map_figures(maps))


def attention_svg(heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> str:
    """Draw one view as an SVG file. Layers and heads count from 0; None averages over all."""
    return heat_map_svg(heat, layer=layer, head=head, alone=True)


def attention_png(heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> bytes:
    """Draw one view as a PNG file. Needs matplotlib: `pip install 'transduce[plot]'`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("a PNG needs matplotlib: pip install 'transduce[plot]'; or name a .svg or .html file") from None
    height, width = 1.6 + 0.28 * len(heat.rows), 1.6 + 0.28 * len(heat.columns)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(heat.view(layer, head), cmap="Blues", vmin=0, vmax=1, aspect="equal")
    axes.set_xticks(range(len(heat.columns)), [_plain(c) for c in heat.columns], rotation=90)
    axes.set_yticks(range(len(heat.rows)), [_plain(r) for r in heat.rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    content = BytesIO()
    with warnings.catch_warnings():  # a glyph that no font has is drawn as a box
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(content, format="png")
    return content.getvalue()


PICTURES: dict[str, Callable[..., str | bytes]] = {".svg": attention_svg, ".png": attention_png}


def save_picture(path: Path, heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> None:
    """Write one view as .svg or .png, depending on the suffix. Raises `UserError` for any other suffix."""
    draw = PICTURES.get(path.suffix.lower())
    if draw is None:
        raise UserError(f"{path}: unknown picture format; use {' or '.join(PICTURES)}")
    content = draw(heat, layer=layer, head=head)
    with write_aside(path) as aside:
        aside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def _plain(piece: str) -> str:
    """Escape a label for matplotlib, which reads dollar signs as mathematics."""
    return piece.replace("$", r"\$")
