"""Checks of sentence pairs: whether both sides are translations of each other."""

from __future__ import annotations

import statistics

from transduce.data.clean import comparable
from transduce.doctor.alignment import Fit, fit, locate
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
from transduce.doctor.sampling import Block, Part, Sample

WINDOWS = 150  # of WINDOW lines each, looked at for shifts in a corpus
LOOKED_AT = 20_000  # rows that languages are told from


def line_counts(sample: Sample) -> list[Finding]:
    """As many lines on one side as on the other, where both were counted."""
    found = []
    for part in sample.parts + sample.held:
        if len(set(part.counts)) == 1:
            continue
        src, tgt = part.files
        if not min(part.counts):
            empty, other = (src, tgt) if not part.counts[0] else (tgt, src)
            n = f"{max(part.counts):,}" if part.counted else about(max(part.counts))
            text = f"{empty} is empty, while {other} has {n} lines"
            found.append(Finding("lines", "obstacle", text, "is it the right file?", {"lines": list(part.counts)}))
        elif part.counted:
            found.append(
                Finding(
                    "lines",
                    "obstacle",
                    f"{src} has {part.counts[0]:,} lines, {tgt} has {part.counts[1]:,}",
                    "the sides must be line for line",
                    {"lines": list(part.counts)},
                )
            )
        elif max(part.counts) > 1.25 * min(part.counts):
            found.append(
                Finding(
                    "lines",
                    "warning",
                    f"{src} seems to have {about(part.counts[0])} lines, {tgt} {about(part.counts[1])}, by what was "
                    "read of them",
                    "count them",
                    {"lines": list(part.counts)},
                )
            )
    return found


def alignment(sample: Sample) -> list[Finding]:
    """Shifts: line 7 of one side stands beside the translation of line 8."""
    found = [finding for part in sample.parts for finding in _alignment_of(part)]
    return found + [one for part in sample.held for one in _alignment_of(part) if one.level != "note"]


