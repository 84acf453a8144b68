"""The linear layer compared with float64, in training and evaluation, and row by row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from transduce.nn.linear import Linear, linear

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "gradients": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shape", [(1, 7), (2, 7), (7,), (1, 1, 7), (3, 5, 7), (2, 1, 3, 7), (0, 7), (3, 0, 7), (300, 64), (17, 1)], ids=str
)
def test_every_shape_and_mode(shape: tuple[int, ...], mode: str, bias: bool) -> None:
    x, weight = torch.randn(shape), torch.randn(9, shape[-1])
    b = torch.randn(9) if bias else None
    with MODES[mode]():
        ours = linear(x, weight, b)
    theirs = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_type(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 6).to(dtype), torch.randn(5, 6).to(dtype)
    with torch.no_grad():
        ours = linear(x, weight)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.02)


def test_autocast_in_evaluation() -> None:
    layer, x = Linear(6, 5), torch.randn(4, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def views() -> dict[str, Tensor]:
    x = torch.randn(6, 4, 8)
    return {
        "transposed": x.transpose(0, 1),
        "strided": x[:, ::2],
        "sliced": x[..., 2:],
        "expanded": x[:1].expand(3, 4, 8),
    }


@pytest.mark.parametrize("name", ["transposed", "strided", "sliced", "expanded"])
def test_views(name: str) -> None:
    x = views()[name]
    layer = Linear(x.shape[-1], 5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


def test_state_dict_and_gradients_are_those_of_torchs_linear() -> None:
    ours, theirs = Linear(6, 5), nn.Linear(6, 5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 6)
    for layer in (ours, theirs):
        layer(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


@pytest.mark.parametrize(("n_in", "n_out"), [(16, 16), (128, 384), (128, 256), (256, 128), (100, 37), (512, 1000)])
def test_a_row_does_not_depend_on_how_many_rows_there_are(n_in: int, n_out: int) -> None:
    """Bit for bit, in evaluation."""
    layer, x = Linear(n_in, n_out), torch.randn(130, n_in)
    with torch.no_grad():
        whole = layer(x)
        for n in (1, 2, 3, 5, 8, 17, 64, 129):
            assert torch.equal(layer(x[:n]), whole[:n])
            assert torch.equal(layer(x[130 - n :]), whole[130 - n :])
            assert torch.equal(layer(x[None, :n]), whole[None, :n])
