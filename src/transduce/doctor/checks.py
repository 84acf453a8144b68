"""The checks of a sample of the text. Each is a pure function of the sample and the settings of the data.

To add one, write the function, add a row to CHECKS, and test it on a corpus with the fault and on one without.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from transduce.config.settings import DataSettings
from transduce.data.check_sample import Sample
from transduce.data.corpus import Labelled, Pair
from transduce.data.leaks import SHORTEST, LeakCheck, comparable, watch
from transduce.doctor.alignment import alignment
from transduce.doctor.findings import Finding, note_or_warning, percent
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.tasks.base import Form
from transduce.text.languages import base_language, guess_language

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


def texts_of(record: Pair | Labelled | str) -> tuple[str, ...]:
    """The texts of a record, without its label."""
    if isinstance(record, str):
        return (record,)
    return record.texts if isinstance(record, Labelled) else (record.src, record.tgt)


def readable(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Every line can be read, and there is text."""
    faults = [one.fault for one in (*sample.train, *sample.valid, *sample.tests) if one.fault]
    yield from (Finding("readable", "obstacle", fault, "correct the file") for fault in faults)
    if not sample.total and not faults:
        yield Finding("readable", "obstacle", "there is no text", "are these the right files?")


def languages(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """No side is in the language of the other. Needs lingua, and codes of two languages that it knows."""
    codes = [data.src_lang, data.tgt_lang]
    if base_language(codes[0]) == base_language(codes[1]):
        return
    some = [pair for corpus in sample.train for window in corpus.kept[:10] for pair in window[:5]]
    try:
        seen = [guess_language(" ".join(side), codes)[0][0] for side in zip(*map(texts_of, some), strict=True)]
    except SettingsError:
        return
    if seen == codes[::-1]:
        text = f"the sides are swapped: the source looks like {seen[0]} and the target like {seen[1]}"
        yield Finding("languages", "obstacle", text, "swap the files")
    elif seen and seen != codes:
        text = f"both sides look like {seen[0]}; they should be {codes[0]} and {codes[1]}"
        yield Finding("languages", "warning", text, "are these the right files?")


def copies(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Pairs with the same text on both sides."""
    pairs = [pair for pair in sample.records() if pair.src.strip()]
    n = sum(pair.src == pair.tgt or comparable(pair.src) == comparable(pair.tgt) for pair in pairs)
    if not n:
        return
    share, figures = n / len(pairs), {"share": round(n / len(pairs), 5)}
    text = f"{percent(share)} of the pairs have the same text on both sides"
    if share >= 0.95:
        yield Finding("copies", "obstacle", text, "was one file given twice?", figures)
    else:
        is_serious = share >= 0.02 and not data.drop_copies
        yield note_or_warning(is_serious, "copies", text, "data.drop_copies = true drops them", figures)


def empty_sides(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Pairs with an empty side."""
    empty = [(not pair.src.strip(), not pair.tgt.strip()) for pair in sample.records()]
    n, both, total = sum(map(any, empty)), sum(map(all, empty)), len(empty)
    if n and n == total:
        yield Finding("empty", "obstacle", "every pair has an empty side", "are these the right files?")
    elif n:
        text = f"{percent(n / total)} of the pairs have an empty side ({percent(both / total)} both); they are dropped"
        figures = {"share": round(n / total, 5), "both": round(both / total, 5)}
        yield note_or_warning(n - both > 0.05 * total, "empty", text, "", figures)


def characters(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Characters that do not belong in text."""
    counts, first, total = Counter[int](), dict[int, str](), 0
    for record in sample.records():
        total += 1
        found = dict[int, str]()
        for text in filter(_MAYBE.search, texts_of(record)):  # each alone: no match crosses from one to the other
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


def duplicates(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Repeated records among those of the sample: a lower bound, unless the sample is the whole text."""
    records = [texts for texts in map(texts_of, sample.records()) if len(texts) > 1 or len(texts[0]) >= SHORTEST]
    n = len(records) - len(set(records))
    if not n:
        return
    share = n / len(records)
    extent = "" if sample.is_whole else f" (among {len(records):,} that were compared)"
    text = f"{percent(share)} of the pairs or lines are duplicates{extent}"
    figures = {"share": round(share, 4), "compared": len(records)}
    is_serious = share >= 0.05 and not data.deduplicate
    yield note_or_warning(
        is_serious, "duplicates", text, "keep one of each: data.deduplicate = true for pairs", figures
    )


def leaks(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Held-out text that is also in the training text of the sample, counted as training counts it."""

    def example_of(record: Any) -> tuple[str, ...]:
        return texts_of(record) if isinstance(record, Pair) else (" ".join(texts_of(record)),)

    def place_of(record: Any) -> str:
        return record.where if isinstance(record, Pair) else ""

    checks = []
    for held in (*sample.valid, *sample.tests):
        records = list(chain.from_iterable(held.kept))
        unit = "pairs" if records and isinstance(records[0], Pair) else "lines"
        checks.append(LeakCheck(held.name, map(example_of, records), unit=unit, places=list(map(place_of, records))))
    for _ in watch(sample.records(), example_of, checks, place_of):
        pass
    n = sum(len(window) for corpus in sample.train for window in corpus.kept)
    extent = "" if sample.is_whole else f" ({n:,} of {sample.total:,} training records were compared)"
    for check in checks:
        if warning := check.warning():
            figures = {"set": check.name, "found": check.found, "of": check.n}
            yield Finding("leaks", "warning", warning + extent, "remove them from the training text", figures)


def labels(sample: Sample[Labelled], data: DataSettings) -> Iterator[Finding]:
    """The distribution of labels, and texts with several labels."""
    counts, by_text = Counter[str](), dict[tuple[str, ...], set[str]]()
    for example in sample.records():
        counts[example.label] += 1
        by_text.setdefault(example.texts, set()).add(example.label)
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
    if sample.is_whole and rare and not is_wrong_column:
        shown = ", ".join(map(repr, rare[:5]))
        yield Finding("labels", "warning", f"fewer than 5 examples of {shown}", "add more, or merge labels")


def documents(sample: Sample[str], data: DataSettings) -> Iterator[Finding]:
    """Blank lines, which may end documents, while every file is treated as one document."""
    blank = [not line.strip() for line in sample.records()]
    n, total = sum(blank), len(blank)
    if data.documents == "file" and total >= 100 and 0.005 * total < n < 0.6 * total:
        text = f"{percent(n / total)} of the lines are blank, while every file is treated as one document"
        advice = "if a blank line ends a document, set data.documents = 'blank_line'"
        yield Finding("documents", "note", text, advice, {"blank": round(n / total, 4)})


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the forms of data that it applies to. `quick`: every training runs it on a small sample."""

    name: str
    forms: tuple[Form, ...]
    run: Callable[[Sample[Any], DataSettings], Iterator[Finding]]
    quick: bool = False


_ALL: tuple[Form, ...] = ("pairs", "text", "labelled")
CHECKS: tuple[Check, ...] = (
    Check("readable", _ALL, readable),
    Check("alignment", ("pairs",), alignment, quick=True),
    Check("languages", ("pairs",), languages),
    Check("copies", ("pairs",), copies, quick=True),
    Check("empty", ("pairs",), empty_sides),
    Check("characters", _ALL, characters, quick=True),
    Check("duplicates", _ALL, duplicates),
    Check("leaks", _ALL, leaks),
    Check("labels", ("labelled",), labels),
    Check("documents", ("text",), documents),
)


def run_checks(sample: Sample[Any], data: DataSettings, form: Form, *, quick: bool = False) -> list[Finding]:
    """The findings of all checks that apply to text of this form. `quick`: only those of every training."""
    checks = [check for check in CHECKS if form in check.forms and (check.quick or not quick)]
    return [finding for check in checks for finding in check.run(sample, data)]


def warn_of_data(sample: Sample[Any], data: DataSettings, form: Form, log: Log) -> None:
    """Warn before a training of misaligned sides, copies and unusual characters."""
    found = run_checks(sample, data, form, quick=True)
    serious = sorted((one for one in found if one.level != "note"), key=lambda one: one.level != "obstacle")
    for one in serious[:3]:
        log.warn(one.line)
    if serious:
        log.warn('"transduce doctor" with the same options checks the data more thoroughly')
