"""The Triton kernels compared with float64: on a GPU, or with TRITON_INTERPRET=1 and the package triton on a CPU."""

import math
import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.architectures import model_settings
from transduce.models.registry import build_model

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    GPU, HALF = torch.device("cpu"), torch.float32  # NumPy, which computes here, has no bfloat16
else:
    GPU, HALF, pytestmark = torch.device("cuda"), torch.bfloat16, pytest.mark.gpu

ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative


def assert_near(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < ERROR[found.dtype]


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, kept: Tensor | None = None
) -> Tensor:
    key, value = (x.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool, device=GPU).tril(), -math.inf)
    weights = scores.softmax(-1)
    return (weights if kept is None else weights * kept) @ value


def heads(batch: int, length: int, n: int, width: int) -> Tensor:
    """A part of a projection, as attention gets it."""
    whole = torch.randn(batch, length, 2 * n * width, device=GPU, dtype=HALF)
    return whole[..., : n * width].unflatten(-1, (n, width)).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(
    ("batch", "n_heads", "n_kv_heads", "n_queries", "n_keys", "width", "values", "bias", "causal"),
    [
        (3, 4, 4, 5, 7, 8, 8, "padding", False),
        (2, 4, 2, 17, 17, 16, 8, None, True),
        (2, 2, 1, 1, 20, 8, 8, "heads", False),
        (1, 2, 2, 33, 3, 4, 12, None, False),
        (2, 2, 2, 64, 64, 64, 64, None, True),
        (2, 2, 2, 61, 40, 64, 64, "padding", False),
        (2, 2, 1, 30, 30, 128, 128, "padding", False),
    ],
)
def test_attention_and_its_gradients(
    batch: int,
    n_heads: int,
    n_kv_heads: int,
    n_queries: int,
    n_keys: int,
    width: int,
    values: int,
    bias: str | None,
    causal: bool,
) -> None:
    from transduce.kernels.triton_layers import attend

    query = heads(batch, n_queries, n_heads, width)
    key, value = heads(batch, n_keys, n_kv_heads, width), heads(batch, n_keys, n_kv_heads, values)
    added = None
    if bias == "padding":
        added = torch.zeros(batch, 1, 1, n_keys, device=GPU)
        added[0, ..., 2:], added[1:2] = -1e30, -1e30  # the second sentence has padding only
    elif bias == "heads":
        added = torch.randn(1, n_heads, n_queries, n_keys, device=GPU)
    found = attend(query, key, value, bias=added, causal=causal)
    expected = by_definition(query, key, value, added, causal=causal)
    assert_near(found, expected)
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, (query, key, value), grad)
    for one, other in zip(ours, torch.autograd.grad(expected, (query, key, value), grad.double()), strict=True):
        assert_near(one, other)


