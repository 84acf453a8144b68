"""Findings, and the checks of a sample of the text: pure functions of the sample and the data settings.

To add a check, write the function, add a row to CHECKS, and test it on a corpus with the fault and on one without.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np

from transduce.config.settings import DataSettings, Direction
from transduce.data.leaks import SHORTEST, LeakCheck, comparable, watch
from transduce.data.pairs import Pair
from transduce.data.reading import Labelled, Sample, Windows
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.tasks.base import FormName
from transduce.text.languages import base_language, guess_languages, is_detectable

MAX_SHIFT = 20  # lines; largest shift between the sides that is searched for
WINDOWS = 150  # windows of lines that are examined in each corpus
_FEWEST = 60  # minimum lines of a window for finding a shift
_DIGITS = re.compile(r"\d+")

_MOJIBAKE = "Ã[\u0080-\u00bf\u0152\u0178\u201a-\u203a\u20ac]|â€[\u0080-\u00bf\u0152-\u2122]|Â[\u0080-\u00bf]"
_ODD: tuple[tuple[str, str, float, str], ...] = (
    ("U+FFFD, which replaces lost characters", "\ufffd", 0.0, "convert the original text again, with its encoding"),
    ("UTF-8 that was read as Latin-1 (such as Ã¤, â€™)", _MOJIBAKE, 0.001, "repair them, for example with ftfy"),
    ("control characters", "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]", 0.01, "they are removed"),
    ("HTML entities or tags", r"&(?:amp|lt|gt|quot|nbsp|#\d+);|</?\w[^<>]*>", 0.01, "remove the markup"),
    ("line separators inside a line", "[\x85\u2028\u2029]", 0.01, "replace them with spaces"),
    ("invisible characters", "[\u200b\u2060\ufeff\u00ad]", 0.01, "remove them"),
    ("private-use characters", "[\ue000-\uf8ff]", 0.001, "they have no meaning without their font"),
)
"""Characters that do not belong in text: name, pattern, accepted fraction of lines, advice."""
_MAYBE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f&<ÂÃâ\u00ad\u200b\u2028\u2029\u2060\ue000-\uf8ff\ufeff\ufffd]")
"""A fast first test: lines without a match contain none of these characters."""

Level = Literal["obstacle", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a check. An obstacle makes training fail or pointless; a warning does not.

    `text`: the problem and its location. `advice`: the remedy. `figures`: measurements.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text


def note_or_warning(is_serious: bool, check: str, text: str, advice: str, figures: dict[str, Any]) -> Finding:
    """Return a warning with advice if `is_serious`, else a note without advice."""
    return Finding(check, "warning" if is_serious else "note", text, advice if is_serious else "", figures)


def percent(share: float) -> str:
    """Format a fraction, with more digits if it is small.

    >>> percent(0.5), percent(0.013), percent(0.0004)
    ('50 %', '1.3 %', '0.04 %')
    """
    return f"{100 * share:.{0 if share >= 0.1 or not share else 1 if share >= 0.001 else 2}f} %"


def texts_of(record: Pair | Labelled | str) -> tuple[str, ...]:
    if isinstance(record, str):
        return (record,)
    return record.texts if isinstance(record, Labelled) else (record.src, record.tgt)


def readable(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Check that there is text, and that every line can be read."""
    faults = [corpus.fault for corpus in (*sample.train, *sample.valid, *sample.tests) if corpus.fault]
    yield from (Finding("readable", "obstacle", fault, "correct the file") for fault in faults)
    if not sample.total and not faults:
        yield Finding("readable", "obstacle", "there is no text", "are these the right files?")


