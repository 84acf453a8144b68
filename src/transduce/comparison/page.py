"""`compare.html`: the result of a comparison, as one page that works offline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from transduce.comparison.measures import CURVES
from transduce.comparison.result import Point, RecipeComparison
from transduce.evaluation.charts import TEMPLATES, Curve, line_chart, scatter_chart
from transduce.inspection.html import render


def comparison_html(found: RecipeComparison, folder: Path) -> str:
    """Render the page, for a file in `folder`."""
    header, rows = found.table()
    return render(
        "comparison.html",
        folder=TEMPLATES,
        title=f"Comparison of {len(found.systems)} recipes",
        conditions=found.conditions,
        header=header,
        rows=rows,
        notes=found.notes(),
        plots=_plots(found),
        recipes=_recipes(found, folder),
    )


def _plots(found: RecipeComparison) -> list[tuple[str, str, list[Markup]]]:
    """Heading, explanation and charts of each section; empty charts are left out."""
    by_time = [
        _lines(title[:1].upper() + title[1:], {one.name: one.curves.get(key, ()) for one in found.systems}, settle=0.1)
        for key, title in CURVES.items()
    ]
    by_length = _lines(
        f"{found.measure} by source length", {one.name: one.by_length for one in found.systems}, x_name="source tokens"
    )
    return [
        ("Quality against time", "Means over seeds. The x axes show minutes of training.", _some(by_time)),
        (
            "Quality against length",
            "Test examples in groups of similar source length. The x axis shows the mean number of source tokens.",
            _some([by_length]),
        ),
        (
            "Quality against cost",
            "The line connects recipes that no other one beats in both.",
            _some([_scatter(found, "parameters"), _scatter(found, "speed")]),
        ),
    ]


def _some(charts: Sequence[Markup]) -> list[Markup]:
    return [chart for chart in charts if chart]


def _lines(
    title: str, curves: Mapping[str, Sequence[Point]], *, settle: float = 0.0, x_name: str = "minutes"
) -> Markup:
    return line_chart(title, [Curve(*one) for one in curves.items()], settle=settle, x_name=x_name)


def _scatter(found: RecipeComparison, cost: str) -> Markup:
    x_name = "parameters" if cost == "parameters" else f"{found.speeds.unit} per second"
    points = {
        one.name: (float(x), next(iter(one.scores.values())).mean)
        for one in found.systems
        if (x := one.n_parameters if cost == "parameters" else one.per_second) is not None
    }
    return scatter_chart(f"{found.measure} against {x_name}", points, front=found.front(cost))


def _recipes(found: RecipeComparison, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table of recipes."""
    first = found.settings[found.systems[0].name]
    rows = []
    for one in found.systems:
        own = found.settings[one.name].items()
        settings = [
            (key, json.dumps(value))
            for key, value in own
            if first is found.settings[one.name] or first.get(key) != value
        ]
        reports = [
            (Path(run).name, quote(os.path.relpath(Path(run) / "report.html", folder).replace(os.sep, "/")))
            for run in one.runs
        ]
        rows.append({"name": one.name, "kind": one.kind, "settings": settings, "reports": reports})
    return rows
