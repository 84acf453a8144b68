"""Attention as a heat map: SVG, PNG, and HTML with a choice of layer and head."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from transduce.errors import UserError
from transduce.inspection.html import render
from transduce.runs.atomic import write_aside

CELL = 20  # pixels
MAX_LABEL = 16  # characters
CHARACTER = 7.4  # pixels
OPACITY_POWER = 0.75  # below 1, so that small weights are visible; also in heatmap.js


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Attention of every layer and head over one sentence: `weights` [layers, heads, rows, columns].

    Rows are the positions that attend, columns those attended to; each row sums to 1.
    """

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: np.ndarray

    def __post_init__(self) -> None:
        assert self.weights.shape[2:] == (len(self.rows), len(self.columns)), self.weights.shape

    def view(self, layer: int | None = None, head: int | None = None) -> np.ndarray:
        """Weights [rows, columns] of one layer and head (from 0; negative from the end); None averages over all."""
        weights = self.weights.mean(0) if layer is None else self.weights[layer]
        return weights.mean(0) if head is None else weights[head]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data: `weights` become bytes (255 for 1) in C order as base64, next to their `shape`."""
        levels = np.rint(np.clip(self.weights, 0, 1) * 255)
        return {
            "name": self.name,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "shape": list(self.weights.shape),
            "weights": base64.b64encode(levels.astype(np.uint8).tobytes()).decode("ascii"),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HeatMap:
        """Inverse of `to_json`, up to rounding to 1/510."""
        data = np.frombuffer(base64.b64decode(values["weights"]), dtype=np.uint8)
        weights = data.reshape(values["shape"]).astype(np.float32) / 255
        return cls(values["name"], tuple(values["rows"]), tuple(values["columns"]), weights)


@dataclass(frozen=True, slots=True)
class SentenceAttention:
    """One sentence, its translation, and the attention weights."""

    src: str
    tgt: str
    maps: tuple[HeatMap, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"src": self.src, "tgt": self.tgt, "maps": [heat.to_json() for heat in self.maps]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SentenceAttention:
        """The inverse of `to_json`."""
        return cls(values["src"], values["tgt"], tuple(map(HeatMap.from_json, values["maps"])))


def heat_map_svg(heat: HeatMap, *, layer: int | None = -1, head: int | None = None, alone: bool = False) -> Markup:
    """Draw one view as an SVG element. `alone`: with its own style, for a file."""
    left = 12 + round(CHARACTER * max((len(_label(row)) for row in heat.rows), default=0))
    top = 12 + round(CHARACTER * max((len(_label(column)) for column in heat.columns), default=0))
    weights = heat.view(layer, head).tolist()
    return render(
        "heatmap.svg",
        name=heat.name,
        alone=alone,
        cell=CELL,
        left=left,
        top=top,
        width=left + CELL * len(heat.columns) + 8,
        height=top + CELL * len(heat.rows) + 8,
        columns=[_label(column) for column in heat.columns],
        rows=[(_label(row), [_opacity(w) for w in line]) for row, line in zip(heat.rows, weights, strict=True)],
    )


def heat_map_figures(maps: Sequence[HeatMap]) -> Markup:
    """Draw heat maps next to each other, each with a choice of layer and head; needs `heatmap.js` in the page."""
    return render("heatmaps.html", maps=[{"data": heat.to_json(), "svg": heat_map_svg(heat)} for heat in maps])


def heat_map_png(heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> bytes:
    """Draw one view as the content of a PNG file. Needs matplotlib: `pip install 'transduce[plot]'`."""
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
    # matplotlib reads dollar signs as mathematics
    axes.set_xticks(range(len(heat.columns)), [c.replace("$", r"\$") for c in heat.columns], rotation=90)
    axes.set_yticks(range(len(heat.rows)), [r.replace("$", r"\$") for r in heat.rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    content = BytesIO()
    with warnings.catch_warnings():  # a glyph that no font has is drawn as a box
        warnings.simplefilter("ignore", UserWarning)
        figure.savefig(content, format="png")
    return content.getvalue()


def save_picture(path: Path, heat: HeatMap, *, layer: int | None = -1, head: int | None = None) -> None:
    """Write one view as .svg or .png, depending on the suffix. Raises `UserError` for any other suffix."""
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise UserError(f"{path}: unknown picture format; use .svg or .png")
    if suffix == ".png":
        content = heat_map_png(heat, layer=layer, head=head)
    else:
        content = heat_map_svg(heat, layer=layer, head=head, alone=True).encode("utf-8")
    with write_aside(path) as aside:
        aside.write_bytes(content)


def _opacity(weight: float) -> str:
    return f"{max(0.03, min(1.0, weight) ** OPACITY_POWER):.3f}".rstrip("0")


def _label(piece: str) -> str:
    return piece if len(piece) <= MAX_LABEL else piece[: MAX_LABEL - 1] + "…"
