"""Attention as a heat map: SVG that stands alone, and HTML where layer and head can be chosen."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transduce.inspection.page import embedded, escape

CELL = 20  # pixels
LABEL = 16  # characters of a label that are shown
CHARACTER = 7.4  # pixels
SHOWN_POWER = 0.75  # below 1: small weights show too


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Attention of every layer and head over one sentence: `weights[layer, head, row, column]`; each row sums to 1.

    Rows are the positions that attend, columns those attended to.
    """

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    weights: np.ndarray

    def __post_init__(self) -> None:
        assert self.weights.ndim == 4 and self.weights.shape[2:] == (len(self.rows), len(self.columns)), (
            self.weights.shape
        )

    def view(self, layer: int | None = None, head: int | None = None) -> np.ndarray:
        """Weights [rows, columns] of one layer and head (from 0; negative from the end), or their mean where None."""
        weights = self.weights.mean(0) if layer is None else self.weights[layer]
        return weights.mean(0) if head is None else weights[head]

    def to_json(self) -> dict[str, Any]:
        """Plain data: `weights` are bytes, 255 for 1, in C order, as base64; `shape` is theirs."""
        return {
            "name": self.name,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "shape": list(self.weights.shape),
            "weights": _packed(self.weights),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HeatMap:
        """The inverse of `to_json`, to 1/510."""
        data = np.frombuffer(base64.b64decode(values["weights"]), dtype=np.uint8)
        weights = data.reshape(values["shape"]).astype(np.float32) / 255
        return cls(values["name"], tuple(values["rows"]), tuple(values["columns"]), weights)


def heat_map_svg(heat: HeatMap, *, layer: int | None = -1, head: int | None = None, style: str = "") -> str:
    """One view of a heat map as an SVG element; `style` is CSS for one that stands in a file of its own."""
    weights = heat.view(layer, head).tolist()
    left = 12 + CHARACTER * max((len(_short(r)) for r in heat.rows), default=0)
    top = 12 + CHARACTER * max((len(_short(c)) for c in heat.columns), default=0)
    width, height = left + CELL * len(heat.columns) + 8, top + CELL * len(heat.rows) + 8
    parts = [f"<style>{style}</style>" if style else ""]
    for i, piece in enumerate(heat.columns):
        x = left + CELL * i + CELL / 2 + 4
        parts.append(f'<text transform="translate({x:.0f} {top - 6:.0f}) rotate(-90)">{escape(_short(piece))}</text>')
    for i, piece in enumerate(heat.rows):
        y = top + CELL * i + CELL / 2 + 4
        parts.append(f'<text x="{left - 6:.0f}" y="{y:.0f}" text-anchor="end">{escape(_short(piece))}</text>')
    for i in range(len(heat.rows)):
        for j in range(len(heat.columns)):
            parts.append(
                f'<rect x="{left + CELL * j:.0f}" y="{top + CELL * i:.0f}" width="{CELL - 1}" height="{CELL - 1}" '
                f'fill-opacity="{_opacity(weights[i][j])}"/>'
            )
    parts.append(
        f'<rect class="frame" x="{left - 1:.0f}" y="{top - 1:.0f}" width="{CELL * len(heat.columns) + 1}" '
        f'height="{CELL * len(heat.rows) + 1}"/>'
    )
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(heat.name)}">'
    return f"{start}{''.join(parts)}</svg>"


ALONE = (
    'svg { background: #fff; } rect { fill: #1f5fc4; } .frame { fill: none; stroke: #ccc; } '
    'text { font: 12px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; fill: #1c1c1a; }'
)  # fmt: skip


def heat_map_figures(maps: Sequence[HeatMap]) -> str:
    """HTML of heat maps side by side, each with its choice of layer and head; needs `SCRIPT` in the page to choose."""
    return f'<div class="heats">{"".join(_figure(heat) for heat in maps)}</div>'


SCRIPT = """
for (const figure of document.querySelectorAll("figure.heat")) {
  const data = JSON.parse(figure.querySelector(".weights").textContent);
  const [layers, heads, rows, columns] = data.shape, size = rows * columns;
  const bytes = Uint8Array.from(atob(data.weights), c => c.charCodeAt(0));
  const rects = [...figure.querySelectorAll("rect:not(.frame)")], [layer, head] = figure.querySelectorAll("select");
  const value = figure.querySelector(".value");
  let view = new Float32Array(size);
  const draw = () => {
    view = new Float32Array(size);
    const ls = layer.value < 0 ? [...Array(layers).keys()] : [+layer.value];
    const hs = head.value < 0 ? [...Array(heads).keys()] : [+head.value];
    for (const l of ls) for (const h of hs) for (let i = 0; i < size; i++)
      view[i] += bytes[(l * heads + h) * size + i] / 255 / ls.length / hs.length;
    rects.forEach((rect, i) => rect.setAttribute("fill-opacity", Math.max(0.03, view[i] ** %s).toFixed(3)));
  };
  layer.addEventListener("change", draw); head.addEventListener("change", draw); draw();
  figure.addEventListener("pointerover", event => {
    const i = rects.indexOf(event.target);
    value.textContent = i < 0 ? "" :
      data.rows[Math.floor(i / columns)] + " \\u2192 " + data.columns[i % columns] + "  " + view[i].toFixed(2);
  });
}
""".replace("%s", str(SHOWN_POWER))


def _figure(heat: HeatMap) -> str:
    n_layers, n_heads = heat.weights.shape[:2]
    layers = [(n, f"layer {n + 1}", n == n_layers - 1) for n in range(n_layers)] + [(-1, "mean of layers", False)]
    heads = [(-1, "mean of heads", True)] + [(n, f"head {n + 1}", False) for n in range(n_heads)]
    choice = _select("layer", layers) + _select("head", heads)
    return (
        f'<figure class="heat"><figcaption><b>{escape(heat.name)}</b> {choice}'
        f'<span class="value mono"></span></figcaption><div class="scroll">{heat_map_svg(heat)}</div>'
        f"{embedded(heat.to_json(), name='weights')}</figure>"
    )


def _select(label: str, options: Sequence[tuple[int, str, bool]]) -> str:
    lines = (
        f'<option value="{v}"{" selected" if chosen else ""}>{escape(text)}</option>' for v, text, chosen in options
    )
    return f'<select aria-label="{label}">{"".join(lines)}</select>'


def _packed(weights: np.ndarray) -> str:
    return base64.b64encode(np.rint(np.clip(weights, 0, 1) * 255).astype(np.uint8).tobytes()).decode("ascii")


def _opacity(weight: float) -> str:
    return f"{max(0.03, min(1.0, weight) ** SHOWN_POWER):.3f}".rstrip("0")


def _short(piece: str) -> str:
    return piece if len(piece) <= LABEL else piece[: LABEL - 1] + "…"
