"""Classification scores: accuracy, F1 and Matthews correlation, from the confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def confusion_matrix(truth: Sequence[int], predicted: Sequence[int], n_labels: int) -> np.ndarray:
    """Count how often label `row` was predicted as label `column`, [n_labels, n_labels]."""
    assert len(truth) == len(predicted)
    table = np.zeros((n_labels, n_labels), dtype=np.int64)
    np.add.at(table, (np.asarray(truth, dtype=np.int64), np.asarray(predicted, dtype=np.int64)), 1)
    return table


def f1_of(table: np.ndarray, label: int) -> float:
    """Return 2 TP / (2 TP + FP + FN) of one label; 0 if it neither occurs nor is predicted."""
    both = float(table[label].sum() + table[:, label].sum())
    return 2 * float(table[label, label]) / both if both else 0.0


def matthews(table: np.ndarray) -> float:
    """Return the correlation of true and predicted labels (Matthews 1975; more than two labels: Gorodkin 2004).

    1: all correct; 0: no better than chance, or only one label is true or predicted; -1 (two labels): all wrong.
    """
    n, correct = float(table.sum()), float(np.trace(table))
    truth, predicted = table.sum(1).astype(float), table.sum(0).astype(float)
    spread = math.sqrt((n**2 - float(truth @ truth)) * (n**2 - float(predicted @ predicted)))
    return (correct * n - float(truth @ predicted)) / spread if spread else 0.0


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Scores between 0 and 1; Matthews correlation from -1 to 1."""

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
        """F1 of each label."""
        return tuple(f1_of(self.table, i) for i in range(len(self.labels)))

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
        """Matthews correlation."""
        return matthews(self.table)

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
        """Convert to plain data."""
        return {
            "n": self.n,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "binary_f1": self.binary_f1,
            "matthews": self.matthews,
            "f1": dict(zip(self.labels, self.f1, strict=True)),
            "labels": list(self.labels),
            "confusion": self.table.tolist(),
        }


def score_labels(truth: Sequence[int], predicted: Sequence[int], labels: Sequence[str]) -> LabelScores:
    """Score predicted label numbers; both are indices into `labels`."""
    return LabelScores(tuple(labels), confusion_matrix(truth, predicted, len(labels)))
