"""The result of a comparison: a row per recipe, as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from transduce.comparison.measures import RunMeasures, Speeds
from transduce.evaluation.bootstrap import Difference, paired_bootstrap
from transduce.evaluation.outputs import MEASURES
from transduce.evaluation.report import compact

BINS = 6  # of source length at most, with about the same number of examples where lengths allow
FEWEST = 20  # examples in a bin

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of several seeds; `deviation`: their sample standard deviation, None for a single one."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Their sample standard deviation; None for a single value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def shown(self, form: str) -> str:
        """Format as mean ± deviation."""
        deviation = self.deviation
        return form.format(self.mean) + ("" if deviation is None else f" ± {form.format(deviation)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"mean": self.mean, "deviation": self.deviation, "values": list(self.values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One recipe, over its seeds.

    `minutes`, `tokens_per_second` (target tokens in training) and `updates` are means, `memory` is the largest peak in
    bytes. `scores`: by test set. `differences`: of the score from that of the first recipe, by test set; None where the
    set is one running text. `curves`: by validation score, (minutes, mean score). `by_length`: (mean source tokens,
    mean score) of examples of similar length, all sets together. `per_second`: examples that the model processes.
    """

    name: str
    kind: str
    runs: tuple[str, ...]
    n_parameters: int
    updates: float
    minutes: float
    tokens_per_second: float | None
    memory: int | None
    nll: Spread
    scores: Mapping[str, Spread]
    differences: Mapping[str, Difference | None]
    curves: Mapping[str, Sequence[Point]]
    by_length: Sequence[Point]
    per_second: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {
            "nll": self.nll.to_json(),
            "scores": {name: spread.to_json() for name, spread in self.scores.items()},
            "differences": {name: one and one.to_json() for name, one in self.differences.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """The systems in the order of their recipes.

    `conditions`: what all of them share, for people. `settings`: by system, the model and training settings that not
    all systems have in common. `failed`: why a training ended without a model, by run folder.
    """

    measure: str
    signature: str
    systems: Sequence[System]
    conditions: Sequence[str]
    settings: Mapping[str, Mapping[str, Any]]
    speeds: Speeds
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {name: getattr(self, name) for name in ("measure", "signature", "conditions", "settings", "failed")}
        fronts = {"parameters": self.front("parameters"), "speed": self.front("speed")}
        systems = [system.to_json() for system in self.systems]
        return {**plain, "systems": systems, "speeds": asdict(self.speeds), "pareto": fronts}

    def front(self, cost: str) -> list[str]:
        """Names of the systems that no other one beats in both the first score and `cost` (parameters or speed)."""
        sign = 1.0 if MEASURES[self.measure].higher_is_better else -1.0
        points = {}
        for system in self.systems:
            benefit = -float(system.n_parameters) if cost == "parameters" else system.per_second
            if benefit is not None:
                points[system.name] = (sign * next(iter(system.scores.values())).mean, benefit)
        return pareto_front(points)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows."""
        form, sets = MEASURES[self.measure].form, list(self.systems[0].scores) if self.systems else []
        speed = [f"{self.speeds.unit}/s"] if self.speeds.unit else []
        header = ["recipe", "parameters", "updates", "minutes", "tokens/s", "memory", "nats/token"]
        header += [part for name in sets for part in (f"{self.measure} {name}", "against the first")] + speed
        rows = []
        for place, one in enumerate(self.systems):
            row = [
                *(one.name, compact(one.n_parameters), f"{one.updates:,.0f}", f"{one.minutes:.1f}"),
                *(_cell(one.tokens_per_second), _cell(one.memory and one.memory / 1e6, " MB")),
                one.nll.shown("{:.3f}"),
            ]
            for name in sets:
                row += [one.scores[name].shown(form), _shown(one.differences[name], form) if place else ""]
            rows.append([*row, *([_cell(one.per_second)] if speed else [])])
        return header, rows

    def lines(self) -> list[str]:
        """Format for people."""
        header, rows = self.table()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [*self.conditions, ""]
        for row in (header, *rows):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        lines += ["", *self.notes()]
        return lines

    def notes(self) -> list[str]:
        """What the table means."""
        measure = MEASURES[self.measure]
        better = "higher is better" if measure.higher_is_better else "lower is better"
        notes = [f"{self.measure}: {better}" + (f"; {self.signature}" if self.signature else "")]
        n_seeds = max((len(one.runs) for one in self.systems), default=0)
        if n_seeds > 1:
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
        for cost in ("parameters", "speed"):
            if len(self.systems) > 1 and (names := self.front(cost)):
                notes.append(f"Pareto front of {self.measure} and {cost}: {', '.join(names)}")
        return [*notes, *(f"failed: {run}: {why}" for run, why in self.failed.items())]


def _cell(value: float | None, unit: str = "") -> str:
    return "" if value is None else f"{value:,.0f}{unit}"


def _shown(found: Difference | None, form: str) -> str:
    return "" if found is None else found.shown(form.replace("{:", "{:+")) + ("*" if found.is_significant else " ")


def system_of(
    name: str, kind: str, runs: Mapping[str, RunMeasures], first: Sequence[RunMeasures], per_second: float | None
) -> System:
    """Aggregate the measures of a recipe's runs, by folder; `first`: those of the first recipe."""
    found = list(runs.values())
    speeds = [run.tokens_per_second for run in found if run.tokens_per_second is not None]
    scores, differences = dict[str, Spread](), dict[str, Difference | None]()
    for place, one in enumerate(found[0].sets):
        measure = MEASURES[one.measure]
        scores[one.name] = Spread(tuple(run.sets[place].value for run in found))
        ours, theirs = ([run.sets[place].statistics for run in some] for some in (found, first))
        differences[one.name] = None
        if len(one.statistics) > 1:
            better = measure.higher_is_better
            differences[one.name] = paired_bootstrap(ours, theirs, measure.score, higher_is_better=better)
    return System(
        name=name,
        kind=kind,
        runs=tuple(runs),
        n_parameters=found[0].n_parameters,
        updates=statistics.fmean(run.updates for run in found),
        minutes=statistics.fmean(run.seconds for run in found) / 60,
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        memory=max((run.memory for run in found if run.memory is not None), default=None),
        nll=Spread(tuple(run.nll for run in found)),
        scores=scores,
        differences=differences,
        curves={key: _mean_curve([run.curves[key] for run in found]) for key in found[0].curves},
        by_length=scores_by_length(found),
        per_second=per_second,
    )


def _mean_curve(curves: Sequence[Mapping[int, Point]]) -> list[Point]:
    """The mean over seeds of (minutes, score), at the updates that all have."""
    updates = sorted(set.intersection(*map(set, curves)))
    return [tuple(np.mean([curve[update] for curve in curves], axis=0).tolist()) for update in updates]


def scores_by_length(runs: Sequence[RunMeasures]) -> list[Point]:
    """(Mean length, mean score over seeds) of examples of similar source length, from all sets together."""
    lengths = np.concatenate([one.lengths for one in runs[0].sets])
    if len(lengths) < 2 * FEWEST:
        return []
    score = MEASURES[runs[0].sets[0].measure].score
    n_bins = min(BINS, len(lengths) // FEWEST)
    edges, low = list[float](), -math.inf
    for edge in np.unique(np.quantile(lengths, np.linspace(0, 1, n_bins + 1)[1:-1])).tolist():
        if min(np.sum((lengths >= low) & (lengths < edge)), np.sum(lengths >= edge)) >= FEWEST:
            edges.append(low := edge)
    bins = np.searchsorted(edges, lengths, side="right")
    found = []
    for number in np.unique(bins):
        chosen = bins == number
        values = [score(np.concatenate([one.statistics for one in run.sets])[chosen].sum(0)) for run in runs]
        found.append((float(lengths[chosen].mean()), float(np.mean(values))))
    return found


def pareto_front(points: Mapping[str, Point]) -> list[str]:
    """Names of the points that no other one beats: none is at least as high in both values and higher in one.

    >>> pareto_front({"a": (1.0, 5.0), "b": (2.0, 3.0), "c": (1.5, 2.0)})
    ['a', 'b']
    """

    def beats(one: Point, other: Point) -> bool:
        return one[0] >= other[0] and one[1] >= other[1] and one != other

    kept = {name: point for name, point in points.items() if not any(map(math.isnan, point))}
    return [name for name, point in kept.items() if not any(beats(other, point) for other in kept.values())]
