"""The checks of a sample. Each is a pure function of the sample.

To add one, write the function, add a row to CHECKS, and test it on a corpus with the fault and on one without.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from transduce.config import Settings
from transduce.data.leaks import SHORTEST, LeakCheck, comparable, watch
from transduce.doctor.alignment import alignment, line_counts
from transduce.doctor.findings import Finding, about, note_or_warning, percent
from transduce.doctor.languages import languages
from transduce.doctor.sampling import Row, Sample, take_sample
from transduce.errors import UserError
from transduce.logging import Log
from transduce.tasks.base import Form

_N_RATIOS = 20_000  # rows from which the usual ratio of lengths is determined
_ODD: tuple[tuple[str, re.Pattern[str], float, str], ...] = (
    (
        "U+FFFD, which replaces lost characters",
        re.compile("\ufffd"),
        0.0,
        "convert the original text again, with its encoding",
    ),
    (
        "UTF-8 that was read as Latin-1 (such as Ã¤, â€™)",
        re.compile("Ã[\u0080-\u00bf\u0152\u0178\u201a-\u203a\u20ac]|â€[\u0080-\u00bf\u0152-\u2122]|Â[\u0080-\u00bf]"),
        0.001,
        "repair them, for example with ftfy",
    ),
    ("control characters", re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]"), 0.01, "they are removed"),
    ("HTML entities or tags", re.compile(r"&(?:amp|lt|gt|quot|nbsp|#\d+);|</?\w[^<>]*>"), 0.01, "remove the markup"),
    ("line separators inside a line", re.compile("[\x85\u2028\u2029]"), 0.01, "replace them with spaces"),
    ("invisible characters", re.compile("[\u200b\u2060\ufeff\u00ad]"), 0.01, "remove them"),
    ("private-use characters", re.compile("[\ue000-\uf8ff]"), 0.001, "they have no meaning without their font"),
)
"""Characters that do not belong in text: name, pattern, fraction of the lines that is accepted, advice."""
_MAYBE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f&<ÂÃâ\u00ad\u200b\u2028\u2029\u2060\ue000-\uf8ff\ufeff\ufffd]")
"""A fast test that all of them pass."""


def readable(sample: Sample) -> Iterator[Finding]:
    """Every line can be read."""
    n_shown = 3
    for fault in sample.faults[:n_shown]:
        yield Finding("readable", "obstacle", fault, "correct the file")
    if (more := len(sample.faults) - n_shown) > 0:
        yield Finding("readable", "note", f"{more} more lines of the sample cannot be read")
    one_sided = any(min(part.counts) < max(part.counts) for part in sample.parts)  # see line_counts
    if not sample.n_rows and not sample.faults and not one_sided:
        yield Finding("readable", "obstacle", "there is no text", "are these the right files?")


def copies(sample: Sample) -> Iterator[Finding]:
    """Pairs with the same text on both sides."""
    rows = [row for row in sample.rows() if row[0].strip()]
    n = sum(row[0] == row[1] or comparable(row[0]) == comparable(row[1]) for row in rows)
    if not n:
        return
    share, figures = n / len(rows), {"share": round(n / len(rows), 5)}
    text = f"{percent(share)} of the pairs have the same text on both sides"
    if share >= 0.95:
        yield Finding("copies", "obstacle", text, "was one file given twice?", figures)
    else:
        is_serious = share >= 0.02 and not sample.settings.data.drop_copies
        yield note_or_warning(is_serious, "copies", text, "drop them with --set data.drop_copies=true", figures)


def empty_sides(sample: Sample) -> Iterator[Finding]:
    """Pairs with an empty side."""
    empty = [(not row[0].strip(), not row[1].strip()) for row in sample.rows()]
    n, both, total = sum(map(any, empty)), sum(map(all, empty)), len(empty)
    if n and n == total:
        if not sample.faults:  # such as a language that the file lacks
            yield Finding("empty", "obstacle", "every pair has an empty side", "are these the right files?")
    elif n:
        text = f"{percent(n / total)} of the pairs have an empty side ({percent(both / total)} both); they are dropped"
        figures = {"share": round(n / total, 5), "both": round(both / total, 5)}
        yield note_or_warning(n - both > 0.05 * total, "empty", text, "", figures)


def ratios(sample: Sample) -> Iterator[Finding]:
    """Pairs of which one side is much longer than usual."""
    rows = [row for row in sample.some(_N_RATIOS) if row[0].strip() and row[1].strip()]
    if len(rows) < 50:
        return
    each = [(len(tgt) + 10) / (len(src) + 10) for src, tgt, *_ in rows]  # so that short texts do not count much
    usual = statistics.median(each)
    share = sum(not 1 / 3 < ratio / usual < 3 for ratio in each) / len(rows)
    text = (
        f"the median length ratio of target to source is {usual:.2f} characters; {percent(share)} of the pairs differ "
        "from it by more than a factor of 3"
    )
    figures = {"median": round(usual, 3), "far": round(share, 5)}
    yield note_or_warning(share > 0.02, "ratios", text, "drop the worst with --set data.max_ratio=3", figures)


def characters(sample: Sample) -> Iterator[Finding]:
    """Characters that do not belong in text."""
    counts, first, total = Counter[int](), dict[int, str](), 0
    for row in sample.rows():
        total += 1
        found = dict[int, str]()
        for text in filter(_MAYBE.search, row):  # each side alone: no match crosses from one to the other
            for i, (_, pattern, _, _) in enumerate(_ODD):
                if match := pattern.search(text):
                    found.setdefault(i, text[max(0, match.start() - 15) : match.end() + 15])
        counts.update(found.keys())
        first = found | first
    for i, n in counts.items():
        name, _, most, advice = _ODD[i]
        text = f"{percent(n / total)} of the lines have {name}, such as {first[i]!r}"
        figures = {"what": name, "share": round(n / total, 6)}
        yield note_or_warning(n / total > most, "characters", text, advice, figures)


def duplicates(sample: Sample) -> Iterator[Finding]:
    """Repeated rows. A sample contains only some of their copies, so the share is extrapolated."""
    places: dict[bytes, list[int]] = {}
    for number, block in enumerate(block for part in sample.parts for block in part.blocks):
        for row in block.rows:
            if sample.form != "text" or len(row[0]) >= SHORTEST:
                places.setdefault(_hash(row), []).append(number)
    n = sum(map(len, places.values()))
    twice = sum(len(set(found)) == 2 for found in places.values())  # in two blocks
    others = n - len(places) - twice  # copies within a block, or in more than two
    if not twice + others:
        return
    factor = 1.0 if sample.whole else max(1.0, sample.total / sample.n_rows)
    share = min((others + twice * factor) / n, 0.99)
    what = {"pairs": "pairs", "text": "longer lines", "labelled": "examples"}[sample.form]
    where = "" if sample.whole else f" (extrapolated from {sample.n_rows:,} of {about(sample.total)})"
    is_serious = share >= 0.05 and not sample.settings.data.deduplicate
    text = f"{percent(share)} of the {what} are duplicates{where}"
    advice = "drop them with --set data.deduplicate=true" if sample.form == "pairs" else "keep one of each"
    figures = {"share": round(share, 4), "seen": twice + others, "looked_at": n}
    yield note_or_warning(is_serious, "duplicates", text, advice, figures)


def leaks(sample: Sample) -> Iterator[Finding]:
    """Held-out text that overlaps with the training text, counted as training counts it."""
    seen = 1.0 if sample.whole else min(1.0, sample.n_rows / max(1, sample.total))
    what = {"pairs": "sources", "text": "longer lines", "labelled": "texts"}[sample.form]

    def compared(row: Row) -> tuple[str, ...]:
        return row[:2] if sample.form == "pairs" else (" ".join(row[1:] or row),)

    checks = [LeakCheck(held.name, map(compared, held.rows())) for held in sample.held]
    for _ in watch(sample.rows(), compared, checks):
        pass
    for check in (check for check in checks if check.found):
        expected = min(check.n, check.found / seen)
        count = f"{check.found:,}"
        if seen < 1.0:
            count = f"{about(expected)} (extrapolated from {count} in {percent(seen)} of the training text)"
        text = f"{check.name}: {count} of its {check.n:,} {what} are also in the training text"
        figures = {"set": check.name, "seen": check.found, "of": check.n, "share": round(expected / check.n, 4)}
        advice = "remove them from the training text: they make scores look too good"
        yield note_or_warning(expected > 0.005 * check.n, "leaks", text, advice, figures)


def labels(sample: Sample) -> Iterator[Finding]:
    """The distribution of labels, and texts with several labels."""
    counts, by_text = Counter[str](), dict[bytes, set[str]]()
    for label, *texts in sample.rows():
        counts[label] += 1
        by_text.setdefault(_hash(texts), set()).add(label)
    total = counts.total()
    if len(counts) <= 1:
        for label in counts:
            advice = "a classifier needs at least two; the columns must be label<TAB>text"
            yield Finding("labels", "obstacle", f"there is one label only, {label!r}", advice)
        return
    shown = ", ".join(f"{label} {percent(n / total)}" for label, n in counts.most_common(8))
    more = f", and {len(counts) - 8} more" if len(counts) > 8 else ""
    yield Finding("labels", "note", f"labels: {shown}{more}", figures={"labels": dict(counts.most_common(50))})
    if is_wrong_column := len(counts) > total / 3:
        text = f"{len(counts):,} labels in {total:,} examples"
        if total > 20:
            yield Finding("labels", "warning", text, "are the columns label<TAB>text?")
    n = sum(len(given) > 1 for given in by_text.values())
    if n > 0.01 * len(by_text):
        text = f"{percent(n / len(by_text))} of the texts occur with several labels"
        yield Finding("labels", "warning", text, "which is right?", {"share": round(n / len(by_text), 4)})
    rare = [label for label, count in counts.items() if count < 5]
    if sample.whole and rare and not is_wrong_column:
        shown = ", ".join(map(repr, rare[:5]))
        yield Finding("labels", "warning", f"fewer than 5 examples of {shown}", "add more, or merge labels")


def documents(sample: Sample) -> Iterator[Finding]:
    """Blank lines, which may end documents, while every file is treated as one document."""
    blank = [not row[0].strip() for row in sample.rows()]
    n, total = sum(blank), len(blank)
    if sample.settings.data.documents == "file" and total >= 100 and 0.005 * total < n < 0.6 * total:
        text = f"{percent(n / total)} of the lines are blank, while every file is treated as one document"
        advice = "if a blank line ends a document: --set data.documents=blank_line"
        yield Finding("documents", "note", text, advice, {"blank": round(n / total, 4)})


def _hash(row: Sequence[str]) -> bytes:
    return blake2b("\0".join(row).encode("utf-8", "surrogatepass"), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the forms of data that it applies to. `quick`: every training runs it on a small sample."""

    name: str
    forms: tuple[Form, ...]
    run: Callable[[Sample], Iterator[Finding]]
    quick: bool = False


