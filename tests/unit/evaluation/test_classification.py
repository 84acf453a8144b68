"""Classification scores compared with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.evaluation.metrics import score_labels

NAMES = "abcd"


@st.composite
def answers(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    n_labels = draw(st.integers(2, 4))
    n = draw(st.integers(1, 30))
    numbers = st.lists(st.integers(0, n_labels - 1), min_size=n, max_size=n)
    return n_labels, draw(numbers), draw(numbers)


@given(answers())
def test_scores_follow_their_definitions(case: tuple[int, list[int], list[int]]) -> None:
    n_labels, truth, predicted = case
    found = score_labels(truth, predicted, NAMES[:n_labels])
    pairs = list(zip(truth, predicted, strict=True))
    assert found.n == len(pairs)
    assert found.accuracy == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
    f1 = []
    for label in range(n_labels):
        right = sum(a == b == label for a, b in pairs)
        precision = right / predicted.count(label) if predicted.count(label) else 0.0
        recall = right / truth.count(label) if truth.count(label) else 0.0
        f1.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert found.f1 == pytest.approx(f1)
    assert found.macro_f1 == pytest.approx(sum(f1) / n_labels)
    assert found.binary_f1 == (pytest.approx(f1[1]) if n_labels == 2 else None)
    one_hot = np.eye(n_labels)
    a, b = (one_hot[side] - one_hot[side].mean(0) for side in (truth, predicted))
    spread = math.sqrt((a * a).sum() * (b * b).sum())
    assert found.matthews == pytest.approx((a * b).sum() / spread if spread > 1e-12 else 0.0, abs=1e-9)


def test_matthews_of_two_labels_is_their_correlation() -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 2, 200)
    predicted = np.where(draw.random(200) < 0.8, truth, 1 - truth)
    found = score_labels(truth.tolist(), predicted.tolist(), ("0", "1"))
    assert found.matthews == pytest.approx(float(np.corrcoef(truth, predicted)[0, 1]))
    assert score_labels([0, 1], [1, 0], ("0", "1")).matthews == -1
    assert "accuracy" in found.lines()[0] and len(found.lines()) == 3
    assert found.to_json()["confusion"] == found.table.tolist()
