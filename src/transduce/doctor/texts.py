"""Checks of any text: whether it can be read, what characters it has, what comes twice."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b

from transduce.data.clean import LeakCheck
from transduce.data.corpus import Pair
from transduce.data.leaks import LEAST_CHARACTERS, SeenCheck, watch
from transduce.doctor.findings import Finding, Level, about, percent
from transduce.doctor.sampling import Row, Sample

_ODD: tuple[tuple[str, re.Pattern[str], float, str], ...] = (
    ("U+FFFD, the sign of characters lost", re.compile("\ufffd"), 0.0, "get the text in its own encoding"),
    (
        "UTF-8 that was read as Latin-1 (as in Ã¤, â€™)",
        re.compile("Ã[\u0080-\u00bf\u0152\u0178\u201a-\u203a\u20ac]|â€[\u0080-\u00bf\u0152-\u2122]|Â[\u0080-\u00bf]"),
        0.001,
        "repair it, for instance with ftfy",
    ),
    ("control characters", re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]"), 0.01, "they are taken out"),
    ("HTML entities or tags", re.compile(r"&(?:amp|lt|gt|quot|nbsp|#\d+);|</?\w[^<>]*>"), 0.01, "strip the markup"),
    ("line separators inside a line", re.compile("[\x85\u2028\u2029]"), 0.01, "replace them by spaces"),
    ("invisible characters", re.compile("[\u200b\u2060\ufeff\u00ad]"), 0.01, "take them out"),
    ("private-use characters", re.compile("[\ue000-\uf8ff]"), 0.001, "they mean nothing without their font"),
)
_MAYBE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f&<ÂÃâ\u00ad\u200b\u2028\u2029\u2060\ue000-\uf8ff\ufeff\ufffd]")
"""What all of them have, in one quick look."""


def readable(sample: Sample) -> list[Finding]:
    """Lines that training would refuse, with their place."""
    found = [Finding("readable", "obstacle", f"{one.place}: {one.why}", "mend the file") for one in sample.faults[:3]]
    if more := len(sample.faults) - len(found):
        found.append(Finding("readable", "note", f"{more} more lines of the sample cannot be read"))
    one_sided = any(min(part.counts) < max(part.counts) for part in sample.parts if part.counts)  # told by its counts
    if not sample.n_rows and not found and not one_sided:
        found.append(Finding("readable", "obstacle", "there is no text", "are these the right files?"))
    return found


def characters(sample: Sample) -> list[Finding]:
    """Characters that should not be there."""
    counts, first, total = Counter[int](), dict[int, str](), 0
    for row in sample.rows():
        total += 1
        text = "\n".join(row)
        if _MAYBE.search(text) is None:
            continue
        for i, (_, pattern, _, _) in enumerate(_ODD):
            if match := pattern.search(text):
                counts[i] += 1
                first.setdefault(i, text[max(0, match.start() - 15) : match.end() + 15])
    found = []
    for i, n in counts.items():
        name, _, most, advice = _ODD[i]
        share = n / total
        level: Level = "warning" if share > most else "note"
        text = f"{percent(share)} of the lines have {name}, as {first[i]!r}"
        found.append(Finding("characters", level, text, advice, {"what": name, "share": round(share, 6)}))
    return found


def duplicates(sample: Sample) -> list[Finding]:
    """Rows that come more than once. In a part of a corpus one sees a part of them, so the share is extrapolated."""
    within = seen_twice = often = 0
    places: dict[bytes, list[int]] = {}
    n = number = 0
    for part in sample.parts:
        for block in part.blocks:
            number += 1
            for row in block.rows:
                if sample.form == "text" and len(row[0]) < LEAST_CHARACTERS:
                    continue
                n += 1
                places.setdefault(_mark(row), []).append(number)
    for found in places.values():
        if len(found) > 1:
            blocks = len(set(found))
            within += len(found) - blocks
            often += blocks - 1 if blocks > 2 else 0
            seen_twice += blocks == 2
    if not n or not (within or often or seen_twice):
        return []
    share = (within + often + seen_twice * (1.0 if sample.whole else max(1.0, sample.total / sample.n_rows))) / n
    share = min(share, 0.99)
    what = {"pairs": "pairs", "text": "longer lines", "labelled": "examples"}[sample.form]
    where = "" if sample.whole else f", extrapolated from {sample.n_rows:,} of {about(sample.total)}"
    text = f"{percent(share)} of the {what} repeat another one{where}"
    figures = {"share": round(share, 4), "seen": within + often + seen_twice, "looked_at": n}
    if share < 0.05 or sample.settings.data.deduplicate:
        return [Finding("duplicates", "note", text, figures=figures)]
    advice = "--set data.deduplicate=true keeps one of each" if sample.form == "pairs" else "keep one of each"
    return [Finding("duplicates", "warning", text, advice, figures)]


def leaks(sample: Sample) -> list[Finding]:
    """Held-out text that stands in the training text."""
    seen = 1.0 if sample.whole else min(1.0, sample.n_rows / max(1, sample.total))
    what = {"pairs": "sources", "text": "longer lines", "labelled": "texts"}[sample.form]
    found = []
    for held, (hits, of) in zip(sample.held, _leaked(sample), strict=True):
        if not hits:
            continue
        n = min(of, hits / seen)
        where = f"{hits:,}"
        if seen < 1.0:
            where = f"{about(n)} (extrapolated: {hits:,} in {percent(seen)} of the training text)"
        share = n / of
        text = f"{held.name}: {where} of its {of:,} {what} stand in the training text too"
        figures = {"set": held.name, "seen": hits, "of": of, "share": round(share, 4)}
        level: Level = "warning" if share > 0.005 else "note"
        found.append(Finding("leaks", level, text, "take them out of the training text: scores flatter", figures))
    return found


def labels(sample: Sample) -> list[Finding]:
    """How the labels are spread, and whether texts have one only."""
    counts = Counter(row[0].strip() for row in sample.rows())
    total = sum(counts.values())
    if not total:
        return []
    by_text: dict[bytes, set[str]] = {}
    for row in sample.rows():
        by_text.setdefault(_mark(row[1:]), set()).add(row[0].strip())
    told = ", ".join(f"{label} {percent(n / total)}" for label, n in counts.most_common(8))
    more = f", and {len(counts) - 8} more" if len(counts) > 8 else ""
    found = [Finding("labels", "note", f"labels: {told}{more}", figures={"labels": dict(counts.most_common(50))})]
    if len(counts) == 1:
        text = f"there is one label only, {next(iter(counts))!r}"
        return [Finding("labels", "obstacle", text, "a classifier needs two at least; is label<TAB>text the order?")]
    if len(counts) > total / 3 and total > 20:
        text = f"{len(counts):,} labels in {total:,} examples"
        found.append(Finding("labels", "warning", text, "is label<TAB>text the order of the columns?"))
    n = sum(len(given) > 1 for given in by_text.values())
    if n > 0.01 * len(by_text):
        text = f"{percent(n / len(by_text))} of the texts stand there with several labels"
        found.append(Finding("labels", "warning", text, "which is right?", {"share": round(n / len(by_text), 4)}))
    if sample.whole and (rare := [label for label, count in counts.items() if count < 5]) and len(counts) <= total / 3:
        shown = ", ".join(map(repr, rare[:5]))
        found.append(Finding("labels", "warning", f"fewer than 5 examples of {shown}", "too few to learn or to judge"))
    return found


def documents(sample: Sample) -> list[Finding]:
    """Blank lines where documents are said to be files: they look like what ends a document."""
    rows = list(sample.rows())
    blank = sum(not row[0].strip() for row in rows)
    if sample.settings.data.documents != "file" or not 0.005 * len(rows) < blank < 0.6 * len(rows) or len(rows) < 100:
        return []
    text = f"{percent(blank / len(rows))} of the lines are blank, while every file is taken for one document"
    advice = "if a blank line ends a document: --set data.documents=blank_line"
    return [Finding("documents", "note", text, advice, {"blank": round(blank / len(rows), 4)})]


def _leaked(sample: Sample) -> list[tuple[int, int]]:
    """Of each held-out set, what of it stands in the training text, of how much: counted as training counts it."""
    if sample.form == "pairs":
        pairs = [LeakCheck(map(_pair, held.rows())) for held in sample.held]
        for check in pairs:
            for _ in check.watch(map(_pair, sample.rows())):
                pass
        return [(check.report.sources, check.report.pairs) for check in pairs]
    texts = [SeenCheck(held.name, map(_text, held.rows()), unit="") for held in sample.held]
    for _ in watch(sample.rows(), _text, texts):
        pass
    return [(check.leaked, check.n) for check in texts]


def _pair(row: Row) -> Pair:
    return Pair(row[0], row[1], ("", 0))


def _text(row: Row) -> str:
    """A line, or the texts behind a label."""
    return " ".join(row[1:] or row)


def _mark(row: Row) -> bytes:
    return blake2b("\0".join(row).encode("utf-8", "surrogatepass"), digest_size=8).digest()