def unreadable(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Report pairs that training leaves out because they cannot be read."""
    records = list(sample.records())
    faulty = [(pair.fault.kind, pair) for pair in records if pair.fault]
    for kind, n in Counter(kind for kind, _ in faulty).items():
        first = next(pair.where for other, pair in faulty if other == kind)
        text = f"{percent(n / len(records))} of the pairs are left out: {kind}; first: {first}"
        yield Finding("unreadable", "warning", text, "correct the file", {"share": round(n / len(records), 5)})


@dataclass(frozen=True, slots=True)
class WindowShift:
    """The best shift of a window of lines, and the correlation of sentence lengths with it and `unshifted`.

    `is_sure`: the shift is significantly better than none. `n_numbers`: number of lines with digits. `n_equal`: number
    of lines with digits that are equal on both sides without a shift.
    """

    shift: int
    correlation: float
    unshifted: float
    is_sure: bool
    n_numbers: int = 0
    n_equal: int = 0


def find_shift(pairs: Sequence[tuple[str, str]]) -> WindowShift:
    """Find the shift between the sides of a window.

    A sentence and its translation have similar lengths and equal numbers, so every shift from -20 to 20 lines gets a
    score from the correlation of lengths and the share of lines with equal numbers.

    >>> words = [("a" * n, "b" * (2 * n)) for n in (7, 1, 9, 3, 12, 5, 8, 2, 14, 4, 6, 11) * 8]
    >>> find_shift([(src, words[i - 1][1]) for i, (src, _) in enumerate(words)]).shift
    1
    """
    n, digits = len(pairs), [(_digits(src), _digits(tgt)) for src, tgt in pairs]
    src, tgt = (np.log1p([float(len(pair[side])) for pair in pairs]) for side in (0, 1))
    numbered = [i for i, (src_digits, _) in enumerate(digits) if src_digits]
    correlations, scores = dict[int, float](), dict[int, float]()
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        begin, end = max(0, -shift), min(n, n - shift)
        if end - begin < _FEWEST:
            continue
        r = correlations[shift] = _correlation(src[begin:end], tgt[begin + shift : end + shift])
        inside = [i for i in numbered if begin <= i < end]
        n_equal = sum(digits[i][0] == digits[i + shift][1] for i in inside)
        copied = n_equal / len(inside) if len(inside) >= 5 else 0.0
        scores[shift] = math.atanh(min(0.999, max(-0.999, r))) * math.sqrt(end - begin - 3) + 8 * copied
    if not correlations:
        return WindowShift(0, 0.0, 0.0, is_sure=False)
    shift = max(scores, key=lambda s: (scores[s], -abs(s)))
    best, unshifted = correlations[shift], correlations[0]
    is_sure = shift != 0 and scores[shift] - scores[0] > 6 and best > 0.4 and best - unshifted > 0.25
    n_equal = sum(digits[i][0] == digits[i][1] for i in numbered)
    return WindowShift(shift, best, unshifted, is_sure, len(numbered), n_equal)


def alignment(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Check that line n of the source corresponds to line n of the target."""
    for corpus in sample.train:
        yield from _alignment_of(corpus)
    for corpus in (*sample.valid, *sample.tests):
        yield from (finding for finding in _alignment_of(corpus) if finding.level != "note")


def _alignment_of(corpus: Windows[Pair]) -> Iterator[Finding]:
    chosen = corpus.kept[:: max(1, len(corpus.kept) // WINDOWS)]
    windows = [window for window in chosen if len(window) >= _FEWEST]
    shifts = [find_shift([(pair.src, pair.tgt) for pair in window]) for window in windows]
    if any(shift.is_sure for shift in shifts):
        yield _shifted(corpus, [window[0].line for window in windows], shifts)
    elif shifts:
        r = statistics.median(shift.unshifted for shift in shifts)
        n_numbers, n_equal = sum(shift.n_numbers for shift in shifts), sum(shift.n_equal for shift in shifts)
        measured = f"{r:.2f}"
        if n_numbers:
            measured += f"; of {n_numbers:,} lines with digits, {percent(n_equal / n_numbers)} have equal ones in both"
        figures = {"correlation": round(r, 3), "numbers": n_numbers, "same_numbers": n_equal}
        if r < 0.15 and sum(map(len, chosen)) >= 400 and (n_numbers < 20 or n_equal < 0.2 * n_numbers):
            text = (
                f"{corpus.name}: source and target look misaligned: the correlation of their lengths, which is 0.6 to "
                f"0.95 for translations, is {measured}"
            )
            yield Finding("alignment", "warning", text, "is one side sorted, shuffled or another text?", figures)
        else:
            text = f"{corpus.name}: the sides are aligned in {len(shifts)} windows (correlation of lengths {measured})"
            yield Finding("alignment", "note", text, figures=figures)


def _shifted(corpus: Windows[Pair], lines: Sequence[int], shifts: Sequence[WindowShift]) -> Finding:
    """Report the first shift and where it begins. `lines`, `shifts`: first line and shift of each examined window."""
    shifted = [(line, shift) for line, shift in zip(lines, shifts, strict=True) if shift.is_sure]
    line, first = shifted[0]
    aligned = [other for other, shift in zip(lines, shifts, strict=True) if not shift.is_sure and other < line]
    start = f"from somewhere between lines {aligned[-1]:,} and {line:,} on" if aligned else "from the beginning"
    amount = f"{abs(first.shift)} line{'s' if abs(first.shift) > 1 else ''}"
    src, tgt = [*corpus.files, *corpus.files][:2]
    lacking, other_side = (src, tgt) if first.shift > 0 else (tgt, src)
    text = (
        f"{corpus.name}: the sides are shifted by {amount} {start}: line {line + 50:,} of {src} belongs to line "
        f"{line + 50 + first.shift:,} of {tgt} (the correlation of lengths is {first.correlation:.2f} with this shift "
        f"and {first.unshifted:.2f} without; {len(shifted)} of {len(shifts)} windows are shifted)"
    )
    figures = {"shift": first.shift, "line": line, "places": len(shifted), "examined": len(shifts)}
    advice = f"look there: {lacking} lacks {amount}, or {other_side} has too many"
    return Finding("alignment", "obstacle", text, advice, figures)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation coefficient; 0 if x or y is constant."""
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / norm if norm > 1e-9 else 0.0


def _digits(text: str) -> tuple[str, ...]:
    """Return the numbers of a text, sorted, as ASCII digits; the text's digits may be of any script."""
    return tuple(sorted(str(int(number[:18])) for number in _DIGITS.findall(text)))


def languages(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Check the language of each side with lingua, if lingua is installed and knows both languages."""
    pairs_of = dict[Direction, list[Pair]]()
    for corpus in sample.train:
        some = [pair for window in corpus.kept[:10] for pair in window[:5]]
        pairs_of.setdefault(corpus.source.direction, []).extend(some)
    for direction, pairs in pairs_of.items():
        yield from _languages_of(pairs, list(direction))


def _languages_of(some: Sequence[Pair], codes: list[str]) -> Iterator[Finding]:
    if base_language(codes[0]) == base_language(codes[1]):
        return
    try:
        if not all(map(is_detectable, codes)):
            return
    except SettingsError:
        return
    guesses = [
        guess_languages([" ".join(side)], dict.fromkeys(codes, 1.0))[0]
        for side in zip(*map(texts_of, some), strict=True)
    ]
    seen = [max(codes, key=lambda code: guess.get(code, 0.0)) for guess in guesses]
    if seen == codes[::-1]:
        text = f"the sides are swapped: the source looks like {seen[0]} and the target like {seen[1]}"
        yield Finding("languages", "obstacle", text, "swap the files")
    elif seen and seen != codes:
        text = f"both sides look like {seen[0]}; they should be {codes[0]} and {codes[1]}"
        yield Finding("languages", "warning", text, "are these the right files?")


def copies(sample: Sample[Pair], data: DataSettings) -> Iterator[Finding]:
    """Report pairs with equal text on both sides."""
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
    empty = [(not pair.src.strip(), not pair.tgt.strip()) for pair in sample.records() if not pair.fault]
    n, both, total = sum(map(any, empty)), sum(map(all, empty)), len(empty)
    if n and n == total:
        yield Finding("empty", "obstacle", "every pair has an empty side", "are these the right files?")
    elif n:
        text = f"{percent(n / total)} of the pairs have an empty side ({percent(both / total)} both); they are dropped"
        figures = {"share": round(n / total, 5), "both": round(both / total, 5)}
        yield note_or_warning(n - both > 0.05 * total, "empty", text, "", figures)


def characters(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Report characters that hint at damaged text (see _ODD)."""
    counts, first, total = Counter[int](), dict[int, str](), 0
    for record in sample.records():
        total += 1
        excerpts = dict[int, str]()
        for text in filter(_MAYBE.search, texts_of(record)):  # each side by itself, so that no match covers both
            for i, (_, pattern, _, _) in enumerate(_ODD):
                if match := re.search(pattern, text):
                    excerpts.setdefault(i, text[max(0, match.start() - 15) : match.end() + 15])
        counts.update(excerpts.keys())
        first = excerpts | first
    for i, n in counts.items():
        name, _, most, advice = _ODD[i]
        text = f"{percent(n / total)} of the lines have {name}, such as {first[i]!r}"
        figures = {"what": name, "share": round(n / total, 6)}
        yield note_or_warning(n / total > most, "characters", text, advice, figures)


def duplicates(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Count duplicates in the sample; unless it is the whole text, the text has more."""
    everything = map(texts_of, sample.records())
    records = [texts for texts in everything if any(texts) and (len(texts) > 1 or len(texts[0]) >= SHORTEST)]
    n = len(records) - len(set(records))
    if not n:
        return
    share = n / len(records)
    extent = "" if sample.is_whole else f" (among {len(records):,} that were compared)"
    text = f"{percent(share)} of the pairs or lines are duplicates{extent}"
    figures = {"share": round(share, 4), "compared": len(records)}
    is_serious = share >= 0.05 and not data.deduplicate
    advice = "keep one of each: data.deduplicate = true for pairs"
    yield note_or_warning(is_serious, "duplicates", text, advice, figures)


def leaks(sample: Sample[Any], data: DataSettings) -> Iterator[Finding]:
    """Count held-out examples that the sample's training text contains, with the same matching as in training."""

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
            figures = {"set": check.name, "found": check.met, "of": check.n}
            yield Finding("leaks", "warning", warning + extent, "remove them from the training text", figures)


def labels(sample: Sample[Labelled], data: DataSettings) -> Iterator[Finding]:
    """Report the distribution of labels, and texts with several labels."""
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
    """Note blank lines, which may end documents, if every file is read as one document."""
    blank = [not line.strip() for line in sample.records()]
    n, total = sum(blank), len(blank)
    if data.documents == "file" and total >= 100 and 0.005 * total < n < 0.6 * total:
        text = f"{percent(n / total)} of the lines are blank, while every file is read as one document"
        advice = "if a blank line ends a document, set data.documents = 'blank_line'"
        yield Finding("documents", "note", text, advice, {"blank": round(n / total, 4)})


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the forms of text that it applies to. `quick`: every training runs it first, on a small sample."""

    name: str
    forms: tuple[FormName, ...]
    run: Callable[[Sample[Any], DataSettings], Iterator[Finding]]
    quick: bool = False


_ALL: tuple[FormName, ...] = ("pairs", "text", "labelled")
CHECKS: tuple[Check, ...] = (
    Check("readable", _ALL, readable),
    Check("unreadable", ("pairs",), unreadable),
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


def run_checks(sample: Sample[Any], data: DataSettings, form: FormName, *, quick: bool = False) -> list[Finding]:
    """Run the checks for a form of text; return their findings. `quick`: only checks that precede every training."""
    checks = [check for check in CHECKS if form in check.forms and (check.quick or not quick)]
    return [finding for check in checks for finding in check.run(sample, data)]


def warn_of_data(sample: Sample[Any], data: DataSettings, form: FormName, log: Log) -> None:
    """Warn, before training, if the data have misaligned lines, copies or unusual characters."""
    findings = [finding for finding in run_checks(sample, data, form, quick=True) if finding.level != "note"]
    serious = sorted(findings, key=lambda finding: finding.level != "obstacle")
    for finding in serious[:3]:
        log.warn(finding.line)
    if serious:
        log.warn('"transduce doctor" with the same options checks the data more thoroughly')
