"""Attention and blocks compared with PyTorch's layers with the same weights: forward and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from oracle.adapter import randomize
from oracle.torch_twin import attention_pairs, block_pairs, copy
from transduce.nn.attention import CrossAttention, SelfAttention, scaled_dot_product_attention
from transduce.nn.block import RESIDUALS, EncoderBlock
from transduce.nn.feedforward import FeedForward
from transduce.nn.masks import attention_bias

B, T, S, D, H = 3, 5, 7, 16, 4
EXACT = {"rtol": 0, "atol": 1e-10}  # float64, values of order 10
FLOAT32 = {"rtol": 1e-4, "atol": 2e-5}


def masks() -> Tensor:
    """Random [B, T, S] in which every query sees something."""
    mask = torch.rand(B, T, S) < 0.6
    mask[:, :, 0] = True
    return mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_dot_product_attention(masked: bool, dtype: torch.dtype) -> None:
    inputs = [torch.randn(B, H, n, 6, dtype=dtype, requires_grad=True) for n in (T, S, S)]
    mask = masks() if masked else None
    ours = scaled_dot_product_attention(*inputs, bias=None if mask is None else attention_bias(mask))
    theirs = functional.scaled_dot_product_attention(*inputs, attn_mask=None if mask is None else mask[:, None])
    tolerance = {"rtol": 0, "atol": 1e-12} if dtype == torch.float64 else FLOAT32
    torch.testing.assert_close(ours, theirs, **tolerance)
    upstream = torch.randn_like(theirs)
    for mine, yours in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, yours, **tolerance)


def compare(mine: Callable[[Tensor], Tensor], yours: Callable[[Tensor], Tensor], x: Tensor, real: Tensor) -> None:
    """Outputs at real positions, and their gradient with respect to x."""
    results = []
    for call in (mine, yours):
        leaf = x.clone().requires_grad_()
        y = call(leaf)[real]
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], **EXACT)


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(causal: bool) -> None:
    ours = SelfAttention(d_model=D, n_heads=H).double()
    randomize(ours)
    theirs = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    copy(attention_pairs(ours, theirs))
    real = torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    past = torch.ones(T, T, dtype=torch.bool).tril()
    mask = real[:, None, :] & (past if causal else True)
    future = ~past if causal else None
    compare(
        lambda x: ours(x, bias=attention_bias(mask), rotate=lambda y: y),
        lambda x: theirs(x, x, x, key_padding_mask=~real, attn_mask=future, need_weights=False)[0],
        torch.randn(B, T, D, dtype=torch.float64),
        real,
    )


@pytest.mark.parametrize("n_beams", [1, 3])
def test_cross_attention(n_beams: int) -> None:
    """The beams of a sentence share its memory; PyTorch gets a copy of the memory per beam."""
    ours = CrossAttention(d_model=D, n_heads=H).double()
    randomize(ours)
    theirs = nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    copy(attention_pairs(ours, theirs))
    memory = torch.randn(B, S, D, dtype=torch.float64)
    seen = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    repeated, hidden = memory.repeat_interleave(n_beams, 0), ~seen.repeat_interleave(n_beams, 0)
    compare(
        lambda x: ours(x.view(B, -1, D), *ours.key_value(memory), bias=attention_bias(seen[:, None])).view(x.shape),
        lambda x: theirs(x, repeated, repeated, key_padding_mask=hidden, need_weights=False)[0],
        torch.randn(B * n_beams, T, D, dtype=torch.float64),
        torch.ones(B * n_beams, T, dtype=torch.bool),
    )


@pytest.mark.parametrize("residual", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_block(residual: str, activation: str) -> None:
    block = EncoderBlock(
        attention=SelfAttention(d_model=D, n_heads=H),
        feed_forward=FeedForward(d_model=D, d_ff=24, activation=activation),
        residual=lambda: RESIDUALS[residual](nn.LayerNorm(D)),
    ).double()
    randomize(block)
    theirs = nn.TransformerEncoderLayer(
        D, H, 24, 0.0, activation, batch_first=True, norm_first=residual == "pre", dtype=torch.float64
    )
    copy(block_pairs(block, theirs))
    real = torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    bias, keep = attention_bias(real[:, None]), real[..., None]
    compare(
        lambda x: block(x, bias=bias, keep=keep, rotate=lambda y: y),
        lambda x: theirs(x, src_key_padding_mask=~real),
        torch.randn(B, T, D, dtype=torch.float64),
        real,
    )
