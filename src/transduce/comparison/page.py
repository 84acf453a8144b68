"""`compare.html`: the result of a comparison, as one page that works offline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from transduce.comparison.measures import CURVES
from transduce.comparison.result import Point, RecipeComparison, System
from transduce.evaluation.charts import Curve, line_chart
from transduce.evaluation.html import render


def comparison_html(found: RecipeComparison, folder: Path) -> str:
    """Render the page, for a file in `folder`."""
    header, rows = found.table()
    by_time = [
        _chart(f"{title[:1].upper()}{title[1:]}", {one.name: one.curves.get(key, ()) for one in found.systems}, 0.1)
        for key, title in CURVES.items()
    ]
    by_length = _chart(
        f"{found.measure} by source length", {one.name: one.by_length for one in found.systems}, x_name="source tokens"
    )
    return render(
        "comparison.html",
        title=f"Comparison of {len(found.systems)} recipes",
        conditions=found.conditions,
        header=header,
        rows=rows,
        notes=found.notes(),
        by_time=list(filter(None, by_time)),
        by_length=by_length,
        recipes=[_recipe(one, found.settings[one.name], folder) for one in found.systems],
    )


def _chart(
    title: str, curves: Mapping[str, Sequence[Point]], settle: float = 0.0, *, x_name: str = "minutes"
) -> Markup:
    return line_chart(title, [Curve(*one) for one in curves.items()], settle=settle, x_name=x_name)


def _recipe(one: System, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A row of the table of recipes: its settings, and links to the reports."""
    reports = [
        (Path(run).name, quote(os.path.relpath(Path(run) / "report.html", folder).replace(os.sep, "/")))
        for run in one.runs
    ]
    return {"name": one.name, "kind": one.kind, "settings": settings.items(), "reports": reports}
