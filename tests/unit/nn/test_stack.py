"""Norms compared with the oracle; dropout in residual connections; convolutional feed-forwards; states."""

import numpy as np
import pytest
import torch
from torch import nn

from oracle import numpy_transformer as oracle
from oracle.adapter import EPSILON, randomize
from transduce.nn.feedforward import FEED_FORWARDS, FeedForward
from transduce.nn.stack import NORMS, RESIDUALS
from transduce.nn.state import RowState

D = 12


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, bias: bool) -> None:
    norm = NORMS[name](D, eps=EPSILON[name], bias=bias).double()
    with torch.no_grad():
        for weight in norm.parameters():
            weight.normal_()
    weights = [weight.detach().numpy() for weight in norm.parameters()]
    # ordinary rows, a tiny one (where epsilon dominates), a constant one, zeros, and one with a large mean
    x = torch.randn(6, D).double()
    x[1], x[2], x[3], x[4] = x[1] * 1e-4, 3.0, 0.0, x[4] + 1000
    expected = oracle.NORMS[name](x.numpy(), weights[0], weights[1] if len(weights) == 2 else 0.0, EPSILON[name])
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_float32_keep_rows_of_any_size(name: str) -> None:
    norm = NORMS[name](D, eps=EPSILON[name], bias=True)
    x = torch.randn(1, D)
    for scale in (1e-2, 1.0, 1e4, 1e8):
        result = norm(x * scale)
        assert result.isfinite().all()
        torch.testing.assert_close(result, norm(x), rtol=0, atol=0.2 if scale < 1 else 1e-4)


def test_dropout_is_applied_to_the_sublayers_output() -> None:
    """If nearly everything is dropped, x remains: normalised (post) or unchanged (pre). Paper, section 5.4."""
    x = torch.randn(2, 3, D)
    for name, expected in (("post", nn.LayerNorm(D)(x)), ("pre", x)):
        residual = RESIDUALS[name](nn.LayerNorm(D), dropout=0.99)
        residual.train()
        y = residual(x, lambda y: torch.full_like(y, 1e-6))
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-3)
        residual.dropout.p = 0.5
        y = residual(x, torch.ones_like)
        assert not torch.equal(y, residual.eval()(x, torch.ones_like))


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


def test_rows_and_sentences_follow_a_search() -> None:
    numbers = torch.arange(3)[:, None]
    state = RowState({"hidden": numbers.repeat_interleave(2, 0) * 10}, {"memory": numbers}, n_beams=2)
    assert (state.n_rows, state.n_beams) == (6, 2)
    state.rows["hidden"] += torch.tensor([0, 1, 0, 1, 0, 1])[:, None]
    state.reorder(torch.tensor([1, 1, 3, 2, 4, 4]))
    assert state.rows["hidden"].flatten().tolist() == [1, 1, 11, 10, 20, 20]
    state.select(torch.tensor([2, 0]))
    assert state.rows["hidden"].flatten().tolist() == [20, 20, 1, 1]
    assert state.sentences["memory"].flatten().tolist() == [2, 0] and state.n_rows == 4


def test_changes_copy_what_another_state_may_share() -> None:
    hidden = torch.arange(4.0)[:, None]
    state = RowState({"hidden": hidden}, n_beams=2)
    state.reorder(torch.tensor([1, 0, 2, 2]))
    assert hidden.flatten().tolist() == [0, 1, 2, 3]
