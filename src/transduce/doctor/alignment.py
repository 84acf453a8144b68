"""Check that line n of one file is the translation of line n of the other.

A sentence and its translation have similar lengths and the same numbers. A window of lines is compared under every
shift from -20 to 20. If another shift than 0 fits and 0 does not, a line was lost or added before the window.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.check_sample import Sample, Windows
from transduce.data.corpus import Pair
from transduce.doctor.findings import Finding, percent

MAX_SHIFT = 20  # lines
WINDOWS = 150  # examined in each corpus
_FEWEST = 60  # lines of a window
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Fit:
    """The best shift of a window, and the correlation of lengths with it (`best`) and without (`unshifted`).

    `sure`: the shift is significantly better than none. `numbers`: lines with digits; `same`: lines whose counterpart
    has the same digits without a shift.
    """

    shift: int
    best: float
    unshifted: float
    sure: bool
    numbers: int = 0
    same: int = 0


def fit(pairs: Sequence[tuple[str, str]]) -> Fit:
    """Find the shift of a window.

    >>> words = [("a" * n, "b" * (2 * n)) for n in (7, 1, 9, 3, 12, 5, 8, 2, 14, 4, 6, 11) * 8]
    >>> fit([(src, words[i - 1][1]) for i, (src, _) in enumerate(words)]).shift
    1
    """
    n, digits = len(pairs), [(_digits(src), _digits(tgt)) for src, tgt in pairs]
    src, tgt = (np.log1p([float(len(pair[side])) for pair in pairs]) for side in (0, 1))
    having = [i for i, (a, _) in enumerate(digits) if a]
    by_shift, scores = dict[int, float](), dict[int, float]()
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, -shift), min(n, n - shift)
        if end - begin < _FEWEST:
            continue
        r = by_shift[shift] = _correlation(src[begin:end], tgt[begin + shift : end + shift])
        inside = [i for i in having if begin <= i < end]
        same = sum(digits[i][0] == digits[i + shift][1] for i in inside)
        copied = same / len(inside) if len(inside) >= 5 else 0.0
        scores[shift] = math.atanh(min(0.999, max(-0.999, r))) * math.sqrt(end - begin - 3) + 8 * copied
    if not by_shift:
        return Fit(0, 0.0, 0.0, sure=False)
    shift = max(scores, key=lambda s: (scores[s], -abs(s)))
    unshifted = by_shift[0]
    sure = shift != 0 and scores[shift] - scores[0] > 6 and by_shift[shift] > 0.4 and by_shift[shift] - unshifted > 0.25
    return Fit(shift, by_shift[shift], unshifted, sure, len(having), sum(digits[i][0] == digits[i][1] for i in having))


def alignment(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Line n of one side is the translation of line n of the other, not of a line before or after it."""
    yield from (one for corpus in sample.train for one in _alignment_of(corpus))
    held_out = (*sample.valid, *sample.tests)
    yield from (one for corpus in held_out for one in _alignment_of(corpus) if one.level != "note")


def _alignment_of(corpus: Windows[Pair]) -> Iterator[Finding]:
    windows = corpus.kept[:: max(1, len(corpus.kept) // WINDOWS)]
    fits = [
        (window[0].line, fit([(pair.src, pair.tgt) for pair in window])) for window in windows if len(window) >= _FEWEST
    ]
    if any(one.sure for _, one in fits):
        yield _shift(corpus, fits)
    elif fits:
        r = statistics.median(one.unshifted for _, one in fits)
        numbers, same = sum(one.numbers for _, one in fits), sum(one.same for _, one in fits)
        digits = (
            f"; of {numbers:,} lines with digits, {percent(same / numbers)} have the same in both" if numbers else ""
        )
        figures = {"correlation": round(r, 3), "numbers": numbers, "same_numbers": same}
        n_pairs = sum(map(len, windows))
        if r < 0.15 and n_pairs >= 400 and (numbers < 20 or same < 0.2 * numbers):
            text = (
                f"{corpus.name}: source and target look misaligned: the correlation of their lengths is {r:.2f} "
                f"(translations have 0.6 to 0.95){digits}"
            )
            yield Finding("alignment", "warning", text, "is one side sorted, shuffled or another text?", figures)
        else:
            text = (
                f"{corpus.name}: the sides are aligned in {len(fits)} places (correlation of lengths {r:.2f}{digits})"
            )
            yield Finding("alignment", "note", text, figures=figures)


def _shift(corpus: Windows[Pair], fits: list[tuple[int, Fit]]) -> Finding:
    """The first shift, and the lines between which it begins. `fits`: with the line that each window begins with."""
    shifted = [(line, one) for line, one in fits if one.sure]
    line, one = shifted[0]
    aligned = [earlier for earlier, other in fits if not other.sure and earlier < line]
    where = f"from somewhere between lines {aligned[-1]:,} and {line:,} on" if aligned else "from the beginning"
    lines = f"{abs(one.shift)} line{'s' if abs(one.shift) > 1 else ''}"
    src, tgt = [*corpus.files, *corpus.files][:2]
    lacking, other_side = (src, tgt) if one.shift > 0 else (tgt, src)
    text = (
        f"{corpus.name}: the sides are shifted by {lines} {where}: line {line + 50:,} of {src} belongs to line "
        f"{line + 50 + one.shift:,} of {tgt} (the correlation of lengths is {one.best:.2f} with this shift and "
        f"{one.unshifted:.2f} without; {len(shifted)} of {len(fits)} places are shifted)"
    )
    advice = f"look there: {lacking} lacks {lines}, or {other_side} has too many"
    figures = {"shift": one.shift, "line": line, "places": len(shifted), "examined": len(fits)}
    return Finding("alignment", "obstacle", text, advice, figures)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm > 1e-9 else 0.0


def _digits(text: str) -> tuple[str, ...]:
    """The numbers of a text, in digits of any script, sorted."""
    return tuple(sorted(str(int(number[:18])) for number in _DIGITS.findall(text)))
