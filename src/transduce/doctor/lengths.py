"""Lengths in tokens, and characters that are not in the vocabulary: checks that need a tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from transduce.config import Settings
from transduce.doctor.findings import Finding, note_or_warning, percent
from transduce.doctor.sampling import Row, Sample, select
from transduce.tasks.base import Form
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the bins of the histogram, in tokens."""
N_ROWS = 10_000  # that are encoded
_BAR = 24  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    unknown, lengths = list[Finding](), dict[str, np.ndarray]()
    for name, texts, vocabulary in _sides(sample.some(N_ROWS), sample.form, tokenizers):
        encoded = vocabulary.encode_batch(texts)
        lengths[name] = np.array([len(ids) for ids in encoded])
        unknown += _unknown(f"the {name} of the training text", texts, vocabulary, encoded)
    for held in sample.held:
        rows = [row for window in select([held], N_ROWS // len(sample.held))[0] for row in window.rows]
        for name, texts, vocabulary in _sides(rows, sample.form, tokenizers):
            unknown += _unknown(f"the {name} of {held.name}", texts, vocabulary, vocabulary.encode_batch(texts))
    described = []
    for name, side in lengths.items():
        counts = np.bincount(np.searchsorted(EDGES, side), minlength=len(EDGES) + 1)
        described.append(
            Lengths(name, tuple(counts.tolist()), float(side.mean()), int(np.median(side)), int(side.max()))
        )
    return tuple(described), [*_too_long(lengths, sample, settings), *unknown]


def histogram(sides: Sequence[Lengths]) -> list[str]:
    """Lengths in tokens, one column per side."""
    if not sides:
        return []
    used = [i for i in range(len(EDGES) + 1) if any(side.counts[i] for side in sides)]
    heads = [f"{side.side}: median {side.median}, longest {side.longest}" for side in sides]
    lines = [" " * 12 + "  ".join(f"{head:<{_BAR + 7}}" for head in heads).rstrip()]
    largest = max(max(side.counts) / sum(side.counts) for side in sides)
    for i in range(used[0], used[-1] + 1):
        begin = EDGES[i - 1] + 1 if i else 0
        name = f"{begin:>4} - {EDGES[i]:<4}" if i < len(EDGES) else f"{begin:>4} +     "
        shares = [side.counts[i] / sum(side.counts) for side in sides]
        cells = [f"{_bar(share / largest):<{_BAR}} {share:>4.0%}  " for share in shares]
        lines.append(f"{name} " + "  ".join(cells).rstrip())
    return lines


def _bar(share: float) -> str:
    full, rest = divmod(round(share * _BAR * 8), 8)
    return "█" * full + (_EIGHTHS[rest] if rest else "") or ("▏" if share else "")


def _sides(rows: Sequence[Row], form: Form, tokenizers: Tokenizers) -> list[tuple[str, list[str], Vocabulary]]:
    if form == "pairs":
        sides = ("source", tokenizers.src), ("target", tokenizers.tgt)
        return [(name, [row[i] for row in rows], vocabulary) for i, (name, vocabulary) in enumerate(sides)]
    texts = [text for row in rows for text in (row[1:] if form == "labelled" else row)]
    return [("text", texts, tokenizers.tgt)]


def _too_long(lengths: dict[str, np.ndarray], sample: Sample, settings: Settings) -> Iterator[Finding]:
    """Rows that are longer than training allows: pairs are dropped, labelled texts are truncated."""
    longer = np.max(list(lengths.values()), axis=0) > settings.data.max_length
    if sample.form == "text" or not longer.any():
        return
    share = float(longer.mean())
    what, done = ("pairs", "dropped") if sample.form == "pairs" else ("texts", "truncated")
    text = f"{percent(share)} of the {what} have more than {settings.data.max_length} tokens and are {done}"
    advice = "--set data.max_length=N allows longer ones, which take more memory"
    yield note_or_warning(share > 0.02, "lengths", text, advice, {"share": round(share, 4)})


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
    advice = "--set tokenizer.character_coverage=1 includes all characters of the training text"
    yield note_or_warning(share > 0.005, "vocabulary", text, advice, figures)
