"""Filters, compared with values by hand and with their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from transduce.decoding.filters import apply_temperature, keep_top_k, keep_top_p

LOGITS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [(row > -math.inf).nonzero().flatten().tolist() for row in logits]


def test_temperature() -> None:
    assert apply_temperature(LOGITS, 1.0) is LOGITS
    sharp = apply_temperature(LOGITS, 0.5).softmax(-1)
    torch.testing.assert_close(sharp, LOGITS.exp() ** 2 / (LOGITS.exp() ** 2).sum(-1, keepdim=True))


def test_top_k() -> None:
    assert kept(keep_top_k(LOGITS, 2)) == [[0, 1], [2, 3]]
    assert keep_top_k(LOGITS, 0) is LOGITS
    assert keep_top_k(LOGITS, 4) is LOGITS


@pytest.mark.parametrize(
    ("p", "first"), [(0.0, [0]), (0.5, [0]), (0.51, [0, 1]), (0.9, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p(p: float, first: list[int]) -> None:
    assert kept(keep_top_p(LOGITS, p)) == [first, sorted(3 - i for i in first)]


@hypothesis_settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), p=st.floats(0.0, 1.0), n=st.integers(2, 40))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed: int, p: float, n: int) -> None:
    logits = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)) * 3
    for row, filtered in zip(logits.double(), keep_top_p(logits.double(), p), strict=True):
        probability = row.softmax(-1)
        chosen = probability[filtered > -math.inf]
        assert torch.equal(filtered[filtered > -math.inf], row[filtered > -math.inf])
        assert chosen.min() >= probability[filtered == -math.inf].max() if len(chosen) < n else True
        assert chosen.sum() >= p - 1e-9
        assert len(chosen) == 1 or chosen.sum() - chosen.min() < p + 1e-9


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: apply_temperature(LOGITS, 0.0), "temperature 0.0"),
        (lambda: keep_top_k(LOGITS, -1), "top_k -1"),
        (lambda: keep_top_p(LOGITS, 1.5), "top_p 1.5"),
    ],
)
def test_values_out_of_range_are_refused(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
