"""Paired bootstrap of the mean score of several trainings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

N_SAMPLES, SEED = 1000, 12345  # sacreBLEU's


def is_significant(p_value: float, interval: tuple[float, float]) -> bool:
    """Whether two systems differ: p < 0.05, and the 95 % interval of the difference excludes 0."""
    return p_value < 0.05 and not interval[0] <= 0 <= interval[1]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two mean scores, ours - theirs; `interval` contains 95 % of the resampled test sets.

    `p_value`: probability of such a difference between equal systems.
    """

    difference: float
    interval: tuple[float, float]
    p_value: float
    higher_is_better: bool = True

    @property
    def verdict(self) -> str:
        """Result in words."""
        if not is_significant(self.p_value, self.interval):
            return "no significant difference"
        return "better" if (self.difference > 0) == self.higher_is_better else "worse"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"verdict": self.verdict}


def bootstrap_means(
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    score: Callable[[np.ndarray], float],
    *,
    higher_is_better: bool = True,
) -> Difference | None:
    """Compare two systems, each trained with one or more seeds, on the same examples.

    Examples are resampled, and all trainings of both systems are scored on the same draw (Koehn 2004, with the p-value
    of sacreBLEU); what is compared is the mean over trainings. So the test covers the choice of examples; the choice of
    seeds is shown by the deviation over seeds. None for fewer than two examples.

    Args:
        ours: Statistics of each training, [n, k].
        theirs: The same of the other system.
        score: From summed statistics [k].
        higher_is_better: For the verdict.
    """
    n = len(ours[0])
    assert all(len(one) == n for one in (*ours, *theirs)), "the same examples"
    if n < 2:
        return None
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
    p_value = 1.0 if real == other else (beyond + 1) / (N_SAMPLES + 1)
    return Difference(real - other, (float(low), float(high)), p_value, higher_is_better)
