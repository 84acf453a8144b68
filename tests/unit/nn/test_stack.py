"""Norms compared with the oracle; the place of dropout in residual connections."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from oracle import numpy_transformer as oracle
from oracle.adapter import EPSILON
from transduce.nn.residual import NORMS, RESIDUALS

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
