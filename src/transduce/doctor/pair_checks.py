"""Checks of sentence pairs: whether both sides are translations of each other."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from transduce.data.leaks import comparable
from transduce.doctor.alignment import Fit, fit, turning_point
from transduce.doctor.findings import Finding, Level, about, percent
from transduce.doctor.languages import (
    COMMON,
    SCRIPTS_OF,
    is_clearly,
    language,
    looks_like,
    main_script,
    scripts,
)
from transduce.doctor.sampling import Block, Part, Row, Sample

WINDOWS = 150  # examined for shifts, in each corpus
SEARCHED = 500_000  # lines between two places, in which the beginning of a shift is searched
N_ROWS = 20_000  # from which languages and length ratios are determined


def line_counts(sample: Sample) -> Iterator[Finding]:
    """Both files of a corpus have the same number of lines."""
    for part in sample.parts + sample.held:
        if len(set(part.counts)) == 1:
            continue
        (src, tgt), (n_src, n_tgt) = part.files, part.counts
        level: Level = "obstacle"
        if not min(part.counts):
            empty, other = (src, tgt) if not n_src else (tgt, src)
            n = f"{max(part.counts):,}" if part.counted else about(max(part.counts))
            text, advice = f"{empty} is empty, while {other} has {n} lines", "check the file names"
        elif part.counted:
            text = f"{src} has {n_src:,} lines, {tgt} has {n_tgt:,}"
            advice = "line n of one file must be the translation of line n of the other"
        elif max(part.counts) > 1.25 * min(part.counts):
            level, advice = "warning", "count them with wc -l"
            text = f"{src} has {about(n_src)} lines, {tgt} {about(n_tgt)} (estimated)"
        else:
            continue
        yield Finding("lines", level, text, advice, {"lines": list(part.counts)})


def alignment(sample: Sample) -> Iterator[Finding]:
    """Line n of one side is the translation of line n of the other, not of a line before or after it."""
    yield from filter(None, map(_alignment_of, sample.parts))
    yield from (one for part in sample.held if (one := _alignment_of(part)) and one.level != "note")


def _alignment_of(part: Part) -> Finding | None:
    windows = [window for block in part.blocks for window in block.windows()]
    step = max(1, len(windows) // WINDOWS)
    fits = [(window, fit(window.rows)) for window in windows[::step] if len(window.rows) >= 60]
    if not fits:
        return None
    if any(one.sure for _, one in fits):
        return _shift(part, fits)
    r = statistics.median(one.straight for _, one in fits)
    numbers, same = sum(one.numbers for _, one in fits), sum(one.same for _, one in fits)
    figures = {"correlation": round(r, 3), "numbers": numbers, "same_numbers": same}
    digits = f"; of {numbers:,} lines with digits, {percent(same / numbers)} have the same in both" if numbers else ""
    n_rows = sum(len(window.rows) for window, _ in fits)
    if r < 0.15 and n_rows >= 400 and (numbers < 20 or same < 0.2 * numbers):
        text = (
            f"{part.name}: source and target look misaligned: the correlation of their lengths is {r:.2f} "
            f"(translations have 0.6 to 0.95){digits}"
        )
        return Finding("alignment", "warning", text, "is one side sorted, shuffled or another text?", figures)
    text = f"{part.name}: the sides are aligned in {len(fits)} places (correlation of lengths {r:.2f}{digits})"
    return Finding("alignment", "note", text, figures=figures)


def _shift(part: Part, fits: list[tuple[Block, Fit]]) -> Finding:
    """The first shift, and where it begins."""
    shifted = [(window, one) for window, one in fits if one.sure]
    window, one = shifted[0]
    straight = [earlier.first for earlier, other in fits if not other.sure and earlier.first < window.first]
    src, tgt = [*part.files, *part.files][:2]
    low, high = straight[-1] if straight else 1, window.first
    if window.from_end:
        where = "at the end of the files, whose middle was not read"
    elif not straight:
        where = "from the beginning"
    elif part.reread is not None and high - low <= SEARCHED:
        rows = part.reread(low, high - low + 200)
        where = f"from about line {low + turning_point(rows, 0, one.shift):,} on"
    else:
        where = f"from somewhere between lines {low:,} and {high:,} on"
    lines = f"{abs(one.shift)} line{'s' if abs(one.shift) > 1 else ''}"
    lacking, other = (src, tgt) if one.shift > 0 else (tgt, src)
    text = (
        f"{part.name}: the sides are shifted by {lines} {where}: line {high + 50:,} of {src} belongs to line "
        f"{high + 50 + one.shift:,} of {tgt} (the correlation of lengths is {one.best:.2f} with this shift and "
        f"{one.straight:.2f} without; {len(shifted)} of {len(fits)} places are shifted)"
    )
    advice = f"look there: {lacking} lacks {lines}, or {other} has too many"
    figures = {"shift": one.shift, "line": high, "places": len(shifted), "looked_at": len(fits)}
    return Finding("alignment", "obstacle", text, advice, figures)


def languages(sample: Sample) -> Iterator[Finding]:
    """Each side has the script and the language that the settings say."""
    rows = _filled(sample)
    if not rows:
        return
    wanted = [language(sample.settings.data.src_lang), language(sample.settings.data.tgt_lang)]
    sides = [[row[side] for row in rows] for side in (0, 1)]
    shares, seen = [scripts(side) for side in sides], [looks_like(side) for side in sides]
    found = list(map(_describe, shares, seen))
    summary = f"source {found[0]}, target {found[1]}"
    figures = {"scripts": [{k: round(v, 4) for k, v in share.items()} for share in shares], "looks_like": seen}
    yield Finding("languages", "note", summary, figures=figures)
    fits, fits_swapped = (list(map(_fits, shares, seen, codes)) for codes in (wanted, wanted[::-1]))
    if wanted[0] != wanted[1] and False in fits and fits_swapped == [True, True]:
        text = f"the sides are swapped: the languages should be {wanted[0]} → {wanted[1]}, but {summary}"
        yield Finding("languages", "obstacle", text, "swap the files")
    else:
        for name, fit_, code, text in zip(("source", "target"), fits, wanted, found, strict=True):
            if fit_ is False:
                text = f"the {name} should be {code}, but it is {text}"
                yield Finding("languages", "warning", text, "is it the right file?")
    yield from _untranslated(rows, shares, seen)


def _filled(sample: Sample) -> list[Row]:
    return [row for row in sample.some(N_ROWS) if row[0].strip() and row[1].strip()]


def _fits(share: dict[str, float], looks: str, code: str) -> bool | None:
    """Whether a side can be in a language; None if that language is unknown."""
    wanted = SCRIPTS_OF.get(code)
    if wanted is None or not share:
        return None
    if sum(part for name, part in share.items() if name in wanted) < 0.3:
        return False
    return looks == code if looks and code in COMMON else True


def _untranslated(rows: list[Row], shares: list[dict[str, float]], seen: list[str]) -> Iterator[Finding]:
    """Targets in the language of the source."""
    src_script, tgt_script = (next(iter(share), "") for share in shares)
    if src_script != tgt_script:
        n = sum(main_script(row[1]) == src_script and main_script(row[0]) == src_script for row in rows)
        what = f"{src_script} letters"
    elif seen[0] and seen[1] and seen[0] != seen[1]:
        n = sum(is_clearly(row[1], seen[0], seen[1]) for row in rows)
        what = seen[0]
    else:
        return
    if (share := n / len(rows)) >= 0.02:
        text = f"{percent(share)} of the pairs seem to be untranslated: the target is in {what}, like the source"
        yield Finding("languages", "warning", text, "remove these pairs", {"share": round(share, 4)})


def copies(sample: Sample) -> Iterator[Finding]:
    """Pairs with the same text on both sides."""
    rows = [row for row in sample.rows() if row[0].strip()]
    n = sum(row[0] == row[1] or comparable(row[0]) == comparable(row[1]) for row in rows)
    if not n:
        return
    share, figures = n / len(rows), {"share": round(n / len(rows), 5)}
    if share >= 0.95:
        text = f"both sides are the same text in {percent(share)} of the pairs"
        yield Finding("copies", "obstacle", text, "was one file given twice?", figures)
        return
    text = f"{percent(share)} of the pairs have the same text on both sides"
    if share < 0.02 or sample.settings.data.drop_copies:
        yield Finding("copies", "note", text, figures=figures)
    else:
        yield Finding("copies", "warning", text, "drop them with --set data.drop_copies=true", figures)


def empty_sides(sample: Sample) -> Iterator[Finding]:
    """Pairs with an empty side."""
    empty = [(not row[0].strip(), not row[1].strip()) for row in sample.rows()]
    n, both, total = sum(map(any, empty)), sum(map(all, empty)), len(empty)
    if n and n == total:
        yield Finding("empty", "obstacle", "every pair has an empty side", "are these the right files?")
    elif n:
        text = f"{percent(n / total)} of the pairs have an empty side ({percent(both / total)} both); they are dropped"
        level: Level = "warning" if n - both > 0.05 * total else "note"
        yield Finding("empty", level, text, figures={"share": round(n / total, 5), "both": round(both / total, 5)})


def ratios(sample: Sample) -> Iterator[Finding]:
    """Pairs of which one side is much longer than usual."""
    rows = _filled(sample)
    if len(rows) < 50:
        return
    each = [(len(tgt) + 10) / (len(src) + 10) for src, tgt, *_ in rows]  # so that short texts do not count much
    usual = statistics.median(each)
    share = sum(not 1 / 3 < ratio / usual < 3 for ratio in each) / len(rows)
    figures = {"median": round(usual, 3), "far": round(share, 5)}
    text = f"the median length ratio of target to source is {usual:.2f} characters"
    if share <= 0.02:
        yield Finding("ratios", "note", text, figures=figures)
    else:
        text += f"; {percent(share)} of the pairs differ from it by more than a factor of 3"
        yield Finding("ratios", "warning", text, "drop the worst with --set data.max_ratio=3", figures)


def _describe(share: dict[str, float], looks: str) -> str:
    shown = [f"{name} {percent(part)}" for name, part in list(share.items())[:2] if part >= 0.005]
    return (", ".join(shown) or "no letters") + (f", looks like {looks}" if looks else "")
