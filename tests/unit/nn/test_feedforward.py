"""Feed-forward networks compared with the oracle; the convolution: kernel 1, padding, history."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oracle import numpy_transformer as oracle
from oracle.adapter import randomize
from transduce.nn.feedforward import ACTIVATIONS, FEED_FORWARDS, FeedForward

EXACT = {"rtol": 0, "atol": 1e-10}
D, F = 6, 10


def make(kind: str, **options: object) -> FeedForward:
    module = FEED_FORWARDS[kind](d_model=D, d_ff=F, **options).double()
    randomize(module)
    return module


def oracle_names(module: FeedForward, kind: str) -> dict[str, oracle.Array]:
    weights = {}
    for name, value in module.named_parameters():
        part, which = name.split(".")
        array = value.detach().numpy()
        if part == "contract":
            weights[f"f.outer.{which}"] = array
        elif kind == "gated":
            weights[f"f.gate.{which}"], weights[f"f.inner.{which}"] = np.split(array, 2)
        else:
            weights[f"f.inner.{which}"] = array
    return weights


def expected(
    module: FeedForward, kind: str, x: torch.Tensor, *, causal: bool = False, activation: str = "relu"
) -> np.ndarray:
    options = oracle.Options(1, 1, 0, 0, feed_forward=kind, activation=activation)
    weights = oracle_names(module, kind)
    return np.stack([oracle.feed_forward(row.numpy(), weights, "f", options, causal=causal) for row in x])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", FEED_FORWARDS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_every_kind_and_activation(kind: str, activation: str, bias: bool) -> None:
    module, x = make(kind, activation=activation, bias=bias), torch.randn(3, 5, D).double()
    np.testing.assert_allclose(module(x).detach().numpy(), expected(module, kind, x, activation=activation), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
def test_convolution(kernel_size: int, causal: bool) -> None:
    for length in (1, 2, 7):
        module, x = make("conv", kernel_size=kernel_size, causal=causal), torch.randn(2, length, D).double()
        np.testing.assert_allclose(module(x).detach().numpy(), expected(module, "conv", x, causal=causal), **EXACT)


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


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_positions_do_not_see_each_other(kind: str) -> None:
    module, x = make(kind), torch.randn(1, 5, D).double()
    changed = x.clone()
    changed[:, 2] += 1
    difference = (module(changed) - module(x)).abs().sum(-1)[0]
    assert (difference > 1e-12).tolist() == [False, False, True, False, False]
