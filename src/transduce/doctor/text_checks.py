"""Checks of any text: readable lines, unusual characters, duplicates, leaks, labels, documents, vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from transduce.config import Settings
from transduce.data.leaks import SHORTEST, LeakCheck, watch
from transduce.doctor.findings import Finding, Level, about, percent
from transduce.doctor.sampling import Row, Sample, select
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

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
_MAYBE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f&<ÂÃâ\u00ad\u200b\u2028\u2029\u2060\ue000-\uf8ff\ufeff\ufffd]")
"""A fast test that all of them pass."""


def readable(sample: Sample) -> Iterator[Finding]:
    """Every line can be read."""
    n_shown = 3
    for one in sample.faults[:n_shown]:
        yield Finding("readable", "obstacle", one, "correct the file")
    if (more := len(sample.faults) - n_shown) > 0:
        yield Finding("readable", "note", f"{more} more lines of the sample cannot be read")
    one_sided = any(min(part.counts) < max(part.counts) for part in sample.parts if part.counts)  # see line_counts
    if not sample.n_rows and not sample.faults and not one_sided:
        yield Finding("readable", "obstacle", "there is no text", "are these the right files?")


def characters(sample: Sample) -> Iterator[Finding]:
    """Characters that do not belong in text."""
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
    for i, n in counts.items():
        name, _, most, advice = _ODD[i]
        share = n / total
        text = f"{percent(share)} of the lines have {name}, such as {first[i]!r}"
        figures = {"what": name, "share": round(share, 6)}
        yield Finding("characters", "warning" if share > most else "note", text, advice, figures)


def duplicates(sample: Sample) -> Iterator[Finding]:
    """Repeated rows. A sample contains only some of their copies, so the share is extrapolated."""
    places: dict[bytes, list[int]] = {}
    for number, block in enumerate(block for part in sample.parts for block in part.blocks):
        for row in block.rows:
            if sample.form != "text" or len(row[0]) >= SHORTEST:
                places.setdefault(_hash(row), []).append(number)
    n = sum(map(len, places.values()))
    n_blocks = Counter(len(set(found)) for found in places.values())
    twice = n_blocks[2]  # in two blocks
    others = n - len(places) - twice  # copies within a block, or in more than two
    if not twice + others:
        return
    factor = 1.0 if sample.whole else max(1.0, sample.total / sample.n_rows)
    share = min((others + twice * factor) / n, 0.99)
    what = {"pairs": "pairs", "text": "longer lines", "labelled": "examples"}[sample.form]
    where = "" if sample.whole else f" (extrapolated from {sample.n_rows:,} of {about(sample.total)})"
    text = f"{percent(share)} of the {what} are duplicates{where}"
    figures = {"share": round(share, 4), "seen": twice + others, "looked_at": n}
    if share < 0.05 or sample.settings.data.deduplicate:
        yield Finding("duplicates", "note", text, figures=figures)
    else:
        advice = "drop them with --set data.deduplicate=true" if sample.form == "pairs" else "keep one of each"
        yield Finding("duplicates", "warning", text, advice, figures)


def leaks(sample: Sample) -> Iterator[Finding]:
    """Held-out text that overlaps with the training text, counted as training counts it."""
    seen = 1.0 if sample.whole else min(1.0, sample.n_rows / max(1, sample.total))
    what = {"pairs": "sources", "text": "longer lines", "labelled": "texts"}[sample.form]

    def compared(row: Row) -> tuple[str, ...]:
        return row[:2] if sample.form == "pairs" else (" ".join(row[1:] or row),)

    checks = [LeakCheck(held.name, map(compared, held.rows())) for held in sample.held]
    for _ in watch(sample.rows(), compared, checks):
        pass
    for check in checks:
        if not (hits := check.found):
            continue
        expected = min(check.n, hits / seen)
        count = f"{hits:,}"
        if seen < 1.0:
            count = f"{about(expected)} (extrapolated from {hits:,} in {percent(seen)} of the training text)"
        text = f"{check.name}: {count} of its {check.n:,} {what} are also in the training text"
        figures = {"set": check.name, "seen": hits, "of": check.n, "share": round(expected / check.n, 4)}
        level: Level = "warning" if expected > 0.005 * check.n else "note"
        yield Finding(
            "leaks", level, text, "remove them from the training text: they make scores look too good", figures
        )


def labels(sample: Sample) -> Iterator[Finding]:
    """The distribution of labels, and texts with several labels."""
    counts, by_text = Counter[str](), dict[bytes, set[str]]()
    for label, *texts in sample.rows():
        counts[label.strip()] += 1
        by_text.setdefault(_hash(texts), set()).add(label.strip())
    total = sum(counts.values())
    if len(counts) <= 1:
        for label in counts:
            advice = "a classifier needs at least two; the columns must be label<TAB>text"
            yield Finding("labels", "obstacle", f"there is one label only, {label!r}", advice)
        return
    shown = ", ".join(f"{label} {percent(n / total)}" for label, n in counts.most_common(8))
    more = f", and {len(counts) - 8} more" if len(counts) > 8 else ""
    yield Finding("labels", "note", f"labels: {shown}{more}", figures={"labels": dict(counts.most_common(50))})
    if len(counts) > total / 3 and total > 20:
        text = f"{len(counts):,} labels in {total:,} examples"
        yield Finding("labels", "warning", text, "are the columns label<TAB>text?")
    n = sum(len(given) > 1 for given in by_text.values())
    if n > 0.01 * len(by_text):
        text = f"{percent(n / len(by_text))} of the texts occur with several labels"
        yield Finding("labels", "warning", text, "which is right?", {"share": round(n / len(by_text), 4)})
    if sample.whole and (rare := [label for label, count in counts.items() if count < 5]) and len(counts) <= total / 3:
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


EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bins of the histogram, in tokens."""
N_ROWS = 10_000  # that are encoded


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one side in tokens. `counts`: texts in each bin of EDGES, and in one more for longer texts."""

    side: str
    counts: tuple[int, ...]
    mean: float
    median: int
    longest: int


def check_tokens(
    sample: Sample, tokenizers: Tokenizers, settings: Settings
) -> tuple[tuple[Lengths, ...], list[Finding]]:
    """Lengths in tokens, texts that are too long, and characters that are not in the vocabulary."""
    found, lengths = list[Finding](), dict[str, np.ndarray]()
    for name, texts, vocabulary in _sides(sample.some(N_ROWS), sample.form, tokenizers):
        all_ids = vocabulary.encode_batch(texts)
        lengths[name] = np.array([len(ids) for ids in all_ids])
        found += _unknown(f"the {name} of the training text", texts, vocabulary, all_ids)
    for held in sample.held:
        rows = [row for window in select([held], N_ROWS // len(sample.held))[0] for row in window.rows]
        for name, texts, vocabulary in _sides(rows, sample.form, tokenizers):
            found += _unknown(f"the {name} of {held.name}", texts, vocabulary, vocabulary.encode_batch(texts))
    found = [*_too_long(lengths, sample, settings), *found]
    return tuple(_lengths(name, side) for name, side in lengths.items() if len(side)), found


def _sides(rows: Sequence[Row], form: str, tokenizers: Tokenizers) -> list[tuple[str, list[str], Vocabulary]]:
    if form == "pairs":
        sides = ("source", tokenizers.src), ("target", tokenizers.tgt)
        return [(name, [row[i] for row in rows], vocabulary) for i, (name, vocabulary) in enumerate(sides)]
    texts = [text for row in rows for text in (row[1:] if form == "labelled" else row)]
    return [("text", texts, tokenizers.tgt)]


def _lengths(name: str, lengths: np.ndarray) -> Lengths:
    counts = np.bincount(np.searchsorted(EDGES, lengths), minlength=len(EDGES) + 1)
    return Lengths(name, tuple(counts.tolist()), float(lengths.mean()), int(np.median(lengths)), int(lengths.max()))


def _too_long(lengths: dict[str, np.ndarray], sample: Sample, settings: Settings) -> Iterator[Finding]:
    """Rows that are longer than training allows: pairs are dropped, labelled texts are truncated."""
    longer = np.max(list(lengths.values()), axis=0) > settings.data.max_length
    if sample.form == "text" or not longer.any():
        return
    share = float(longer.mean())
    what, done = ("pairs", "dropped") if sample.form == "pairs" else ("texts", "truncated")
    text = f"{percent(share)} of the {what} have more than {settings.data.max_length} tokens"
    advice = f"they are {done}; --set data.max_length=N allows longer ones, which take more memory"
    yield Finding("lengths", "warning" if share > 0.02 else "note", text, advice, {"share": round(share, 4)})


def _unknown(
    where: str, texts: list[str], vocabulary: Vocabulary, encoded: Sequence[Sequence[int]]
) -> Iterator[Finding]:
    """Characters that are not in the vocabulary."""
    hit = [text for text, ids in zip(texts, encoded, strict=True) if UNK in ids]
    if not hit:
        return
    missing = Counter(part for text in hit[:2000] for part in vocabulary.unknown(text))
    shown = " ".join(f"{part} (U+{ord(part[0]):04X})" if len(part) == 1 else part for part, _ in missing.most_common(8))
    share = len(hit) / len(texts)
    text = f"{percent(share)} of {where} have characters that are not in the vocabulary: {shown}"
    figures = {"share": round(share, 5), "characters": [part for part, _ in missing.most_common(50)]}
    if share <= 0.005:
        yield Finding("vocabulary", "note", text, figures=figures)
    else:
        advice = "--set tokenizer.character_coverage=1 includes all characters of the training text"
        yield Finding("vocabulary", "warning", text, advice, figures)


def _hash(row: Sequence[str]) -> bytes:
    return blake2b("\0".join(row).encode("utf-8", "surrogatepass"), digest_size=8).digest()