def test_dropout_of_weights_is_the_same_in_the_gradient_and_independent() -> None:
    from transduce.kernels.triton_layers import _HeadsAttention, attend

    n_heads, n, batch = 4, 32, 10
    query, key = heads(batch, n, n_heads, 16), heads(batch, n, n_heads, 16)
    value = (
        torch.eye(n, device=GPU, dtype=HALF).expand(batch, n_heads, n, n).contiguous().requires_grad_()
    )  # shows the weights
    seed = torch.tensor([123456789], device=GPU)
    dropped = _HeadsAttention.apply(query, key, value, None, seed, False, 0.3)
    kept = (dropped / attend(query, key, value)).detach().float()
    is_kept = (kept > 0.5).float()
    torch.testing.assert_close(kept, is_kept / 0.7, rtol=0, atol=3 * ERROR[HALF])
    deviation = math.sqrt(0.21 / kept.numel())
    assert abs(is_kept.mean().item() - 0.7) < 4 * deviation
    centred = is_kept - 0.7
    for axis in range(4):  # neighbours on each axis, and sentences
        one, next_one = centred.narrow(axis, 0, kept.shape[axis] - 1), centred.narrow(axis, 1, kept.shape[axis] - 1)
        assert abs((one * next_one).mean().item()) < 4 * 0.21 / math.sqrt(one.numel())
    grad = torch.randn_like(dropped)
    expected = by_definition(query, key, value, None, causal=False, kept=is_kept.double() / 0.7)
    of_inputs = torch.autograd.grad(dropped, (query, key, value), grad)
    for one, other in zip(of_inputs, torch.autograd.grad(expected, (query, key, value), grad.double()), strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("kind", ["layer", "without shift", "rms", "none"])
@pytest.mark.parametrize(("shape", "p"), product([(2, 5, 12), (1, 1, 8), (70, 3)], [0.0, 0.4]))
def test_residual_connections_and_norms(
    kind: str, shape: tuple[int, ...], p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transduce.kernels import triton_layers
    from transduce.kernels.triton_layers import add_and_norm, normed

    monkeypatch.setattr(triton_layers, "_PROGRAMS", 32)
    width = shape[-1]
    norm = {
        "layer": lambda: nn.LayerNorm(width),
        "without shift": lambda: nn.LayerNorm(width, bias=False),
        "rms": lambda: nn.RMSNorm(width, eps=1e-6),
        "none": lambda: None,
    }[kind]()
    parameters = [] if norm is None else [nn.init.normal_(one) for one in norm.to(GPU).parameters()]
    x, update = (torch.randn(shape, device=GPU, requires_grad=True) for _ in range(2))

    def reference(total: Tensor) -> Tensor:
        if norm is None:
            return total
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(total, (width,), norm.weight.double(), norm.eps)
        shift = None if norm.bias is None else norm.bias.double()
        return F.layer_norm(total, (width,), norm.weight.double(), shift, norm.eps)

    torch.manual_seed(5)
    kept = add_and_norm(torch.zeros_like(x), torch.ones_like(x), None, p).detach()
    torch.manual_seed(5)
    found, inputs = add_and_norm(x, update, norm, p), [x, update, *parameters]
    cases = [(found, reference(x.double() + update.double() * kept), inputs)]
    if norm is not None:
        cases.append((normed(x, norm), reference(x.double()), [x, *parameters]))
    for ours, expected, of in cases:
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=2e-5)
        grad = torch.randn_like(ours)
        theirs = torch.autograd.grad(expected, of, grad.double())
        for one, other in zip(torch.autograd.grad(ours, of, grad), theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_a_stream_in_bfloat16() -> None:
    from transduce.kernels.triton_layers import add_and_norm

    norm = nn.LayerNorm(24).to(GPU)
    x = torch.randn(7, 24, device=GPU, requires_grad=True)  # of an embedding
    updates = [torch.randn(7, 24, device=GPU, dtype=HALF, requires_grad=True) for _ in range(2)]
    found = add_and_norm(add_and_norm(x, updates[0], norm, 0.0), updates[1], norm, 0.0)
    assert found.dtype == HALF
    expected = norm.double()(norm(x.double() + updates[0].double()) + updates[1].double())
    assert_near(found, expected)
    grad = torch.randn_like(found)
    theirs = torch.autograd.grad(expected, [x, *updates], grad.double())
    ours = torch.autograd.grad(found, [x, *updates], grad)
    assert [one.dtype for one in ours] == [torch.float32, HALF, HALF]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.double() - other).norm() / other.norm() < 1e-2


@pytest.mark.parametrize("dtype", sorted({torch.float32, HALF}, key=str), ids=str)
@pytest.mark.parametrize("n_rows", [1, 40, 3000])
def test_a_linear_layer_and_sums_of_columns(dtype: torch.dtype, n_rows: int) -> None:
    from transduce.kernels.triton_linear import GpuLinear, column_sums

    x = torch.randn(n_rows, 130, device=GPU).to(dtype)
    torch.testing.assert_close(column_sums(x).double(), x.double().sum(0), rtol=0, atol=1e-3)
    x, weight, bias = (torch.randn(s, device=GPU, requires_grad=True) for s in ((3, n_rows, 8), (12, 8), (12,)))
    found, expected = GpuLinear.apply(x, weight, bias, dtype), F.linear(x.double(), weight.double(), bias.double())
    assert_near(found, expected)
    grad = torch.randn_like(found)
    theirs = torch.autograd.grad(expected, (x, weight, bias), grad.double())
    for one, other in zip(torch.autograd.grad(found, (x, weight, bias), grad), theirs, strict=True):
        assert one.dtype == torch.float32
        assert (one.double() - other).norm() / other.norm() < ERROR[dtype]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_loss_of_all_rows_in_several_chunks(biased: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from transduce.kernels import triton_linear

    monkeypatch.setattr(triton_linear, "_CHUNK", 176)  # 16 rows
    hidden, weight = (torch.randn(40, 8, device=GPU) * scale).requires_grad_(), torch.randn(11, 8, device=GPU)
    bias = torch.randn(11, device=GPU, requires_grad=True) if biased else None
    inputs = [hidden, weight.requires_grad_(), *([] if bias is None else [bias])]
    gold = torch.randint(0, 11, (40, 1), device=GPU)[:, 0]
    loss, nll = triton_linear.GpuLinearCrossEntropy.apply(hidden, weight, bias, gold, 0, 0.1, torch.float32, True)
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    expected = F.cross_entropy(logits, gold, ignore_index=0, label_smoothing=0.1, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert nll.item() == pytest.approx(F.cross_entropy(logits, gold, ignore_index=0, reduction="sum").item(), rel=1e-5)
    theirs = torch.autograd.grad(expected, inputs)
    for one, other in zip(torch.autograd.grad(loss, inputs), theirs, strict=True):
        assert (one.double() - other).norm() / other.double().norm() < 1e-5


@pytest.mark.parametrize("options", [{}, {"residual": "pre", "norm": "rms", "bias": False}, {"n_kv_heads": 1}], ids=str)
def test_a_model_with_modules_for_gpus(options: dict[str, Any]) -> None:
    """`accelerate` puts them in on a GPU; their loss and gradients are those of the modules that they replace."""
    from transduce.kernels.accelerate import _replace
    from transduce.kernels.gpu import FOR_GPUS

    sizes = {"d_model": 32, "d_ff": 48, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
    torch.manual_seed(2)
    model: Any = build_model(model_settings(**{**sizes, **options}), n_src=40, n_tgt=40).to(GPU)
    src, tgt = torch.randint(4, 40, (3, 9), device=GPU), torch.randint(4, 40, (3, 11), device=GPU)
    src[1, 5:] = tgt[2, 7:] = 0

    def gradients() -> list[Tensor]:
        model.zero_grad()
        loss, nll, n = model.output_embedding.loss(model(src, tgt), tgt, bias=model.output_bias)
        loss.backward()
        return [loss.detach(), nll, n, *(p.grad.clone() for p in model.parameters())]

    expected = gradients()
    _replace(model, FOR_GPUS)
    assert sum(type(module) in FOR_GPUS.values() for module in model.modules()) > 20
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
