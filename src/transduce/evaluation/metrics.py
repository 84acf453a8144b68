"""Scores: BLEU, chrF and TER by sacreBLEU, each with its signature; accuracy, F1 and Matthews correlation of labels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from sacrebleu.metrics import BLEU, CHRF, TER
from sacrebleu.metrics.base import Metric
from sacrebleu.tokenizers import tokenizer_spm

from transduce.errors import DataError, UserError, message_of, nearest

_ENDS_TOKENIZED = 0.5  # fraction of hypotheses ending in " ." above which text counts as tokenized


@dataclass(frozen=True, slots=True)
class Score:
    """One corpus score, from 0 to 100 (TER may be above), and how it was computed."""

    value: float
    signature: str


@dataclass(frozen=True, slots=True)
class BleuScore(Score):
    """BLEU with its parts: precisions of 1- to 4-grams in percent, and lengths in tokens."""

    precisions: tuple[float, ...]
    brevity_penalty: float
    length: int
    reference_length: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one set. TER counts errors: lower is better."""

    n_sentences: int
    bleu: BleuScore
    chrf: Score
    ter: Score
    exact_match: float  # fraction of hypotheses equal to the reference
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Scores:
        """The inverse of `to_json`, also of its JSON. Raises `ValueError` for other values."""
        return TypeAdapter(cls).validate_python(values)

    def signatures(self) -> dict[str, str]:
        """Signature of each score."""
        return {"BLEU": self.bleu.signature, "chrF": self.chrf.signature, "TER": self.ter.signature}

    def lines(self) -> list[str]:
        r"""Format for people.

        >>> print("\n".join(evaluate(["a b c d"], ["a b c d"]).lines()))  # doctest: +ELLIPSIS
        BLEU   100.00  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...
                       100.0/100.0/100.0/100.0  brevity penalty 1.000  length 4, reference 4
        chrF   100.00  nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:...
        TER      0.00  nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:...
        exact  100.0%  1 of 1 sentences
        """
        b = self.bleu
        precisions = "/".join(f"{p:.1f}" for p in b.precisions)
        n_exact = round(self.exact_match * self.n_sentences)
        return [
            f"BLEU   {b.value:6.2f}  {b.signature}",
            f"               {precisions}  brevity penalty {b.brevity_penalty:.3f}"
            f"  length {b.length:,}, reference {b.reference_length:,}",
            f"chrF   {self.chrf.value:6.2f}  {self.chrf.signature}",
            f"TER    {self.ter.value:6.2f}  {self.ter.signature}",
            f"exact  {self.exact_match:6.1%}  {n_exact:,} of {self.n_sentences:,} sentences",
            *(f"note: {note}" for note in self.notes),
        ]


def evaluate(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> Scores:
    """Score `hypotheses` against one reference each.

    Args:
        hypotheses: Translations.
        references: References, one per hypothesis.
        tokenize: BLEU tokenizer: "13a" for detokenized text, "none" for tokenized text, "zh", "char", ...
        lowercase: Ignore case in BLEU and chrF; TER always ignores it, as in sacreBLEU.

    Raises `DataError` if the two differ in length or are empty, `UserError` for an unknown tokenizer.
    """
    check_lengths(hypotheses, references)
    found = {}
    for name, metric in metrics(tokenize, lowercase).items():
        score: Any = metric.corpus_score(list(hypotheses), [list(references)])
        found[name] = Score(float(score.score), str(metric.get_signature())), score
    bleu = found["BLEU"][1]
    return Scores(
        n_sentences=len(references),
        bleu=BleuScore(
            **asdict(found["BLEU"][0]),
            precisions=tuple(map(float, bleu.precisions)),
            brevity_penalty=float(bleu.bp),
            length=int(bleu.sys_len),
            reference_length=int(bleu.ref_len),
        ),
        chrf=found["chrF"][0],
        ter=found["TER"][0],
        exact_match=sum(map(str.__eq__, hypotheses, references)) / len(references),
        notes=_notes(hypotheses, references, tokenize),
    )


def metrics(tokenize: str, lowercase: bool) -> dict[str, Metric]:
    """Return new sacreBLEU metrics by name. Raises `UserError` if the tokenizer cannot be used."""
    if tokenize not in BLEU.TOKENIZERS:
        allowed = ", ".join(BLEU.TOKENIZERS)
        raise UserError(f"unknown BLEU tokenizer '{tokenize}'{nearest(tokenize, BLEU.TOKENIZERS)}; allowed: {allowed}")
    if (model := tokenizer_spm.SPM_MODELS.get(tokenize)) is not None:
        file = Path(tokenizer_spm.SACREBLEU_DIR, "models", PurePosixPath(model["url"]).name)
        if not file.exists():  # sacreBLEU would download it
            raise UserError(
                f"BLEU tokenizer '{tokenize}' needs {file}, which is not there; download it from {model['url']}"
            )
    try:
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # instead of its warning there is a note
    except Exception as error:  # a missing package or download; each fails differently
        why = message_of(error)
        raise UserError(f"BLEU tokenizer '{tokenize}' cannot be used here: {why}") from error
    return {"BLEU": bleu, "chrF": CHRF(lowercase=lowercase), "TER": TER()}


def check_lengths(hypotheses: Sequence[str], references: Sequence[str], name: str = "hypotheses") -> None:
    """Raise `DataError` unless there is one hypothesis per reference, and at least one."""
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} {name} but {len(references):,} references: they must be aligned line by line"
        )
    if not references:
        raise DataError("there is nothing to score: the references are empty")


