"""Attention: any mask compared with the oracle, rotations, empty rows, dropout, sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import numpy_transformer as oracle
from transduce.nn.attention import CrossAttention, SelfAttention, attention_weights, scaled_dot_product_attention
from transduce.nn.masks import attention_bias
from transduce.nn.positions import RotaryPositions

EXACT = {"rtol": 0, "atol": 1e-10}  # float64, values of order 10


def same(x: Tensor) -> Tensor:
    return x


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    n_rows=st.integers(1, 3),
    n_queries=st.integers(1, 6),
    n_keys=st.integers(1, 6),
    n_heads=st.integers(1, 3),
    d_head=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_scaled_dot_product_attention_with_any_mask(
    n_rows: int, n_queries: int, n_keys: int, n_heads: int, d_head: int, share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(n_rows, n_heads, n, d_head).double() for n in (n_queries, n_keys, n_keys))
    mask = torch.rand(n_rows, n_queries, n_keys) < share
    bias = attention_bias(mask)
    output, weights = scaled_dot_product_attention(query, key, value, bias=bias), attention_weights(query, key, bias)
    for b in range(n_rows):
        for h in range(n_heads):
            inputs = (tensor[b, h].numpy() for tensor in (query, key, value))
            theirs, their_weights = oracle.attention(*inputs, mask[b].numpy())
            np.testing.assert_allclose(output[b, h].numpy(), theirs, **EXACT)
            np.testing.assert_allclose(weights[b, h].numpy(), their_weights, **EXACT)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, 4), 300.0)
    key = torch.stack([torch.full((4,), 300.0), torch.full((4,), -300.0)])[None, None]
    value = torch.randn(1, 1, 2, 4)
    assert torch.equal(scaled_dot_product_attention(query, key, value), value[:, :, [0, 0]])


def test_rotary_self_attention_depends_on_distances_only() -> None:
    rotary = RotaryPositions(d_model=12, d_head=6, max_positions=0)
    module = SelfAttention(d_model=12, n_heads=2).double()
    x, mask = torch.randn(1, 5, 12).double(), torch.ones(1, 5, 5, dtype=torch.bool)
    near, far = (
        module(x, bias=attention_bias(mask), rotate=rotary.rotation(torch.arange(at, at + x.shape[1])))
        for at in (0, 50)
    )
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)  # angles are computed in float32
    assert not torch.allclose(near, module(x, bias=attention_bias(mask), rotate=same), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_everything_masked_stay_finite_and_do_not_affect_others(dtype: torch.dtype) -> None:
    module = SelfAttention(d_model=12, n_heads=2).to(dtype)
    x = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 1] = False
    mask[1] = False
    y = module(x, bias=attention_bias(mask), rotate=same)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    full = module(x, bias=attention_bias(torch.ones_like(mask)), rotate=same)
    assert torch.equal(y[0, [0, 2, 3]], full[0, [0, 2, 3]])


def test_attention_dropout_drops_weights_in_training_only() -> None:
    module = SelfAttention(d_model=12, n_heads=2, dropout=0.5)
    x, bias = torch.randn(4, 6, 12), attention_bias(torch.ones(4, 6, 6, dtype=torch.bool))
    quiet = module.eval()(x, bias=bias, rotate=same)
    torch.testing.assert_close(module(x, bias=bias, rotate=same), quiet)
    module.train()
    mean = torch.stack([module(x, bias=bias, rotate=same) for _ in range(1500)]).mean(0)
    assert not torch.allclose(module(x, bias=bias, rotate=same), quiet, atol=1e-3)
    torch.testing.assert_close(mean, quiet, rtol=0, atol=0.08)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, "12 is not divisible by n_heads 5"),
        ({"n_heads": 4, "n_kv_heads": 3}, "not divisible by n_kv_heads 3"),
    ],
)
def test_contradicting_sizes_are_refused(options: dict[str, int], message: str) -> None:
    for kind in (SelfAttention, CrossAttention):
        with pytest.raises(ValueError, match=message):
            kind(d_model=12, **options)


def test_shared_projection_refuses_groups() -> None:
    with pytest.raises(ValueError, match="shared projection"):
        SelfAttention(d_model=12, n_heads=4, n_kv_heads=2, projection="shared")


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
