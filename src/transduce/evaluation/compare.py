"""Significance of the difference between two systems: paired bootstrap resampling (Koehn 2004) by sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from transduce.errors import UserError
from transduce.evaluation.metrics import check_lengths, metrics

_LOWER_IS_BETTER = frozenset({"TER"})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two systems on the same sentences. Intervals contain 95 % of the resampled corpora."""

    metric: str
    value: float
    other: float
    margin: float  # half the width of the interval of `value`
    other_margin: float
    difference: float  # value - other
    interval: tuple[float, float]  # of the difference
    p_value: float  # probability of such a difference between equal systems
    signature: str

    @property
    def verdict(self) -> str:
        """Result in words, at p < 0.05."""
        if self.p_value >= 0.05:
            return "no significant difference"
        return "better" if (self.difference < 0) == (self.metric in _LOWER_IS_BETTER) else "worse"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self) | {"interval": list(self.interval), "verdict": self.verdict}

    def line(self) -> str:
        """Format for people."""
        low, high = self.interval
        ours, theirs = f"{self.value:6.2f} ± {self.margin:.2f}", f"{self.other:6.2f} ± {self.other_margin:.2f}"
        by = f"{self.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        return f"{self.metric:5} {ours}  against {theirs}  difference {by}  p = {self.p_value:.4f}  {self.verdict}"


def paired_bootstrap(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
    n_samples: int = 1000,
) -> list[Comparison]:
    """Compare `hypotheses` with `others` of another system: BLEU, chrF and TER, each with p-value and intervals.

    Raises `DataError` if the three differ in length or are empty, `UserError` for an unknown tokenizer or
    `n_samples` below 1.
    """
    check_lengths(hypotheses, references)
    check_lengths(others, references, "hypotheses of the other system")
    if n_samples < 1:
        raise UserError(f"n_samples = {n_samples}: must be at least 1; 1000 is usual")
    return [
        _compare(name, metric, list(hypotheses), list(others), list(references), n_samples)
        for name, metric in metrics(tokenize, lowercase).items()
    ]


def _compare(
    name: str, metric: Metric, hypotheses: list[str], others: list[str], references: list[str], n_samples: int
) -> Comparison:
    # sacreBLEU takes the first system as the baseline.
    systems: list[tuple[str, Sequence[str]]] = [("other", others), ("this", hypotheses)]
    test = PairedTest(systems, {name: metric}, [references], test_type="bs", n_samples=n_samples)
    signatures, results = test()
    ((key, signature),) = signatures.items()
    systems_results: Any = results[key]  # a list, against its annotation
    other, this = systems_results
    return Comparison(
        metric=name,
        value=float(this.score),
        other=float(other.score),
        margin=float(this.ci),
        other_margin=float(other.ci),
        difference=float(this.score - other.score),
        interval=_interval(metric, hypotheses, others, references, n_samples, test._seed),
        # sacreBLEU gives identical systems the smallest p there is, 1 / (n_samples + 1).
        p_value=1.0 if this.score == other.score else float(this.p_value),
        signature=str(signature),
    )


def _interval(
    metric: Metric, hypotheses: list[str], others: list[str], references: list[str], n_samples: int, seed: int | None
) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile of the difference, over the same draws as sacreBLEU's test."""
    n = len(references)
    draws = np.random.default_rng(seed).choice(n, size=(n_samples, n), replace=True)

    def scores(system: list[str]) -> np.ndarray:
        statistics = np.array(metric._extract_corpus_statistics(system, [references]), dtype=np.float64)
        return np.array([metric._compute_score_from_stats(statistics[draw].sum(0)).score for draw in draws])

    low, high = np.percentile(scores(hypotheses) - scores(others), [2.5, 97.5])
    return float(low), float(high)
