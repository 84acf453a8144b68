"""Products in bfloat16 on a CPU: row counts are rounded up, so that oneDNN's compiled kernels are reused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from transduce.nn.attention import attention_weights
from transduce.nn.linear import Linear, rounded_rows


def test_row_counts_are_rounded_to_few_values() -> None:
    rounded = {1: 16, 16: 16, 17: 32, 256: 256, 257: 272, 1700: 1728, 2048: 2048, 2049: 2176}
    assert {n: rounded_rows(n) for n in rounded} == rounded
    assert len({rounded_rows(n) for n in range(1024, 2049)}) <= 18
    assert all(n <= rounded_rows(n) <= 1.07 * n for n in range(256, 20_000, 7))


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_plain_product(bias: bool) -> None:
    torch.manual_seed(1)
    layer, x = Linear(24, 40, bias=bias), torch.randn(5, 7, 24, requires_grad=True)
    upstream = torch.randn(5, 7, 40)

    def run(product: object) -> list[torch.Tensor]:
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = product(x)  # type: ignore[operator]
        assert y.dtype == torch.bfloat16 and y.shape == (5, 7, 40)
        (y.float() * upstream).sum().backward()
        assert x.grad is not None
        return [y.float(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    expected = run(lambda z: F.linear(z, layer.weight, layer.bias))
    for found, wanted in zip(run(layer), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("n_keys", [1, 5, 15, 16, 17])
def test_softmax_of_short_rows_and_its_gradient(n_keys: int) -> None:
    torch.manual_seed(2)
    query, key = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 3, n_keys, 8)
    bias = torch.zeros(2, 1, 4, n_keys)
    bias[1] = -1e30  # everything masked: equal weights
    weights = attention_weights(query, key, bias)
    expected = (query.double() @ key.double().transpose(-1, -2) / 8**0.5).softmax(-1)
    torch.testing.assert_close(weights[0].double(), expected[0])
    torch.testing.assert_close(weights[1], torch.full_like(weights[1], 1 / n_keys))
    upstream = torch.randn_like(weights)
    (found,) = torch.autograd.grad((weights * upstream)[0].sum(), query, retain_graph=True)
    (wanted,) = torch.autograd.grad((expected * upstream)[0].sum(), query)
    torch.testing.assert_close(found, wanted)
