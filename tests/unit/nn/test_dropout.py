"""Dropout: the fraction that is dropped, the mean, the generator, the gradient."""

from __future__ import annotations

import math

import pytest
import torch

from transduce.nn.dropout import Dropout, keep_factors

N = 400_000
PROBABILITIES = [0.1, 0.3, 0.5, 0.9]


@pytest.mark.parametrize("p", PROBABILITIES)
def test_factors_are_zero_with_probability_p_and_have_mean_one(p: float) -> None:
    factors = keep_factors(torch.empty(N), p).double()
    kept = factors != 0
    (value,) = set(factors[kept].tolist())
    assert value == pytest.approx(1 / (1 - p), rel=2**-8)  # rounded to bfloat16
    deviation = math.sqrt(p * (1 - p) / N)
    assert abs(1 - kept.double().mean().item() - p) < 5 * deviation + 0.004 * (1 - p)
    exact_share = 1 / value  # the probability is adapted to the rounded factor, so that the mean is exact
    assert abs(kept.double().mean().item() - exact_share) < 5 * deviation + 2**-15
    assert abs(factors.mean().item() - 1) < 5 * deviation * value + 2**-15 * value


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_factors_are_independent_of_their_neighbours(p: float) -> None:
    """Four factors come from one random number: there must be no correlation at any lag up to 8."""
    centred = (keep_factors(torch.empty(N), p) != 0).double()
    centred -= centred.mean()
    for lag in range(1, 9):
        correlation = (centred[lag:] * centred[:-lag]).mean() / centred.square().mean()
        assert abs(correlation.item()) < 5 / math.sqrt(N)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_all_four_factors_of_a_random_number_drop_equally_often(p: float) -> None:
    kept = (keep_factors(torch.empty(N), p) != 0).view(-1, 4).double().mean(0)
    assert (kept - kept.mean()).abs().max() < 5 * math.sqrt(p * (1 - p) / (N / 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_result_depends_on_the_generator_only(dtype: torch.dtype) -> None:
    dropout, x = Dropout(0.4), torch.randn(50, 60, dtype=dtype)
    state = torch.get_rng_state()
    first, second = dropout(x), dropout(x)
    torch.set_rng_state(state)
    assert torch.equal(dropout(x), first) and not torch.equal(second, first)
    assert first.dtype == dtype


def test_evaluation_and_zero_probability_change_nothing_and_draw_no_numbers() -> None:
    x, state = torch.randn(5, 6), torch.get_rng_state()
    for dropout in (Dropout(0.4).eval(), Dropout(0.0)):
        assert dropout(x) is x
        assert torch.equal(dropout.add(x, x), x + x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_gradient_has_the_same_factors() -> None:
    x = torch.randn(40, 50, requires_grad=True)
    y = Dropout(0.3)(x)
    y.sum().backward()
    torch.testing.assert_close(y, x * x.grad)
    assert 0.2 < (x.grad == 0).float().mean() < 0.4


def test_add_applies_dropout_to_the_update_only() -> None:
    dropout, state = Dropout(0.3), torch.get_rng_state()
    x, update = torch.randn(20, 30, requires_grad=True), torch.randn(20, 30, requires_grad=True)
    state = torch.get_rng_state()
    together = dropout.add(x, update)
    torch.set_rng_state(state)
    torch.testing.assert_close(together, x + dropout(update))
    together.sum().backward()
    assert (x.grad == 1).all()
    torch.testing.assert_close((together - x).detach(), (update * update.grad).detach())


def test_add_keeps_the_residual_streams_type() -> None:
    x, update = torch.randn(4, 5), torch.randn(4, 5, dtype=torch.bfloat16)
    assert Dropout(0.3).add(x, update).dtype == torch.float32
    assert Dropout(0.3).eval().add(x, update).dtype == torch.float32
