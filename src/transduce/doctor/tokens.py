"""What the vocabulary makes of the sample: lengths in tokens, characters that it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transduce.config import Settings
from transduce.doctor.findings import Finding, percent
from transduce.doctor.sampling import Row, Sample, drawn
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

EDGES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the histogram's lines, in tokens."""
LOOKED_AT = 10_000  # rows


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one side: how many texts have at most so many tokens as EDGES say (the last: more), and what is typical."""

    side: str
    counts: tuple[int, ...]
    mean: float
    median: int
    longest: int


def look(sample: Sample, tokenizers: Tokenizers, settings: Settings) -> tuple[tuple[Lengths, ...], list[Finding]]:
    """The lengths of each side, and what is to be said of them and of the characters."""
    rows = sample.some(LOOKED_AT)
    encoded = {
        name: (texts, vocabulary, vocabulary.encode_batch(texts))
        for name, texts, vocabulary in _sides(rows, sample.form, tokenizers)
    }
    lengths = {name: np.array([len(ids) for ids in all_ids]) for name, (_, _, all_ids) in encoded.items()}
    found = _too_long(lengths, sample, settings)
    for name, (texts, vocabulary, all_ids) in encoded.items():
        found += _unknown(f"the {name} of the training text", texts, vocabulary, all_ids)
    for held in sample.held:
        windows = drawn([held], LOOKED_AT // len(sample.held))[0]
        held_rows = [row for window in windows for row in window.rows]
        for name, texts, vocabulary in _sides(held_rows, sample.form, tokenizers):
            found += _unknown(f"the {name} of {held.name}", texts, vocabulary, vocabulary.encode_batch(texts))
    return tuple(_described(name, side) for name, side in lengths.items() if len(side)), found


def _sides(rows: Sequence[Row], form: str, tokenizers: Tokenizers) -> list[tuple[str, list[str], Vocabulary]]:
    if form == "pairs":
        return [
            ("source", [row[0] for row in rows], tokenizers.src),
            ("target", [row[1] for row in rows], tokenizers.tgt),
        ]
    texts = [text for row in rows for text in (row[1:] if form == "labelled" else row)]
    return [("text", texts, tokenizers.tgt)]


def _described(name: str, lengths: np.ndarray) -> Lengths:
    counts = np.bincount(np.searchsorted(EDGES, lengths), minlength=len(EDGES) + 1)
    mean, median = float(lengths.mean()), int(np.median(lengths))
    return Lengths(name, tuple(counts.tolist()), mean, median, int(lengths.max()))


def _too_long(lengths: dict[str, np.ndarray], sample: Sample, settings: Settings) -> list[Finding]:
    """Rows beyond the longest that is trained on: pairs are left out, labelled texts are cut."""
    most = settings.data.max_length
    if sample.form == "text" or not lengths:
        return []
    longer = np.max(np.stack(list(lengths.values())), axis=0) if sample.form == "pairs" else lengths["text"]
    share = float((longer > most).mean()) if len(longer) else 0.0
    if not share:
        return []
    done = "left out" if sample.form == "pairs" else "cut there"
    text = f"{percent(share)} of the {'pairs' if sample.form == 'pairs' else 'texts'} have more than {most} tokens"
    advice = f"they are {done}; --set data.max_length=N allows for longer ones, and takes more memory"
    return [Finding("lengths", "warning" if share > 0.02 else "note", text, advice, {"share": round(share, 4)})]


def _unknown(where: str, texts: list[str], vocabulary: Vocabulary, encoded: Sequence[Sequence[int]]) -> list[Finding]:
    """Characters that the vocabulary lacks."""
    hit = [i for i, ids in enumerate(encoded) if UNK in ids]
    if not hit:
        return []
    lacking = Counter(part for i in hit[:2000] for part in vocabulary.unknown(texts[i]))
    shown = " ".join(f"{part} (U+{ord(part[0]):04X})" if len(part) == 1 else part for part, _ in lacking.most_common(8))
    share = len(hit) / len(texts)
    return [
        Finding(
            "vocabulary",
            "warning" if share > 0.005 else "note",
            f"{percent(share)} of {where} have characters that the vocabulary lacks: {shown}",
            "--set tokenizer.character_coverage=1 covers all that the training text has" if share > 0.005 else "",
            {"share": round(share, 5), "characters": [part for part, _ in lacking.most_common(50)]},
        )
    ]