def _notes(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> tuple[str, ...]:
    """Return warnings about the texts."""
    notes = []
    n_empty = sum(not reference.strip() for reference in references)
    if n_empty:
        notes.append(f"{n_empty:,} of {len(references):,} references are empty")
    n_tokenized = sum(hypothesis.endswith(" .") for hypothesis in hypotheses)
    if tokenize not in ("none", "char") and n_tokenized > _ENDS_TOKENIZED * len(hypotheses):
        notes.append(
            "the hypotheses look tokenized: score tokenized text with tokenize 'none', or detokenize both sides"
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores of predicted labels. `table[i, j]`: how often the label i was predicted as j."""

    labels: tuple[str, ...]
    table: np.ndarray

    @property
    def n(self) -> int:
        """Number of examples."""
        return int(self.table.sum())

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return float(np.trace(self.table)) / self.n if self.n else 0.0

    @property
    def f1(self) -> tuple[float, ...]:
        """2 TP / (2 TP + FP + FN) of each label; 0 if it neither occurs nor is predicted."""
        both = (self.table.sum(0) + self.table.sum(1)).tolist()
        right = np.diagonal(self.table).tolist()
        return tuple(2.0 * r / b if b else 0.0 for r, b in zip(right, both, strict=True))

    @property
    def binary_f1(self) -> float | None:
        """F1 of the second of two labels, as in GLUE; None for more labels."""
        return self.f1[1] if len(self.labels) == 2 else None

    @property
    def macro_f1(self) -> float:
        """Mean F1 over labels."""
        return sum(self.f1) / len(self.labels)

    @property
    def matthews(self) -> float:
        """Correlation of true and predicted labels (Matthews 1975; more than two labels: Gorodkin 2004).

        1: all correct; 0: no better than chance, or only one label is true or predicted; -1 (two labels): all wrong.
        """
        n, correct = float(self.n), float(np.trace(self.table))
        truth, predicted = self.table.sum(1).astype(float), self.table.sum(0).astype(float)
        spread = math.sqrt((n**2 - float(truth @ truth)) * (n**2 - float(predicted @ predicted)))
        return (correct * n - float(truth @ predicted)) / spread if spread else 0.0

    def lines(self) -> list[str]:
        """Format for people: overall scores, then one line per label."""
        binary = "" if self.binary_f1 is None else f"  F1 of {self.labels[1]} {self.binary_f1:.1%}"
        head = f"accuracy {self.accuracy:.1%}  macro F1 {self.macro_f1:.1%}{binary}  Matthews {self.matthews:.3f}"
        rows = [
            f"{label}: {int(self.table[i].sum()):,} examples, {int(self.table[i, i]):,} correct, F1 {self.f1[i]:.1%}"
            for i, label in enumerate(self.labels)
        ]
        return [f"{head}  ({self.n:,} examples)", *rows]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("n", "accuracy", "macro_f1", "binary_f1", "matthews")
        return {name: getattr(self, name) for name in names} | {
            "f1": dict(zip(self.labels, self.f1, strict=True)),
            "labels": list(self.labels),
            "confusion": self.table.tolist(),
        }


def score_labels(truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> LabelScores:
    """Score predicted label numbers; both are indices into `labels`."""
    assert len(truth) == len(predicted)
    table = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(table, (np.asarray(truth, dtype=np.int64), np.asarray(predicted, dtype=np.int64)), 1)
    return LabelScores(tuple(labels), table)


Precisions = Mapping[str, Mapping[str, float]]
"""Of a translator, by precision, float32 first: bleu, sentences_per_second."""


def compare_with_float32(found: Precisions) -> list[tuple[str, float, float, float, float]]:
    """Of each precision: name, BLEU, difference of BLEU, sentences per second, times as fast."""
    bleu, speed = found["float32"]["bleu"], found["float32"]["sentences_per_second"]
    return [
        (name, one["bleu"], one["bleu"] - bleu, one["sentences_per_second"], one["sentences_per_second"] / speed)
        for name, one in found.items()
    ]


def format_precisions(found: Precisions) -> list[str]:
    """Format the other precisions compared with float32, as lines."""
    return [
        f"precision {name}: {bleu:.2f} BLEU ({difference:+.2f}), {times:.1f} times as fast as float32"
        for name, bleu, difference, _, times in compare_with_float32(found)
        if name != "float32"
    ]
