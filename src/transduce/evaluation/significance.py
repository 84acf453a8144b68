"""Paired bootstrap significance tests (Koehn 2004), computed from the statistics of each example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import estimate_ci

from transduce.evaluation.metrics import metrics

N_SAMPLES, SEED = 1000, 12345  # as in sacreBLEU


@dataclass(frozen=True, slots=True)
class Measure:
    """A score as a function of statistics [k], summed over examples. `form`: number format."""

    name: str
    score: Callable[[np.ndarray], float]
    higher_is_better: bool = True
    form: str = "{:.2f}"


def _scored_by(metric: Metric) -> Callable[[np.ndarray], float]:
    """Return the function that computes a sacreBLEU metric's score from statistics; it does not need the tokenizer."""
    return lambda statistics: float(metric._compute_score_from_stats(statistics.tolist()).score)


def ratio_of(statistics: np.ndarray) -> float:
    """Divide the first of two statistics by the second; NaN if the second is 0."""
    return float(statistics[0] / statistics[1]) if statistics[1] else math.nan


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("BLEU", _scored_by(BLEU(force=True))),
        Measure("chrF", _scored_by(CHRF())),
        Measure("TER", _scored_by(TER()), higher_is_better=False),
        Measure("accuracy", ratio_of, form="{:.4f}"),
        Measure("masked-token accuracy", ratio_of, form="{:.4f}"),
        Measure("bits per byte", ratio_of, higher_is_better=False, form="{:.4f}"),
    )
}
"""Measures by name."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of a model on one held-out set of n examples.

    `measure`: a key of MEASURES. `statistics`: [n, k]; n is 1 for running text. `signature`: settings of the measure.
    """

    name: str
    measure: str
    statistics: np.ndarray
    signature: str = ""

    @property
    def value(self) -> float:
        return MEASURES[self.measure].score(self.statistics.sum(0))

    def to_json(self) -> dict[str, Any]:
        own = {"name": self.name, "measure": self.measure, "signature": self.signature}
        return own | {"statistics": self.statistics.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outputs:
        """Read the result of `to_json`. Raises `ValueError` or `KeyError` for other values."""
        statistics = np.array(values["statistics"], dtype=np.float64)
        if values["measure"] not in MEASURES or statistics.ndim != 2:
            raise ValueError("these are not the statistics of a set")
        return cls(str(values["name"]), values["measure"], statistics, str(values["signature"]))


def outputs_of(
    hypotheses: Sequence[str], references: Sequence[str], metric: Metric, *, measure: str, name: str = ""
) -> Outputs:
    """Compute the statistics of a sacreBLEU metric, called `measure` in MEASURES, for translations."""
    statistics = np.array(metric._extract_corpus_statistics(list(hypotheses), [list(references)]), dtype=np.float64)
    return Outputs(name, measure, statistics, str(metric.get_signature()))


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two mean scores, ours - theirs, with the 95 % interval over resampled test sets.

    `p_value`: probability of a difference of this size between equal systems. `margin` and `other_margin`: half the
    widths of the 95 % intervals of our score and of the other.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    margin: float
    other_margin: float
    higher_is_better: bool = True

    @property
    def is_significant(self) -> bool:
        """Whether p < 0.05 and the interval excludes 0; near the limit, only one of the two may be true."""
        return self.p_value < 0.05 and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def verdict(self) -> str:
        if not self.is_significant:
            return "no significant difference"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"

    def format(self, form: str = "{:+.2f}") -> str:
        """Format as "difference [interval]"."""
        low, high = (form.format(bound) for bound in self.interval)
        return f"{form.format(self.difference)} [{low}, {high}]"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def paired_bootstrap(
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    score: Callable[[np.ndarray], float],
    *,
    higher_is_better: bool = True,
) -> Difference:
    """Compare two systems, each trained with one or more seeds, on the same examples.

    Examples are resampled, and all trainings of both systems are scored on each draw (Koehn 2004, with the draws and
    the p-value of sacreBLEU). The compared score is the mean over trainings, so the test covers the choice of examples.
    The standard deviation over seeds shows the effect of the seed.

    `ours`, `theirs`: statistics [n, k] of each training. `score`: maps statistics [k], summed over examples, to a
    score.
    """
    n = len(ours[0])
    assert all(len(statistics) == n for statistics in (*ours, *theirs)), "the same examples"
    draws = np.random.default_rng(SEED).choice(n, size=(N_SAMPLES, n), replace=True)
    counts = np.stack([np.bincount(draw, minlength=n) for draw in draws]).astype(np.float64)  # [N, n]

    def means(systems: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
        real = [score(statistics.sum(0)) for statistics in systems]
        resampled = [[score(row) for row in counts @ statistics] for statistics in systems]
        return float(np.mean(real)), np.mean(np.array(resampled), axis=0)

    (real, sampled), (other, other_sampled) = means(ours), means(theirs)
    differences = np.abs(sampled - other_sampled)
    beyond = int(np.sum(differences - differences.mean() > abs(real - other)))
    low, high = np.percentile(sampled - other_sampled, [2.5, 97.5])
    return Difference(
        difference=real - other,
        interval=(float(low), float(high)),
        # a single example has only one resampling
        p_value=1.0 if real == other or n == 1 else (beyond + 1) / (N_SAMPLES + 1),
        margin=float(estimate_ci(sampled)[1]),
        other_margin=float(estimate_ci(other_sampled)[1]),
        higher_is_better=higher_is_better,
    )


def compare_outputs(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> Difference:
    """Compare two systems, each trained with one or more seeds, by their outputs on one set."""
    measure = MEASURES[ours[0].measure]
    own, other = ([outputs.statistics for outputs in system] for system in (ours, theirs))
    return paired_bootstrap(own, other, measure.score, higher_is_better=measure.higher_is_better)


@dataclass(frozen=True, slots=True)
class SystemComparison:
    """One metric of two systems on the same sentences."""

    metric: str
    value: float
    other: float
    by: Difference
    signature: str

    @classmethod
    def of(cls, ours: Outputs, theirs: Outputs) -> SystemComparison:
        by = compare_outputs([ours], [theirs])
        signature = ours.signature.replace("|", f"|bs:{N_SAMPLES}|seed:{SEED}|", 1)  # as in sacreBLEU
        return cls(ours.measure, ours.value, theirs.value, by, signature)

    def to_json(self) -> dict[str, Any]:
        own = {"metric": self.metric, "value": self.value, "other": self.other, "signature": self.signature}
        return own | self.by.to_json()

    def line(self) -> str:
        ours, theirs = f"{self.value:6.2f} ± {self.by.margin:.2f}", f"{self.other:6.2f} ± {self.by.other_margin:.2f}"
        difference = f"{self.by.format()}  p = {self.by.p_value:.4f}  {self.by.verdict}"
        return f"{self.metric:5} {ours}  against {theirs}  difference {difference}"


def compare_translations(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> list[SystemComparison]:
    """Compare `hypotheses` with `others` of another system: BLEU, chrF and TER, each with p-value and intervals.

    Raises `UserError` for an unknown tokenizer.
    """
    comparisons = []
    for name, metric in metrics(tokenize, lowercase).items():
        ours, theirs = (outputs_of(system, references, metric, measure=name) for system in (hypotheses, others))
        comparisons.append(SystemComparison.of(ours, theirs))
    return comparisons
