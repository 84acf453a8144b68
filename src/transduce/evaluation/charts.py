"""Line charts as SVG; the script only reads out values under the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transduce.inspection.page import embedded, escape

WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 26
MAX_POINTS = 400
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) in the order of x. `pale`: drawn thin, in the colour of the curve after it: its noisy original."""

    name: str
    points: Sequence[Point]
    pale: bool = False


def line_chart(
    title: str, curves: Sequence[Curve], *, marks: Sequence[float] = (), settle: float = 0.0, floor: float | None = None
) -> str:
    """A figure with curves over updates, or nothing where there are no finite points.

    `marks`: x of dashed vertical lines (restarts). `settle`: share of the x range, from the left, whose values may run
    out of the picture: a first loss must not flatten all others. `floor`: what the y axis begins at or below.
    """
    curves = [Curve(c.name, _finite(c.points), c.pale) for c in curves]
    curves = [c for c in curves if c.points]
    if not curves:
        return ""
    x_ticks, y_ticks = _x_ticks(curves), _y_ticks(curves, settle, floor)
    frame = _Frame((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    parts = [_grid(frame, x_ticks, y_ticks)]
    parts += [
        f'<line x1="{frame.x(m):.1f}" x2="{frame.x(m):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--soft)" '
        'stroke-dasharray="3 3"><title>restart</title></line>'
        for m in marks
        if x_ticks[0] <= m <= x_ticks[-1]
    ]
    colours = _colours(curves)
    lines = [_line(frame, curve, colour) for curve, colour in zip(curves, colours, strict=True)]
    inner = HEIGHT - TOP - BOTTOM  # lines end at the frame
    box = f'x="0" y="{TOP}" width="{WIDTH}" height="{inner}" viewBox="0 {TOP} {WIDTH} {inner}" overflow="hidden"'
    parts.append(f"<svg {box}>{''.join(lines)}</svg>")
    legend = "".join(
        f' <span style="color:{colour}">●</span> {escape(curve.name)}'
        for curve, colour in zip(curves, colours, strict=True)
        if not curve.pale and len([c for c in curves if not c.pale]) > 1
    )
    shown = [(c.name, thin(c.points)) for c in curves if not c.pale]
    data = {
        "x": [frame.x0, frame.x1],
        "curves": [{"name": n, "points": [[x, _short(y)] for x, y in p]} for n, p in shown],
    }
    return (
        f'<figure class="chart"><figcaption><b>{escape(title)}</b>{legend} <span class="value"></span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--soft)" visibility="hidden"/></svg>'
        f"{embedded(data, name='points')}</figure>"
    )


SCRIPT = f"""
for (const figure of document.querySelectorAll("figure.chart")) {{
  const data = JSON.parse(figure.querySelector(".points").textContent);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const value = figure.querySelector(".value"), several = data.curves.length > 1;
  svg.addEventListener("pointermove", event => {{
    const box = svg.getBoundingClientRect(), left = {LEFT}, right = {WIDTH - RIGHT};
    const at = Math.min(right, Math.max(left, (event.clientX - box.left) / box.width * {WIDTH}));
    const x = data.x[0] + (at - left) / (right - left) * (data.x[1] - data.x[0]);
    const values = data.curves.map(c => {{
      const near = c.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return (several ? c.name + " " : "") + near[1].toLocaleString("en", {{maximumSignificantDigits: 4}});
    }});
    value.textContent = "update " + Math.round(x).toLocaleString("en") + ": " + values.join(", ");
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at); cursor.setAttribute("visibility", "visible");
  }});
  svg.addEventListener("pointerleave", () => {{
    value.textContent = "";
    cursor.setAttribute("visibility", "hidden");
  }});
}}
"""


def smooth(points: Sequence[Point], *, window: int) -> list[Point]:
    """Moving average over the last `window` points, of fewer at the start.

    >>> smooth([(1, 2.0), (2, 4.0), (3, 6.0)], window=2)
    [(1, 2.0), (2, 3.0), (3, 5.0)]
    """
    result = []
    for i, (x, _) in enumerate(points):
        values = [y for _, y in points[max(0, i + 1 - window) : i + 1]]
        result.append((x, sum(values) / len(values)))
    return result


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: means of neighbours; the last point stays."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit - 1))
    groups = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means, points[-1]]


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """About `n` round numbers from at or below `low` to at or above `high`.

    >>> ticks(0.3, 9.1)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-6 * size else size  # flat: steps of its own size
    span = span if span > 1e-100 else 1.0
    power = 10.0 ** math.floor(math.log10(span / n))
    step = next(f * power for f in (1, 2, 5, 10) if span / (f * power) <= n)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Short for an axis.

    >>> number(0.00025), number(12000), number(2.5), number(1e6)
    ('2.5e-4', '12k', '2.5', '1M')
    """
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places in the picture."""

    x_range: Point
    y_range: Point

    @property
    def x0(self) -> float:
        return self.x_range[0]

    @property
    def x1(self) -> float:
        return self.x_range[1]

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / ((self.x1 - self.x0) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _x_ticks(curves: Sequence[Curve]) -> list[float]:
    """From 0 to the last point, which is the end of the axis whatever the ticks are."""
    end = max(c.points[-1][0] for c in curves)
    inner = [t for t in ticks(0.0, end) if t < 0.97 * end]
    return [*inner, end] if end > 0 else [0.0, 1.0]


def _y_ticks(curves: Sequence[Curve], settle: float, floor: float | None) -> list[float]:
    start = settle * max(c.points[-1][0] for c in curves)
    values = [y for c in curves for x, y in c.points if x >= start] or [y for c in curves for _, y in c.points]
    return ticks(min(values) if floor is None else min(floor, *values), max(values))


def _colours(curves: Sequence[Curve]) -> list[str]:
    """A pale curve shares the colour of the curve after it."""
    colours, n = [], 0
    for curve in curves:
        colours.append(COLOURS[n % len(COLOURS)])
        n += not curve.pale
    return colours


def _grid(frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in x_ticks:
        anchor = "end" if tick == x_ticks[-1] else "middle"
        place = frame.x(tick) + (RIGHT if tick == x_ticks[-1] else 0)
        parts.append(f'<text x="{place:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{number(tick)}</text>')
    return "".join(parts)


def _line(frame: _Frame, curve: Curve, colour: str) -> str:
    points = thin(curve.points)
    style = 'stroke-width="1" stroke-opacity="0.35"' if curve.pale else 'stroke-width="2"'
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    dots = ""
    if not curve.pale and len(points) <= 40:  # few values: each one was measured, and shows
        dots = "".join(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in points
        )
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-linejoin="round" {style}/>{dots}'
