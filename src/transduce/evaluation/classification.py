"""How well labels are told: accuracy, F1 and Matthews' correlation, from the table of what was told for what is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def confusion(truth: Sequence[int], told: Sequence[int], n_labels: int) -> np.ndarray:
    """How often label `row` was told as label `column`, [n_labels, n_labels]."""
    assert len(truth) == len(told), "one label for each"
    table = np.zeros((n_labels, n_labels), dtype=np.int64)
    np.add.at(table, (np.asarray(truth, dtype=np.int64), np.asarray(told, dtype=np.int64)), 1)
    return table


def f1_of(table: np.ndarray, label: int) -> float:
    """2 TP / (2 TP + FP + FN) of one label; 0 where it neither occurs nor is told."""
    both = float(table[label].sum() + table[:, label].sum())
    return 2 * float(table[label, label]) / both if both else 0.0


def matthews(table: np.ndarray) -> float:
    """The correlation of what is and what is told (Matthews 1975; for more labels Gorodkin 2004).

    1: all right; 0: no better than chance, or only one label occurs on a side; -1 (of two labels): all wrong.
    """
    n, right = float(table.sum()), float(np.trace(table))
    truth, told = table.sum(1).astype(float), table.sum(0).astype(float)
    spread = math.sqrt((n**2 - float(truth @ truth)) * (n**2 - float(told @ told)))
    return (right * n - float(truth @ told)) / spread if spread else 0.0


@dataclass(frozen=True, slots=True)
class LabelScores:
    """Shares between 0 and 1, but for Matthews' correlation, -1 to 1."""

    labels: tuple[str, ...]
    table: np.ndarray

    @property
    def n(self) -> int:
        """Examples."""
        return int(self.table.sum())

    @property
    def accuracy(self) -> float:
        """The share that is told right."""
        return float(np.trace(self.table)) / self.n if self.n else 0.0

    @property
    def f1(self) -> tuple[float, ...]:
        """Of each label."""
        return tuple(f1_of(self.table, i) for i in range(len(self.labels)))

    @property
    def binary_f1(self) -> float | None:
        """Of the second of two labels, as GLUE counts it; None where there are more."""
        return self.f1[1] if len(self.labels) == 2 else None

    @property
    def macro_f1(self) -> float:
        """The mean over labels."""
        return sum(self.f1) / len(self.labels)

    @property
    def matthews(self) -> float:
        """The correlation."""
        return matthews(self.table)

    def lines(self) -> list[str]:
        """For people: percentages, the correlation as it is; then each label."""
        binary = "" if self.binary_f1 is None else f"  F1 of {self.labels[1]} {self.binary_f1:.1%}"
        head = f"accuracy {self.accuracy:.1%}  macro F1 {self.macro_f1:.1%}{binary}  Matthews {self.matthews:.3f}"
        rows = [
            f"{label}: {int(self.table[i].sum()):,} examples, {int(self.table[i, i]):,} right, F1 {self.f1[i]:.1%}"
            for i, label in enumerate(self.labels)
        ]
        return [f"{head}  ({self.n:,} examples)", *rows]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
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


def score_labels(truth: Sequence[int], told: Sequence[int], labels: Sequence[str]) -> LabelScores:
    """The scores of numbers of labels."""
    return LabelScores(tuple(labels), confusion(truth, told, len(labels)))
