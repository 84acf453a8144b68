"""The bias of masks: weights of exactly zero, and finite values and gradients."""

from __future__ import annotations

import pytest
import torch

from transduce.nn.masks import attention_bias


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
