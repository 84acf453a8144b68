"""The result of a comparison: a row per recipe, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transduce.comparison.measures import RunMeasures, Speeds
from transduce.evaluation.report import compact
from transduce.evaluation.significance import MEASURES, Difference, compare_outputs

BINS = 6  # of source length at most, with about the same number of examples where lengths allow
FEWEST = 40  # examples for which bins make sense

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One recipe, over its seeds.

    `minutes`, `tokens_per_second` (target tokens in training) and `updates` are means, `memory` is the largest peak in
    bytes. `nll`: of each seed. `scores`: of each seed, by test set. `differences`: of the score from that of the first
    recipe, by test set; None where the set is one running text. `curves`: by validation score, (minutes, mean score).
    `by_length`: (mean source tokens, mean score) of examples of similar length, all sets together.
    """

    name: str
    kind: str
    runs: tuple[str, ...]
    n_parameters: int
    updates: float
    minutes: float
    tokens_per_second: float | None
    memory: int | None
    nll: Sequence[float]
    scores: Mapping[str, Sequence[float]]
    differences: Mapping[str, Difference | None]
    curves: Mapping[str, Sequence[Point]]
    by_length: Sequence[Point]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"differences": {name: one and one.to_json() for name, one in self.differences.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """The systems in the order of their recipes.

    `conditions`: the settings that all of them share, for people. `settings`: by system, the model and training
    settings that differ from the first system's; for the first, all that differ in some system. `failed`: the reason
    why a training ended without a model, by run folder.
    """

    measure: str
    signature: str
    systems: Sequence[System]
    conditions: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]
    speeds: Speeds
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"systems": [system.to_json() for system in self.systems]}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows."""
        form, sets = MEASURES[self.measure].form, list(self.systems[0].scores)
        header = ["recipe", "parameters", "updates", "minutes", "tokens/s", "memory", "nats/token"]
        for name in sets:
            header += [f"{self.measure} {name}", "against the first"]
        if self.speeds.unit:
            header.append(f"{self.speeds.unit}/s")
        rows = []
        for place, one in enumerate(self.systems):
            row = [
                *(one.name, compact(one.n_parameters), f"{one.updates:,.0f}", f"{one.minutes:.1f}"),
                *(_format_count(one.tokens_per_second), _format_count(one.memory and one.memory / 1e6, " MB")),
                _format_scores(one.nll, "{:.3f}"),
            ]
            for name in sets:
                row += [
                    _format_scores(one.scores[name], form),
                    _format_difference(one.differences[name], form) if place else "",
                ]
            if self.speeds.unit:
                row.append(_format_count(self.speeds.per_second.get(one.name)))
            rows.append(row)
        return header, rows

    def lines(self) -> list[str]:
        """Format for people."""
        header, rows = self.table()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [*self.conditions, ""]
        for row in (header, *rows):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        return [*lines, "", *self.notes()]

    def notes(self) -> list[str]:
        """Explanations of the table's columns, and the failed trainings."""
        measure = MEASURES[self.measure]
        better = "higher is better" if measure.higher_is_better else "lower is better"
        notes = [f"{self.measure}: {better}" + (f"; {self.signature}" if self.signature else "")]
        if any(len(one.runs) > 1 for one in self.systems):
            notes.append("±: standard deviation over seeds")
        if any(one.memory for one in self.systems):
            notes.append("memory: peak of the process, including memory kept from earlier trainings")
        if any(one is not None for system in self.systems[1:] for one in system.differences.values()):
            notes.append(
                "against the first: difference of the means, [95 % interval] by paired bootstrap over the test set; "
                "* p < 0.05 and an interval without 0, not corrected for the number of recipes"
            )
        if self.speeds.unit:
            notes.append(f"{self.speeds.unit}/s: {self.speeds.engine}, first seed, the models take turns")
        return [*notes, *(f"failed: {run}: {why}" for run, why in self.failed.items())]


def _format_count(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,.0f}{unit}"


def _format_scores(values: Sequence[float], form: str) -> str:
    """Format as mean ± sample standard deviation, if there are several values."""
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _format_difference(found: Difference | None, form: str) -> str:
    return "" if found is None else found.format(form.replace("{:", "{:+")) + ("*" if found.is_significant else " ")


def system_of(name: str, kind: str, runs: Mapping[Path, RunMeasures], baseline: Sequence[RunMeasures]) -> System:
    """Aggregate the measures of a recipe's runs, by folder; `baseline`: those of the first recipe."""
    found = list(runs.values())
    speeds = [run.tokens_per_second for run in found if run.tokens_per_second is not None]
    scores, differences = dict[str, list[float]](), dict[str, Difference | None]()
    for place, one in enumerate(found[0].sets):
        ours, theirs = ([run.sets[place] for run in some] for some in (found, baseline))
        scores[one.name] = [outputs.value for outputs in ours]
        differences[one.name] = compare_outputs(ours, theirs) if len(one.statistics) > 1 else None
    return System(
        name=name,
        kind=kind,
        runs=tuple(map(str, runs)),
        n_parameters=found[0].n_parameters,
        updates=statistics.fmean(run.updates for run in found),
        minutes=statistics.fmean(run.seconds for run in found) / 60,
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        memory=max((run.memory for run in found if run.memory is not None), default=None),
        nll=[run.nll for run in found],
        scores=scores,
        differences=differences,
        curves={key: _mean_curve([run.curves[key] for run in found]) for key in found[0].curves},
        by_length=scores_by_length(found),
    )


def _mean_curve(curves: Sequence[Mapping[int, Point]]) -> list[Point]:
    """The mean over seeds of (minutes, score), at the updates that all have."""
    updates = sorted(set.intersection(*map(set, curves)))
    return [tuple(np.mean([curve[update] for curve in curves], axis=0).tolist()) for update in updates]


def scores_by_length(runs: Sequence[RunMeasures]) -> list[Point]:
    """(Mean length, mean score over seeds) of groups of similar source length, from all sets together."""
    lengths = np.concatenate([one.lengths for one in runs[0].sets])
    if len(lengths) < FEWEST:
        return []
    score = MEASURES[runs[0].sets[0].measure].score
    tables = [np.concatenate([one.statistics for one in run.sets]) for run in runs]
    edges = np.quantile(lengths, np.linspace(0, 1, BINS + 1)[1:-1])
    bins = np.digitize(lengths, edges, right=True)
    found = []
    for number in np.unique(bins):
        group = bins == number
        values = [score(table[group].sum(0)) for table in tables]
        found.append((float(lengths[group].mean()), float(np.mean(values))))
    return found
