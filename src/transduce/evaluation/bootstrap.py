"""Paired bootstrap: do two systems differ on these examples? (Koehn 2004)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

N_SAMPLES, SEED = 1000, 12345  # sacreBLEU's


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
    n_samples: int = N_SAMPLES,
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
        n_samples: Draws.
    """
    n = len(ours[0])
    assert all(len(one) == n for one in (*ours, *theirs)), "the same examples"
    draws = np.random.default_rng(SEED).choice(n, size=(n_samples, n), replace=True)
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
        p_value=1.0 if real == other or n == 1 else (beyond + 1) / (n_samples + 1),  # one example has one draw
        margin=_margin(sampled),
        other_margin=_margin(other_sampled),
        higher_is_better=higher_is_better,
    )


def _margin(sampled: np.ndarray) -> float:
    """Half the width of the interval of 95 %, between samples as in sacreBLEU."""
    outside = len(sampled) // 40
    ordered = np.sort(sampled)
    return float(ordered[len(ordered) - outside - 1] - ordered[outside]) / 2
