"""Do two systems differ on these examples? Statistics of each example, scores, and paired bootstrap (Koehn 2004).

From the statistics of several systems come scores, scores by length and significance tests, without the text.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import estimate_ci

from transduce.evaluation.metrics import metrics

N_SAMPLES, SEED = 1000, 12345  # sacreBLEU's


@dataclass(frozen=True, slots=True)
class Measure:
    """A score: `score` of summed statistics [k]. `form` formats it."""

    name: str
    score: Callable[[np.ndarray], float]
    higher_is_better: bool = True
    form: str = "{:.2f}"


def _scored_by(metric: Metric) -> Callable[[np.ndarray], float]:
    """The corpus score of one of sacreBLEU's metrics from its statistics, which do not depend on its tokenizer."""
    return lambda statistics: float(metric._compute_score_from_stats(statistics.tolist()).score)


def ratio_of(statistics: np.ndarray) -> float:
    """The first statistic divided by the second."""
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
"""By name."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """A model's results on one held-out set of n examples.

    `measure`: a key of MEASURES. `statistics`: [n, k]. `lengths`: source tokens of each example, [n]; empty for running
    text, which is one example. `signature`: how the measure was computed.
    """

    name: str
    measure: str
    statistics: np.ndarray
    lengths: np.ndarray
    signature: str = ""

    @property
    def value(self) -> float:
        """The score of the set."""
        return MEASURES[self.measure].score(self.statistics.sum(0))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        arrays = {"statistics": self.statistics.tolist(), "lengths": self.lengths.tolist()}
        return {"name": self.name, "measure": self.measure, "signature": self.signature, **arrays}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outputs:
        """The inverse of `to_json`. Raises `ValueError` or `KeyError` for other values."""
        statistics, lengths = np.array(values["statistics"], dtype=np.float64), np.array(values["lengths"], dtype=int)
        if values["measure"] not in MEASURES or statistics.ndim != 2 or len(lengths) not in (0, len(statistics)):
            raise ValueError("these are not the statistics of a set")
        return cls(str(values["name"]), values["measure"], statistics, lengths, str(values["signature"]))


class ScoredModel(ABC):
    """The model of a finished run, with test sets, or else a validation set."""

    unit: ClassVar[str] = ""
    """The unit that `run_again` counts, in the plural; empty: the model has no speed to measure."""
    engine: Literal["native library", "PyTorch"] = "PyTorch"
    """The engine that runs the model."""

    @abstractmethod
    def outputs(self) -> list[Outputs]:
        """The results on all sets."""

    def run_again(self, n: int) -> int:
        """Process the first n examples of the first set, for a measurement of speed; returns their number."""
        return 0

    def use_pytorch(self) -> None:
        """Compute with PyTorch from here on, as models do that the native library does not support."""
        assert self.engine == "PyTorch"


def outputs_of(
    hypotheses: Sequence[str],
    references: Sequence[str],
    metric: Metric,
    *,
    measure: str,
    name: str = "",
    lengths: Sequence[int] = (),
) -> Outputs:
    """Translations with the statistics of one of sacreBLEU's metrics, called `measure` in MEASURES."""
    statistics = np.array(metric._extract_corpus_statistics(list(hypotheses), [list(references)]), dtype=np.float64)
    return Outputs(name, measure, statistics, np.array(lengths, dtype=int), str(metric.get_signature()))


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two mean scores, ours - theirs; `interval` contains 95 % of the resampled test sets.

    `p_value`: probability of such a difference between equal systems. `margin`, `other_margin`: half the width of such
    an interval of each score.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    margin: float
    other_margin: float
    higher_is_better: bool = True

    @property
    def is_significant(self) -> bool:
        """Whether p < 0.05 and the interval excludes 0. They differ slightly, so that one may hold alone."""
        return self.p_value < 0.05 and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def verdict(self) -> str:
        """Result in words."""
        if not self.is_significant:
            return "no significant difference"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"

    def format(self, form: str = "{:+.2f}") -> str:
        """Format as difference [interval]."""
        low, high = (form.format(bound) for bound in self.interval)
        return f"{form.format(self.difference)} [{low}, {high}]"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"verdict": self.verdict}


def paired_bootstrap(
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    score: Callable[[np.ndarray], float],
    *,
    higher_is_better: bool = True,
) -> Difference:
    """Compare two systems, each trained with one or more seeds, on the same examples.

    Examples are resampled, and all trainings of both systems are scored on the same draw (Koehn 2004, with the draws
    and the p-value of sacreBLEU); what is compared is the mean over trainings. So the test covers the choice of
    examples; the choice of seeds is shown by the deviation over seeds.

    Args:
        ours: Statistics of each training, [n, k].
        theirs: The same of the other system.
        score: From summed statistics [k].
        higher_is_better: For the verdict.
    """
    n = len(ours[0])
    assert all(len(one) == n for one in (*ours, *theirs)), "the same examples"
    draws = np.random.default_rng(SEED).choice(n, size=(N_SAMPLES, n), replace=True)
    counts = np.stack([np.bincount(draw, minlength=n) for draw in draws]).astype(np.float64)  # [N, n]

    def means(systems: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
        real = [score(statistics.sum(0)) for statistics in systems]
        resampled = [[score(row) for row in counts @ statistics] for statistics in systems]
        return float(np.mean(real)), np.mean(np.array(resampled), axis=0)

    (real, sampled), (other, other_sampled) = means(ours), means(theirs)
    found = np.abs(sampled - other_sampled)
    beyond = int(np.sum(found - found.mean() > abs(real - other)))
    low, high = np.percentile(sampled - other_sampled, [2.5, 97.5])
    return Difference(
        difference=real - other,
        interval=(float(low), float(high)),
        p_value=1.0 if real == other or n == 1 else (beyond + 1) / (N_SAMPLES + 1),  # one example has one draw
        margin=float(estimate_ci(sampled)[1]),
        other_margin=float(estimate_ci(other_sampled)[1]),
        higher_is_better=higher_is_better,
    )


def compare_outputs(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> Difference:
    """Compare two systems, each trained with one or more seeds, by their outputs on one set."""
    measure = MEASURES[ours[0].measure]
    return paired_bootstrap(
        [one.statistics for one in ours],
        [one.statistics for one in theirs],
        measure.score,
        higher_is_better=measure.higher_is_better,
    )


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
        """Compare the outputs of two systems on a set."""
        by = compare_outputs([ours], [theirs])
        signature = ours.signature.replace("|", f"|bs:{N_SAMPLES}|seed:{SEED}|", 1)  # where sacreBLEU puts them
        return cls(ours.measure, ours.value, theirs.value, by, signature)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = {"metric": self.metric, "value": self.value, "other": self.other, "signature": self.signature}
        return own | self.by.to_json()

    def line(self) -> str:
        """Format for people."""
        ours, theirs = f"{self.value:6.2f} ± {self.by.margin:.2f}", f"{self.other:6.2f} ± {self.by.other_margin:.2f}"
        found = f"{self.by.format()}  p = {self.by.p_value:.4f}  {self.by.verdict}"
        return f"{self.metric:5} {ours}  against {theirs}  difference {found}"


def compare_translations(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> list[SystemComparison]:
    """Compare `hypotheses` with `others` of another system: BLEU, chrF and TER, each with p-value and intervals.

    All three have the same length. Raises `UserError` for an unknown tokenizer.
    """
    found = []
    for name, metric in metrics(tokenize, lowercase).items():
        ours, theirs = (outputs_of(system, references, metric, measure=name) for system in (hypotheses, others))
        found.append(SystemComparison.of(ours, theirs))
    return found
