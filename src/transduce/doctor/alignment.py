"""Detect shifted lines, as pure functions of the two sides of some lines.

A sentence and its translation have similar lengths and the same numbers. A window of lines is compared under every
shift from -20 to 20. If another shift than 0 fits and 0 does not, a line was lost or added before the window.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_SHIFT = 20  # lines
_FEWEST = 60  # lines of a window
_DIGITS = re.compile(r"\d+")
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The best shift of a window, and the correlation of lengths with it (`best`) and without (`straight`).

    `sure`: the shift is significantly better than none. `numbers`: lines with digits; `same`: lines whose counterpart
    has the same digits without a shift.
    """

    shift: int
    best: float
    straight: float
    sure: bool
    numbers: int = 0
    same: int = 0


def fit(rows: Sequence[Row]) -> Fit:
    """Find the shift of a window.

    >>> words = [("a" * n, "b" * (2 * n)) for n in (7, 1, 9, 3, 12, 5, 8, 2, 14, 4, 6, 11) * 8]
    >>> fit([(src, words[i - 1][1]) for i, (src, _) in enumerate(words)]).shift
    1
    """
    src, tgt = lengths(rows)
    n = len(rows)
    digits = [(_digits(a), _digits(b)) for a, b in rows]
    having = [i for i, (a, _) in enumerate(digits) if a]
    by_shift, scores = dict[int, float](), dict[int, float]()
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, -shift), min(n, n - shift)
        if end - begin < _FEWEST:
            continue
        r = by_shift[shift] = correlation(src[begin:end], tgt[begin + shift : end + shift])
        inside = [i for i in having if begin <= i < end]
        same = sum(digits[i][0] == digits[i + shift][1] for i in inside)
        copied = same / len(inside) if len(inside) >= 5 else 0.0
        scores[shift] = math.atanh(min(0.999, max(-0.999, r))) * math.sqrt(end - begin - 3) + 8 * copied
    if not by_shift:
        return Fit(0, 0.0, 0.0, sure=False)
    shift = max(scores, key=lambda s: (scores[s], -abs(s)))
    straight = by_shift.get(0, 0.0)
    sure = shift != 0 and scores[shift] - scores[0] > 6 and by_shift[shift] > 0.4 and by_shift[shift] - straight > 0.25
    same = sum(digits[i][0] == digits[i][1] for i in having)
    return Fit(shift, by_shift[shift], straight, sure, len(having), same)


def lengths(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the lengths of both sides, in characters."""
    src, tgt = (np.log1p([float(len(row[side])) for row in rows]) for side in (0, 1))
    return src, tgt


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm > 1e-9 else 0.0


def turning_point(rows: Sequence[Row], before: int, after: int) -> int:
    """The row from which on shift `after` fits better than shift `before`."""
    src, tgt = lengths(rows)
    mean = float(np.median(tgt) - np.median(src))
    digits = [(_digits(a), _digits(b)) for a, b in rows]

    def misfit(shift: int) -> np.ndarray:
        at = np.clip(np.arange(len(rows)) + shift, 0, len(rows) - 1)
        differing = [2.0 * (digits[i][0] != digits[j][1]) for i, j in enumerate(at.tolist())]
        return np.minimum(2.0, np.abs(tgt[at] - src - mean)) + np.array(differing)

    gained = np.concatenate(([0.0], np.cumsum(misfit(before) - misfit(after))))
    return int(np.argmin(gained))


def _digits(text: str) -> tuple[str, ...]:
    return tuple(sorted(str(int(number[:18])) for number in _DIGITS.findall(text)))  # of any script
