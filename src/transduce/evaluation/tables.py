"""The tables and lines that the report and the model card have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transduce.evaluation.records import Record, SetScores

UNSCORED = "Nothing was scored when this run was trained: it was given no test text."

_COLUMNS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "text_scores": {
        "nats per token": ("nll", "{:.4f}"),
        "perplexity per token": ("perplexity", "{:.3f}"),
        "bits per byte": ("bits_per_byte", "{:.4f}"),
        "tokens": ("tokens", "{:,}"),
        "bytes": ("bytes", "{:,}"),
    },
    "label_scores": {
        "texts": ("n", "{:,}"),
        "accuracy": ("accuracy", "{:.2%}"),
        "macro F1": ("macro_f1", "{:.2%}"),
        "F1 of the second": ("binary_f1", "{:.2%}"),
        "Matthews": ("matthews", "{:.4f}"),
    },
    "masked_scores": {
        "masked-token accuracy": ("masked_accuracy", "{:.2%}"),
        "nats per masked token": ("nll", "{:.4f}"),
        "perplexity": ("perplexity", "{:.2f}"),
        "next-sentence accuracy": ("next_sentence_accuracy", "{:.2%}"),
    },
}
"""Columns of score tables: heading, key of the score, format."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; every column but the first has numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def score_tables(record: Record) -> list[Table]:
    """Return the scores of all test sets, one table per kind of score."""
    tables = []
    if record.scores:
        header = ("set", "sentences", "BLEU", "chrF", "TER", "exact", "precisions", "brevity")
        tables.append(Table(header, [_translation_row(found) for found in record.scores]))
    for name, columns in _COLUMNS.items():
        rows = [
            [str(found["name"]), *(_cell(found.get(key), form) for key, form in columns.values())]
            for found in getattr(record, name)
        ]
        if rows:
            tables.append(Table(("set", *columns), rows))
    return tables


def unscored(record: Record) -> str:
    """Return a note if the run has finished without scores."""
    scored = record.scores or any(getattr(record, name) for name in _COLUMNS)
    return UNSCORED if record.of("end") and not scored else ""


def compact(value: float) -> str:
    """Format a count for people.

    >>> compact(950), compact(2_612_352), compact(60_500_000)
    ('950', '2.61M', '60.5M')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.0f}"


def search_line(found: SetScores) -> str:
    """Format how the translations of a set were searched for."""
    return ", ".join(f"{key} {value}" for key, value in found.search.items())


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _translation_row(found: SetScores) -> list[str]:
    s = found.scores
    values = [f"{s.bleu.value:.2f}", f"{s.chrf.value:.2f}", f"{s.ter.value:.2f}", f"{s.exact_match:.1%}"]
    precisions = " / ".join(f"{p:.1f}" for p in s.bleu.precisions)
    return [found.name, f"{s.n_sentences:,}", *values, precisions, f"{s.bleu.brevity_penalty:.3f}"]
