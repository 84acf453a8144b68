"""Heat maps as files: one offline page with every layer and head, an SVG, or a PNG."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from transduce.errors import UserError
from transduce.inspection import heatmap
from transduce.inspection.heatmap import HeatMap, heat_map_figures, heat_map_svg
from transduce.inspection.page import escape, page
from transduce.runs.atomic import write_aside


def attention_page(src: str, tgt: str, maps: Sequence[HeatMap]) -> str:
    """One HTML page about one sentence pair; layer and head of each map are chosen in it."""
    body = (
        f'<h1 dir="auto">{escape(src)}</h1><p dir="auto">{escape(tgt)}</p>'
        '<p class="soft">Each row is a position that attends; the stronger the colour of a cell, the more of its '
        f"attention goes there. A row sums to 1.</p>{heat_map_figures(maps)}"
    )
    return page(f"attention: {src}", body, script=heatmap.SCRIPT)


def attention_svg(heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> str:
    """One view as an SVG file; layers and heads count from 0, None is their mean."""
    return heat_map_svg(heat, layer=layer, head=head, style=heatmap.ALONE)


def attention_png(heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> bytes:
    """One view as a PNG file. Needs matplotlib: `pip install 'transduce[plot]'`."""
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
    with warnings.catch_warnings():  # a glyph that no font here has is drawn as a box
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(content, format="png")
    return content.getvalue()


PICTURES: dict[str, Callable[..., str | bytes]] = {".svg": attention_svg, ".png": attention_png}


def save_picture(path: Path, heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> None:
    """Write one view as .svg or .png, by the name of the file. Raises `UserError` for another name."""
    draw = PICTURES.get(path.suffix.lower())
    if draw is None:
        raise UserError(f"{path}: a picture is {' or '.join(PICTURES)}")
    content = draw(heat, layer=layer, head=head)
    with write_aside(path) as aside:
        aside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def _plain(piece: str) -> str:
    """A label for matplotlib, which would read dollars as mathematics."""
    return piece.replace("$", r"\$")
