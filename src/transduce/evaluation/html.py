"""HTML from jinja2 templates, in which all text is escaped, and line charts as SVG with a script for their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from transduce.inspection.page import PAGE, embed_files, read_page_file

FOLDERS = (Path(__file__).parent / "templates", PAGE)
"""Templates, and the style that they share with the inspection page."""
BOX = {"width": 520, "height": 230, "left": 50, "right": 508, "top": 10, "bottom": 204}
"""Size of a chart, and the frame of its curves, in SVG units."""
MAX_POINTS = 400
COLOURS = tuple(f"var(--{name})" for name in ("one", "two", "three", "four", "five", "six", "seven", "eight"))

Point = tuple[float, float]


@cache
def environment(*, autoescape: bool = True) -> Environment:
    made = Environment(
        loader=FileSystemLoader(FOLDERS),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["theme"] = Markup(embed_files(read_page_file("theme.css")))
    return made


def render(template: str, **values: Any) -> Markup:
    """Render a template. A whole page extends `page.html`."""
    text = environment().get_template(template).render(values)
    # A file name that is not UTF-8 has lone surrogates, which cannot be encoded.
    return Markup(text.encode("utf-8", "replace").decode("utf-8"))


@dataclass(frozen=True, slots=True)
class Curve:
    """A named curve of points (x, y), sorted by x. `pale`: drawn thin, for the unsmoothed values of the next curve."""

    name: str
    points: Sequence[Point]
    pale: bool = False


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[float] = (),
    settle: float = 0.0,
    floor: float | None = None,
) -> Markup:
    """Draw curves over updates as an HTML figure; empty if there are no finite points.

    `marks`: x of restarts, drawn as dashed lines. `settle`: fraction of the x range, from the left, in which values may
    leave the chart, so that a high initial loss does not flatten the rest. `floor`: the y axis starts here or lower.
    """
    finite = [replace(c, points=[p for p in c.points if all(map(math.isfinite, p))]) for c in curves]
    if not (curves := [c for c in finite if c.points]):
        return Markup()
    x_ticks, y_ticks = _x_ticks(curves), _y_ticks(curves, settle, floor)
    x, y = _scale(x_ticks, BOX["left"], BOX["right"]), _scale(y_ticks, BOX["bottom"], BOX["top"])
    lines = _coloured_lines(curves, x, y)
    legend = [line for line in lines if not line["pale"]]
    data = {
        "name": "update",
        "x": [x_ticks[0], x_ticks[-1]],
        "box": BOX,
        "curves": [{"name": line["name"], "points": line["points"]} for line in legend],
    }
    return render(
        "chart.html",
        title=title,
        box=BOX,
        x_ticks=[(x(tick), compact(tick)) for tick in x_ticks],
        y_ticks=[(y(tick), compact(tick)) for tick in y_ticks],
        marks=[x(mark) for mark in marks if x_ticks[0] <= mark <= x_ticks[-1]],
        lines=lines,
        legend=legend,
        data=data,
    )


def _coloured_lines(
    curves: Sequence[Curve], x: Callable[[float], float], y: Callable[[float], float]
) -> list[dict[str, Any]]:
    """Prepare curves for the template; a pale curve has the colour of the next. `x`, `y`: map values to positions."""
    lines, n_colours = [], 0
    for curve in curves:
        points = thin(curve.points)
        lines.append(
            {
                "name": curve.name,
                "pale": curve.pale,
                "colour": COLOURS[n_colours % len(COLOURS)],
                "places": [(x(a), y(b)) for a, b in points],
                "points": [[a, float(f"{b:.5g}")] for a, b in points],
            }
        )
        n_colours += not curve.pale
    return lines


def _scale(ticks: Sequence[float], start: int, end: int) -> Callable[[float], float]:
    """Return a function from values to positions: the first tick is at `start`, the last one at `end`."""
    span = (ticks[-1] - ticks[0]) or 1
    return lambda value: round(start + (value - ticks[0]) / span * (end - start), 1)


def smooth(points: Sequence[Point], *, window: int) -> list[Point]:
    """Return the moving average over the last `window` points, or fewer at the start.

    >>> smooth([(1, 2.0), (2, 4.0), (3, 6.0)], window=2)
    [(1, 2.0), (2, 3.0), (3, 5.0)]
    """
    windows = [[y for _, y in points[max(0, i + 1 - window) : i + 1]] for i in range(len(points))]
    return [(x, sum(values) / len(values)) for (x, _), values in zip(points, windows, strict=True)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce points to at most `limit` by averaging neighbours; the last point is kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / (limit - 1))
    groups = [points[i : i + size] for i in range(0, len(points) - 1, size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means, points[-1]]


def ticks(low: float, high: float, n: int = 5) -> list[float]:
    """Return about `n` round numbers that span `low` to `high`.

    >>> ticks(0.3, 9.1)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    size = max(abs(low), abs(high))
    span = high - low if high - low > 1e-6 * size else size  # flat: use the size of the values
    span = span if span > 1e-100 else 1.0
    power = 10.0 ** math.floor(math.log10(span / n))
    step = next(f * power for f in (1, 2, 5, 10) if span / (f * power) <= n)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def compact(value: float) -> str:
    """Format a number for people.

    >>> compact(0.00025), compact(2.5), compact(12_000), compact(2_612_352), compact(-6e10)
    ('0.00025', '2.5', '12k', '2.61M', '-60B')
    """
    for least, scale, unit in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / scale:.3g}{unit}"
    return f"{value:,g}"


def _x_ticks(curves: Sequence[Curve]) -> list[float]:
    """Ticks of the x axis, from 0 to the last point, even if it is not round."""
    end = max(c.points[-1][0] for c in curves)
    inner = [t for t in ticks(0.0, end) if t < 0.97 * end]
    return [*inner, end] if end > 0 else [0.0, 1.0]


def _y_ticks(curves: Sequence[Curve], settle: float, floor: float | None) -> list[float]:
    start = settle * max(c.points[-1][0] for c in curves)
    values = [y for c in curves for x, y in c.points if x >= start] or [y for c in curves for _, y in c.points]
    return ticks(min(values) if floor is None else min(floor, *values), max(values))
