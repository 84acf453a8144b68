"""Convolutions: padding, steps with history; dropout. tests/unit/models compares all kinds with the oracle."""

from __future__ import annotations

import pytest
import torch

from oracle.adapter import randomize
from transduce.nn.feedforward import FEED_FORWARDS, FeedForward

EXACT = {"rtol": 0, "atol": 1e-10}
D, F = 6, 10


def make(kind: str, **options: object) -> FeedForward:
    module = FEED_FORWARDS[kind](d_model=D, d_ff=F, **options).double()
    randomize(module)
    return module


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_convolution_sees_padding_as_zeros(left: bool) -> None:
    """Values at padding, before and after the first convolution, must not leak into real positions."""
    module, x = make("conv", kernel_size=3), torch.randn(1, 4, D).double()
    junk = torch.randn(1, 3, D).double() * 100
    padded = torch.cat([junk, x] if left else [x, junk], dim=1)
    real = slice(3, None) if left else slice(4)
    keep = torch.zeros(1, 7, 1, dtype=torch.bool)
    keep[:, real] = True
    torch.testing.assert_close(module(padded, keep)[:, real], module(x), **EXACT)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 5])
@pytest.mark.parametrize("cuts", [[1] * 8, [3, 1, 4], [8], [1, 7]], ids=str)
def test_convolution_in_steps_with_history(kernel_size: int, cuts: list[int]) -> None:
    module, x = make("conv", kernel_size=kernel_size, causal=True), torch.randn(2, 8, D).double()
    history: list[torch.Tensor] = []
    parts = [module(part, None, history) for part in x.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x), **EXACT)
    assert all(known.shape[1] == kernel_size - 1 for known in history)


@pytest.mark.parametrize("kind", FEED_FORWARDS)
def test_dropout_inside_in_training_only(kind: str) -> None:
    module, x = make(kind, dropout=0.5), torch.randn(2, 3, D).double()
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
