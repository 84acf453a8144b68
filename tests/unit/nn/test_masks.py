"""Masks compared with simple loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transduce.nn.masks import attention_bias, padding_mask
from transduce.nn.patterns import CausalPattern

ids_of_a_batch = st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4)


@given(ids_of_a_batch)
def test_padding_mask_is_true_at_tokens(rows: list[list[int]]) -> None:
    mask = padding_mask(torch.tensor(rows))
    assert mask.dtype == torch.bool and mask.shape == (len(rows), 1, 5)
    assert mask[:, 0].tolist() == [[token != 0 for token in row] for row in rows]


@given(st.integers(1, 7), st.integers(0, 7))
def test_a_causal_pattern_hides_later_keys(n_queries: int, n_before: int) -> None:
    keys = torch.arange(n_before + n_queries)
    mask = CausalPattern().mask(keys[n_before:], keys)
    assert mask.dtype == torch.bool
    expected = [[s <= n_before + t for s in range(n_before + n_queries)] for t in range(n_queries)]
    assert mask.tolist() == expected


def test_masks_combine_with_and() -> None:
    mask = padding_mask(torch.tensor([[7, 8, 0], [0, 8, 9]])) & CausalPattern().mask(torch.arange(3), torch.arange(3))
    assert mask.int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]],
        [[0, 0, 0], [0, 1, 0], [0, 1, 1]],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bias_gives_forbidden_positions_a_weight_of_exactly_zero(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[True, False, True], [False, False, True]]])
    scores = (torch.tensor([[[[50.0, -50.0, 0.0], [1e4, 1e4, -1e4]]]])).to(dtype)
    weights = (scores + attention_bias(mask).to(dtype)).softmax(-1)
    assert (weights[0, 0][~mask[0]] == 0).all()
    assert weights[0, 0, 1].tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_of_a_fully_masked_row_is_finite_in_value_and_gradient(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[False, False, False], [True, False, False]]])
    scores = torch.randn(1, 1, 2, 3, dtype=dtype, requires_grad=True)
    weights = (scores + attention_bias(mask).to(dtype)).softmax(-1)
    torch.testing.assert_close(weights[0, 0, 0], torch.full((3,), 1 / 3, dtype=dtype))
    weights.square().sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()
