"""The linear layer on CPUs compared with float64, in training and evaluation, and row by row."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from oracle.adapter import fitting
from transduce.kernels.accelerate import accelerate
from transduce.kernels.products import CpuLinear, cpu_linear, rounded_rows
from transduce.models.registry import build_model
from transduce.nn.attention import attention_weights

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
        ours = cpu_linear(x, weight, b)
    theirs = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_type(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 6).to(dtype), torch.randn(5, 6).to(dtype)
    with torch.no_grad():
        ours = cpu_linear(x, weight)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.02)


def test_autocast_in_evaluation() -> None:
    layer, x = CpuLinear(6, 5), torch.randn(4, 6)
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
    layer = CpuLinear(x.shape[-1], 5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


def test_state_dict_and_gradients_are_those_of_torchs_linear() -> None:
    ours, theirs = CpuLinear(6, 5), nn.Linear(6, 5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 6)
    for layer in (ours, theirs):
        layer(x).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


@pytest.mark.parametrize(("n_in", "n_out"), [(16, 16), (128, 384), (128, 256), (256, 128), (100, 37), (512, 1000)])
def test_a_row_does_not_depend_on_how_many_rows_there_are(n_in: int, n_out: int) -> None:
    """Bit for bit, in evaluation."""
    layer, x = CpuLinear(n_in, n_out), torch.randn(130, n_in)
    with torch.no_grad():
        whole = layer(x)
        for n in (1, 2, 3, 5, 8, 17, 64, 129):
            assert torch.equal(layer(x[:n]), whole[:n])
            assert torch.equal(layer(x[130 - n :]), whole[130 - n :])
            assert torch.equal(layer(x[None, :n]), whole[None, :n])


class OnlyKernels(TorchDispatchMode):
    """Fail at products whose rows depend on their number: PyTorch's of two matrices, and of a batch of one."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in ("mm", "addmm") and not (name in ("bmm", "baddbmm") and len(args[-1]) == 1), name
        return function(*args, **(kwargs or {}))


SIZES = {"d_model": 16, "n_encoder_layers": 1, "n_decoder_layers": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"n_heads": 1, "d_ff": 24, "positions": "shaw"},
        {"n_heads": 2, "d_ff": 24, "n_kv_heads": 1, "decoder_self": "ssru", "feed_forward": "gated"},
        {"kind": "star", "n_heads": 1, "d_ff": 24},
        {"kind": "convs2s", "d_conv": 24},
        {"kind": "rnn", "d_hidden": 24, "attention": "bahdanau", "cell": "gru"},
        {"kind": "rnn", "d_hidden": 24, "attention": "general"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@torch.no_grad()
def test_all_products_of_decoding_are_replaced(options: dict[str, Any]) -> None:
    model = build_model(fitting(**SIZES, **options), n_src=20, n_tgt=20).eval()
    names, src = [*model.state_dict()], torch.randint(4, 20, (1, 5))
    expected = model.logits(model(src, src[:, :1]))
    accelerate(model, device=torch.device("cpu"), precision=torch.float32, purpose="decoding")
    assert [*model.state_dict()] == names
    with OnlyKernels():
        found = model.logits(model(src, src[:, :1]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_row_counts_are_rounded_to_few_values() -> None:
    rounded = {1: 16, 16: 16, 17: 32, 256: 256, 257: 272, 1700: 1728, 2048: 2048, 2049: 2176}
    assert {n: rounded_rows(n) for n in rounded} == rounded
    assert len({rounded_rows(n) for n in range(1024, 2049)}) <= 18
    assert all(n <= rounded_rows(n) <= 1.07 * n for n in range(256, 20_000, 7))


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_plain_product(bias: bool) -> None:
    torch.manual_seed(1)
    layer, x = CpuLinear(24, 40, bias=bias), torch.randn(5, 7, 24, requires_grad=True)
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