_ALL: tuple[Form, ...] = ("pairs", "text", "labelled")
CHECKS: tuple[Check, ...] = (
    Check("readable", _ALL, readable),
    Check("lines", ("pairs",), line_counts),
    Check("alignment", ("pairs",), alignment, quick=True),
    Check("languages", ("pairs",), languages, quick=True),
    Check("copies", ("pairs",), copies, quick=True),
    Check("empty", ("pairs",), empty_sides),
    Check("ratios", ("pairs",), ratios),
    Check("characters", _ALL, characters, quick=True),
    Check("duplicates", _ALL, duplicates),
    Check("leaks", _ALL, leaks),
    Check("labels", ("labelled",), labels),
    Check("documents", ("text",), documents),
)


def run_checks(sample: Sample, *, quick: bool = False) -> list[Finding]:
    """The findings of all checks that apply to the sample."""
    checks = [check for check in CHECKS if sample.form in check.forms and (check.quick or not quick)]
    return [finding for check in checks for finding in check.run(sample)]


def warn_of_data(settings: Settings, log: Log) -> None:
    """Check a small sample before a training, and warn of misaligned or swapped sides and unusual characters."""
    if settings.model.reads_vectors:
        return
    try:
        found = run_checks(take_sample(settings, seconds=0.2, most_blocks=2), quick=True)
    except UserError:  # reading the text gives a better message
        return
    serious = sorted((one for one in found if one.level != "note"), key=lambda one: one.level != "obstacle")
    for one in serious[:3]:
        log.warn(one.line)
    if serious:
        log.warn('"transduce doctor" with the same options checks the data more thoroughly')
