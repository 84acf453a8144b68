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

from transduce.doctor.findings import Finding, about, percent
from transduce.doctor.sampling import Block, Part, Row, Sample

MAX_SHIFT = 20  # lines
WINDOWS = 150  # examined for shifts, in each corpus
SEARCHED = 500_000  # lines between two places, in which the beginning of a shift is searched
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


def fit(rows: Sequence[Row]) -> Fit:
    """Find the shift of a window.

    >>> words = [("a" * n, "b" * (2 * n)) for n in (7, 1, 9, 3, 12, 5, 8, 2, 14, 4, 6, 11) * 8]
    >>> fit([(src, words[i - 1][1]) for i, (src, _) in enumerate(words)]).shift
    1
    """
    n, (src, tgt), digits = len(rows), _log_lengths(rows), _digits(rows)
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


def turning_point(rows: Sequence[Row], shift: int) -> int:
    """The row from which on `shift` fits better than none."""
    (src, tgt), digits = _log_lengths(rows), _digits(rows)
    mean = float(np.median(tgt) - np.median(src))

    def misfit(shift: int) -> np.ndarray:
        at = np.clip(np.arange(len(rows)) + shift, 0, len(rows) - 1)
        differing = [2.0 * (digits[i][0] != digits[j][1]) for i, j in enumerate(at.tolist())]
        return np.minimum(2.0, np.abs(tgt[at] - src - mean)) + np.array(differing)

    gained = np.concatenate(([0.0], np.cumsum(misfit(0) - misfit(shift))))
    return int(np.argmin(gained))


def line_counts(sample: Sample) -> Iterator[Finding]:
    """Both files of a corpus have the same number of lines."""
    for part in sample.parts + sample.held:
        few, many = min(part.counts), max(part.counts)
        is_sure = part.counted or not few
        if few != many and (is_sure or many > 1.25 * few):
            shown = [f"{n:,}" if part.counted else about(n) for n in part.counts]
            text = f"{part.files[0]} has {shown[0]} lines, {part.files[1]} has {shown[1]}"
            advice = "line n of one file must be the translation of line n of the other"
            yield Finding("lines", "obstacle" if is_sure else "warning", text, advice, {"lines": list(part.counts)})


def alignment(sample: Sample) -> Iterator[Finding]:
    """Line n of one side is the translation of line n of the other, not of a line before or after it."""
    yield from (one for part in sample.parts for one in _alignment_of(part))
    yield from (one for part in sample.held for one in _alignment_of(part) if one.level != "note")


def _alignment_of(part: Part) -> Iterator[Finding]:
    windows = [window for block in part.blocks for window in block.windows()]
    step = max(1, len(windows) // WINDOWS)
    fits = [(window, fit(window.rows)) for window in windows[::step] if len(window.rows) >= _FEWEST]
    if any(one.sure for _, one in fits):
        yield _shift(part, fits)
    elif fits:
        r = statistics.median(one.unshifted for _, one in fits)
        numbers, same = sum(one.numbers for _, one in fits), sum(one.same for _, one in fits)
        digits = (
            f"; of {numbers:,} lines with digits, {percent(same / numbers)} have the same in both" if numbers else ""
        )
        figures = {"correlation": round(r, 3), "numbers": numbers, "same_numbers": same}
        n_rows = sum(len(window.rows) for window, _ in fits)
        if r < 0.15 and n_rows >= 400 and (numbers < 20 or same < 0.2 * numbers):
            text = (
                f"{part.name}: source and target look misaligned: the correlation of their lengths is {r:.2f} "
                f"(translations have 0.6 to 0.95){digits}"
            )
            yield Finding("alignment", "warning", text, "is one side sorted, shuffled or another text?", figures)
        else:
            text = f"{part.name}: the sides are aligned in {len(fits)} places (correlation of lengths {r:.2f}{digits})"
            yield Finding("alignment", "note", text, figures=figures)


def _shift(part: Part, fits: list[tuple[Block, Fit]]) -> Finding:
    """The first shift, and where it begins."""
    shifted = [(window, one) for window, one in fits if one.sure]
    window, one = shifted[0]
    aligned = [earlier.first for earlier, other in fits if not other.sure and earlier.first < window.first]
    src, tgt = [*part.files, *part.files][:2]
    low, high = aligned[-1] if aligned else 1, window.first
    if window.from_end:
        where = "at the end of the files, whose middle was not read"
    elif not aligned:
        where = "from the beginning"
    elif part.reread is not None and high - low <= SEARCHED:
        rows = part.reread(low, high - low + 200)
        where = f"from about line {low + turning_point(rows, one.shift):,} on"
    else:
        where = f"from somewhere between lines {low:,} and {high:,} on"
    lines = f"{abs(one.shift)} line{'s' if abs(one.shift) > 1 else ''}"
    lacking, other = (src, tgt) if one.shift > 0 else (tgt, src)
    text = (
        f"{part.name}: the sides are shifted by {lines} {where}: line {high + 50:,} of {src} belongs to line "
        f"{high + 50 + one.shift:,} of {tgt} (the correlation of lengths is {one.best:.2f} with this shift and "
        f"{one.unshifted:.2f} without; {len(shifted)} of {len(fits)} places are shifted)"
    )
    advice = f"look there: {lacking} lacks {lines}, or {other} has too many"
    figures = {"shift": one.shift, "line": high, "places": len(shifted), "looked_at": len(fits)}
    return Finding("alignment", "obstacle", text, advice, figures)


def _log_lengths(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the lengths of both sides, in characters."""
    src, tgt = (np.log1p([float(len(row[side])) for row in rows]) for side in (0, 1))
    return src, tgt


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation; 0 if one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm > 1e-9 else 0.0


def _digits(rows: Sequence[Row]) -> list[list[tuple[str, ...]]]:
    """The numbers of both sides of each row, in digits of any script, sorted."""
    return [
        [tuple(sorted(str(int(number[:18])) for number in _DIGITS.findall(text))) for text in row[:2]] for row in rows
    ]