def _alignment_of(part: Part) -> list[Finding]:
    windows = [window for block in part.blocks for window in block.windows()]
    step = max(1, len(windows) // WINDOWS)
    seen = [(window, fit(window.rows)) for window in windows[::step] if len(window.rows) >= 60]
    if not seen:
        return []
    if shifted := [(window, one) for window, one in seen if one.sure]:
        return [_shift(part, seen, shifted)]
    usual = statistics.median(one.straight for _, one in seen)
    numbers, same = (sum(getattr(one, name) for _, one in seen) for name in ("numbers", "same"))
    figures = {"correlation": round(usual, 3), "numbers": numbers, "same_numbers": same}
    copied = (
        f"; of {numbers:,} lines with digits {percent(same / numbers)} have the same beside them" if numbers else ""
    )
    n_rows = sum(len(window.rows) for window, _ in seen)
    if usual < 0.15 and n_rows >= 400 and (numbers < 20 or same < 0.2 * numbers):
        return [
            Finding(
                "alignment",
                "warning",
                f"{part.name}: the sides hardly belong together: their lengths do not go together (r = {usual:.2f}, "
                f"translations have 0.6 to 0.95){copied}",
                "look at some pairs: is one side sorted, shuffled, or of another text?",
                figures,
            )
        ]
    return [
        Finding(
            "alignment",
            "note",
            f"{part.name}: the sides line up in {len(seen)} places (lengths go together, r = {usual:.2f}{copied})",
            figures=figures,
        )
    ]


def _shift(part: Part, seen: list[tuple[Block, Fit]], shifted: list[tuple[Block, Fit]]) -> Finding:
    """Where the first shift begins."""
    first, one = shifted[0]
    straight = [window for window, other in seen if not other.sure and window.first < first.first]
    src, tgt = [*part.files, *part.files][:2]
    high = first.first
    low = straight[-1].first if straight else 1
    if first.from_end:
        where = "at the end of the files, whose middle was not read"
    elif low == 1 and not straight:
        where = "from the beginning"
    elif part.reread is not None:
        where = f"from about line {locate(part.reread, low, high, before=0, after=one.shift):,} on"
    else:
        where = f"from somewhere between lines {low:,} and {high:,} on"
    lines = f"{abs(one.shift)} line{'s' if abs(one.shift) > 1 else ''}"
    lacking, having = (src, tgt) if one.shift > 0 else (tgt, src)
    return Finding(
        "alignment",
        "obstacle",
        f"{part.name}: the sides are shifted by {lines} {where}: line {high + 50:,} of {src} belongs to line "
        f"{high + 50 + one.shift:,} of {tgt} (lengths go together with r = {one.best:.2f}, as it stands "
        f"{one.straight:.2f}; seen in {len(shifted)} of {len(seen)} places)",
        f"look there: {lacking} lacks {lines}, or {having} has too many",
        {"shift": one.shift, "line": high, "places": len(shifted), "looked_at": len(seen)},
    )


def languages(sample: Sample) -> list[Finding]:
    """Scripts and languages as they were said to be, and not the other way round."""
    rows = [row for row in sample.some(LOOKED_AT) if row[0].strip() and row[1].strip()]
    if not rows:
        return []
    codes = [language(sample.settings.data.src_lang), language(sample.settings.data.tgt_lang)]
    sides = [[row[side] for row in rows] for side in (0, 1)]
    shares = [scripts(side) for side in sides]
    seen = [looks_like(side) for side in sides]
    told = ", ".join(
        f"{name} {_scripts_told(share)}{f', looks like {code}' if code else ''}"
        for name, share, code in zip(("source", "target"), shares, seen, strict=True)
    )
    figures = {"scripts": [{k: round(v, 4) for k, v in share.items()} for share in shares], "looks_like": seen}
    found = [Finding("languages", "note", told, figures=figures)]
    right = [_suits(share, looks, code) for share, looks, code in zip(shares, seen, codes, strict=True)]
    swapped = [_suits(share, looks, code) for share, looks, code in zip(shares, seen, reversed(codes), strict=True)]
    if codes[0] != codes[1] and False in right and swapped == [True, True]:
        names = f"{codes[0]} → {codes[1]}"
        found.append(
            Finding("languages", "obstacle", f"the sides are swapped: said to be {names}, but {told}", "swap the files")
        )
    else:
        for side, suits, code in zip(("source", "target"), right, codes, strict=True):
            if suits is False:
                text = f"the {side} is said to be {code}, but: {told}"
                found.append(Finding("languages", "warning", text, "is it the right file?"))
    return found + _mixed(sample, rows, shares, seen)


def _suits(share: dict[str, float], looks: str, code: str) -> bool | None:
    """Whether a side is of a language; None where nothing is known of that."""
    wanted = SCRIPTS_OF.get(code)
    if wanted is None or not share:
        return None
    if sum(part for name, part in share.items() if name in wanted) < 0.3:
        return False
    return looks == code if looks and code in COMMON else True


def _mixed(
    sample: Sample, rows: list[tuple[str, ...]], shares: list[dict[str, float]], seen: list[str]
) -> list[Finding]:
    """Lines of the target that are in the source's language: text that was not translated."""
    ours, theirs = (next(iter(share), "") for share in shares)
    if ours != theirs:
        n = sum(main_script(row[1]) == ours and main_script(row[0]) == ours for row in rows)
        what = f"the target is in {ours} letters, as the source"
    elif seen[0] and seen[1] and seen[0] != seen[1]:
        n = sum(is_clearly(row[1], seen[0], seen[1]) for row in rows)
        what = f"the target seems to be {seen[0]}, as the source"
    else:
        return []
    share = n / len(rows)
    if share < 0.02:
        return []
    text = f"untranslated: in {percent(share)} of the pairs looked at {what}"
    return [Finding("languages", "warning", text, "take these pairs out", {"share": round(share, 4)})]


def copies(sample: Sample) -> list[Finding]:
    """Pairs whose sides are the same."""
    rows = [row for row in sample.rows() if row[0].strip()]
    if not rows:
        return []
    n = sum(row[0] == row[1] or comparable(row[0]) == comparable(row[1]) for row in rows)
    share, figures = n / len(rows), {"share": round(n / len(rows), 5)}
    if share >= 0.95:
        text = f"both sides are the same text in {percent(share)} of the pairs"
        return [Finding("copies", "obstacle", text, "was one file given twice?", figures)]
    if share >= 0.02:
        text = f"{percent(share)} of the pairs have the same text on both sides"
        advice = "--set data.drop_copies=true leaves them out"
        return [] if sample.settings.data.drop_copies else [Finding("copies", "warning", text, advice, figures)]
    return [Finding("copies", "note", f"{percent(share)} of the pairs are copies", figures=figures)] if n else []


def empty_sides(sample: Sample) -> list[Finding]:
    """Pairs with an empty side."""
    n = both = total = 0
    for src, tgt, *_ in sample.rows():
        a, b = not src.strip(), not tgt.strip()
        n, both, total = n + (a or b), both + (a and b), total + 1
    if not n:
        return []
    if n == total:
        return [Finding("empty", "obstacle", "every pair has an empty side", "are these the right files?")]
    text = f"{percent(n / total)} of the pairs have an empty side ({percent(both / total)} both), and are left out"
    level: Level = "warning" if n - both > 0.05 * total else "note"
    return [Finding("empty", level, text, figures={"share": round(n / total, 5), "both": round(both / total, 5)})]


def ratios(sample: Sample) -> list[Finding]:
    """Pairs of which one side is very much longer than it should be."""
    rows = [row for row in sample.some(LOOKED_AT) if row[0].strip() and row[1].strip()]
    if len(rows) < 50:
        return []
    each = [(len(tgt) + 10) / (len(src) + 10) for src, tgt, *_ in rows]  # a few characters more mean nothing
    usual = statistics.median(each)
    n = sum(not 1 / 3 < ratio / usual < 3 for ratio in each)
    figures = {"median": round(usual, 3), "far": round(n / len(rows), 5)}
    text = f"a target has {usual:.2f} times the characters of its source (median)"
    if n > 0.02 * len(rows):
        text += f"; {percent(n / len(rows))} of the pairs are three times off"
        return [Finding("ratios", "warning", text, "--set data.max_ratio=3 leaves out the worst", figures)]
    return [Finding("ratios", "note", text, figures=figures)]


def _scripts_told(share: dict[str, float]) -> str:
    return (
        ", ".join(f"{name} {percent(part)}" for name, part in list(share.items())[:2] if part >= 0.005) or "no letters"
    )
