"""The native kernels of training against float64, and whole models against PyTorch's kernels."""

from __future__ import annotations

import copy
import ctypes
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import toys
from native_engines import needs_training_kernels
from transduce.config.settings import Settings
from transduce.data.batch import collate
from transduce.errors import SettingsError
from transduce.models.registry import build_model
from transduce.native import kernels as native
from transduce.native import operators, optimizer
from transduce.native.attention import attend, projected_heads
from transduce.native.library import loaded_library
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import ACTIVATIONS
from transduce.nn.masks import HIDDEN
from transduce.nn.residual import RESIDUALS
from transduce.training.loss import predict_tokens
from transduce.training.step import PRECISIONS, autocast

pytestmark = needs_training_kernels


@pytest.fixture(params=[name for name, dtype in PRECISIONS.items() if native.kernels_in_use(dtype) != "torch"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The type of products that are computed inside the test, and of what they read and write."""
    with autocast(torch.device("cpu"), request.param):
        yield PRECISIONS[request.param]


def rounding(dtype: torch.dtype) -> float:
    """Relative error that is allowed in results of this type."""
    return 2**-8 if dtype == torch.bfloat16 else 1e-6


def heads(batch: int, n: int, length: int, width: int, *, seed: int, dtype: torch.dtype) -> Tensor:
    """[B, H, T, K] in the order of a projection, [B, T, H, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, n, width, generator=generator).to(dtype).transpose(1, 2)


def bias_of(kind: str, batch: int, n_heads: int, n_queries: int, n_keys: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "causal":
        return torch.full((1, 1, n_queries, n_keys), HIDDEN).triu(1)
    if kind == "scores":
        return torch.randn(1, n_heads, n_queries, n_keys, generator=torch.Generator().manual_seed(9))
    bias = torch.zeros(batch, 1, 1, n_keys)
    bias[0, :, :, (n_keys + 1) // 2 :] = HIDDEN
    bias[-1] = bias[-1] if kind == "padding" else HIDDEN
    return bias


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["none", "causal", "scores", "padding", "all masked"])
@pytest.mark.parametrize(
    ("batch", "n_heads", "n_kv_heads", "n_queries", "n_keys", "width", "value_width"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (3, 4, 4, 14, 14, 32, 32),
        (2, 6, 3, 17, 33, 20, 24),
        (2, 4, 1, 40, 25, 64, 64),
        (1, 2, 2, 150, 200, 16, 16),
    ],
)
def test_attention_and_its_gradients(
    kind: str,
    p: float,
    batch: int,
    n_heads: int,
    n_kv_heads: int,
    n_queries: int,
    n_keys: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
) -> None:
    generator = torch.get_rng_state()
    kept = kept_weights(p, batch, n_heads, n_queries, n_keys, dtype=dtype).double()
    query = heads(batch, n_heads, n_queries, width, seed=1, dtype=dtype)
    widths = enumerate((width, value_width))
    key, value = (heads(batch, n_kv_heads, n_keys, w, seed=2 + i, dtype=dtype) for i, w in widths)
    bias = bias_of(kind, batch, n_heads, n_queries, n_keys)
    grad = heads(batch, n_heads, n_queries, value_width, seed=5, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    k, v = (x.repeat_interleave(n_heads // n_kv_heads, 1) for x in exact[1:])
    scores = exact[0] @ k.transpose(2, 3) / math.sqrt(width)
    if kind == "all masked":
        assert bias is not None
        hidden = bias == HIDDEN
        rows = hidden.all(-1, keepdim=True)
        even = scores - scores.detach()  # rounded to nothing beside the bias, but for the gradient
        scores = torch.where(rows, even, scores.masked_fill(hidden & ~rows, -math.inf))
    elif bias is not None:
        scores = scores + bias
    expected = (scores.softmax(-1) * kept / (1 - p)) @ v
    expected.backward(grad.double())
    found = []
    for n_threads in (1, 3):
        given = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        torch.set_rng_state(generator)
        output = attend(*given, bias=bias, p=p)
        output.backward(grad)
        torch.set_num_threads(before)
        found.append([output, *(x.grad for x in given)])
    for ours, again, exactly in zip(*found, [expected, *(x.grad for x in exact)], strict=True):
        assert torch.equal(ours, again)
        error, size = (ours.double() - exactly).norm(), exactly.norm()
        assert error <= rounding(dtype) * size + 1e-6


def kept_weights(p: float, batch: int, n_heads: int, n_queries: int, n_keys: int, *, dtype: torch.dtype) -> Tensor:
    """[B, H, T, S]: False where the next call drops a weight; read from equal weights with unit vectors as values."""
    query, key = (torch.zeros(batch, n_heads, n, 1, dtype=dtype) for n in (n_queries, n_keys))
    return attend(query, key, torch.eye(n_keys, dtype=dtype).expand(batch, n_heads, -1, -1), p=p) != 0


@pytest.mark.parametrize("n_kv_heads", [1, 3])
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 200, 1024])
def test_causal_attention_is_that_under_a_causal_bias(length: int, n_kv_heads: int, dtype: torch.dtype) -> None:
    sizes = (3, n_kv_heads, n_kv_heads)
    generator, grad = torch.get_rng_state(), heads(2, 3, length, 8, seed=7, dtype=dtype)
    found = []
    for options in ({"causal": True}, {"bias": bias_of("causal", 2, 3, length, length)}):
        given = [heads(2, n, length, 8, seed=i, dtype=dtype).requires_grad_() for i, n in enumerate(sizes)]
        torch.set_rng_state(generator)
        output = attend(*given, p=0.2, **options)
        output.backward(grad)
        found.append([output, *(x.grad for x in given)])
    for ours, same in zip(*found, strict=True):
        assert (ours.double() - same.double()).norm() <= rounding(dtype) / 2 * same.double().norm()


def test_weights_of_attention_are_dropped_independently(dtype: torch.dtype) -> None:
    p, shape = 0.3, (20, 4, 70, 50)
    torch.manual_seed(5)
    first, second = (p - kept_weights(p, *shape, dtype=dtype).logical_not().double() for _ in range(2))
    spread = p * (1 - p)
    n = first.numel()
    assert abs(first.mean()) < 4 * (spread / n) ** 0.5
    pairs = [(first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1])]
    pairs += [(first[:, :, 1:], first[:, :, :-1]), (first[..., 1:], first[..., :-1])]
    for one, other in pairs:
        assert abs((one * other).mean()) < 4 * spread / n**0.5


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (5, 40, 70),
        (97, 33, 65),
        (300, 128, 384),
        (193, 96, 96),
        (700, 520, 40),
        (513, 200, 70),
        (1025, 40, 17),
        (2100, 64, 130),
    ],
)
def test_linear_layers(shape: tuple[int, int, int], has_bias: bool, is_rounded: bool, dtype: torch.dtype) -> None:
    rows, n_in, n_out = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, n_in, generator=generator).to(dtype if is_rounded else torch.float32)
    weight = torch.randn(n_out, n_in, generator=generator) * n_in**-0.5
    bias = torch.randn(n_out, generator=generator) if has_bias else None
    grad = torch.randn(rows, n_out, generator=generator).to(dtype)
    found = []
    for n_threads in (1, 3):
        given = [one.clone().requires_grad_() for one in (x, weight, bias) if one is not None]
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        output = operators.linear(*given[:2], given[2] if has_bias else None)
        output.backward(grad)
        torch.set_num_threads(before)
        found.append([output, *(one.grad for one in given)])
    exact = [one.double().requires_grad_() for one in (x, weight, bias) if one is not None]
    expected = nn.functional.linear(*exact)
    expected.backward(grad.double())
    for ours, again, exactly in zip(*found, [expected, *(one.grad for one in exact)], strict=True):
        assert torch.equal(ours, again)
        assert (ours.double() - exactly).norm() <= 2 * rounding(dtype) * exactly.norm()


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_what_is_not_a_number_stays_so_in_activations(activation: str, dtype: torch.dtype) -> None:
    """Otherwise an update of a damaged model would not be skipped."""
    layer = nn.Linear(32, 65)
    layer.weight.data[3, 5] = torch.nan
    output = operators.activated_linear(torch.randn(9, 32), layer, activation, 0.0)
    assert output[:, 3].isnan().all() and output.isnan().sum() == 9


def test_what_is_not_a_number_stays_so_in_attention(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 2, 20, 16, dtype=dtype) for _ in range(3))
    query[1, 0, 7, 3] = torch.nan
    output = attend(query, key, value)
    assert output[1, 0, 7].isnan().all() and output.isnan().sum() == 16


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("shape", [(1, 1, 1), (97, 33, 65), (300, 128, 512)])
def test_activated_linear_layers(
    shape: tuple[int, int, int], activation: str, is_rounded: bool, p: float, dtype: torch.dtype
) -> None:
    rows, n_in, n_out = shape
    torch.manual_seed(1)
    layer = nn.Linear(n_in, n_out)
    layer.weight.data = layer.weight.data.bfloat16().float()  # rounded later, signs would change before ReLU
    x, grad = (2 * torch.randn(rows, n_in)).bfloat16(), torch.randn(rows, n_out).to(dtype)
    x = x.to(dtype if is_rounded else torch.float32)
    generator = torch.get_rng_state()
    found = []
    for n_threads in (1, 3):
        torch.set_rng_state(generator)
        layer.zero_grad()
        given, before = x.clone().requires_grad_(), torch.get_num_threads()
        torch.set_num_threads(n_threads)
        output = operators.activated_linear(given, layer, activation, p)
        output.backward(grad)
        torch.set_num_threads(before)
        found.append([output, given.grad, layer.weight.grad, layer.bias.grad])
    exact, exact_layer = x.double().requires_grad_(), copy.deepcopy(layer).double()
    activated = ACTIVATIONS[activation](exact_layer(exact))
    torch.set_rng_state(generator)  # what is dropped is a function of the seed and the place
    factors = operators.add_and_norm(torch.zeros(rows, n_out), torch.ones(rows, n_out), None, p).double()
    expected = activated * factors
    exact_layer.zero_grad()
    expected.backward(grad.double())
    exactly = [expected, exact.grad, exact_layer.weight.grad, exact_layer.bias.grad]
    for ours, again, right in zip(*found, exactly, strict=True):
        assert torch.equal(ours, again)
        assert (ours.double() - right).norm() <= 2 * rounding(dtype) * right.norm() + 1e-6


def test_gradients_of_packed_projections_are_written_in_their_places(dtype: torch.dtype) -> None:
    """Those of queries, keys and values of one projection need no copy; a query that is used twice does."""
    torch.manual_seed(1)
    for twice in (False, True):
        x, layer = torch.randn(3, 5, 8).to(dtype).requires_grad_(), nn.Linear(8, 3 * 8)
        query, key, value = projected_heads(x, layer, (2, 2, 2), (4, 4, 4))
        output, grad = attend(query, key, value), torch.randn(3, 2, 5, 4).to(dtype)
        ((output * grad).sum() + (query.sum() if twice else 0)).backward()
        exact, exactly = x.detach().double().requires_grad_(), copy.deepcopy(layer).double()
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in exactly(exact).split(8, dim=-1))
        found = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        ((found * grad).sum() + (q.sum() if twice else 0)).backward()
        for own, right in ((x, exact), (layer.weight, exactly.weight), (layer.bias, exactly.bias)):
            assert own.grad is not None and right.grad is not None
            assert (own.grad.double() - right.grad).norm() <= 2 * rounding(dtype) * right.grad.norm()


@pytest.mark.parametrize(
    "shape", [(1, 1), (17, 40), (40, 17), (96, 200), (200, 96), (64, 64), (130, 130), (1, 70)], ids=str
)
def test_a_step_of_muon(shape: tuple[int, int]) -> None:
    """Momentum, five Newton-Schulz steps of the smaller side and the weights, with any number of threads."""
    torch.manual_seed(2)
    given, (a, b, c) = torch.randn(3, *shape), (3.4445, -4.7750, 2.0315)
    found = []
    for n_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        places = [weight, _, mean] = [x.clone() for x in given]
        matrix = optimizer.Matrix(*(x.data_ptr() for x in places), *shape, 2.0, 0.5, 0.9)
        optimizer.muon([matrix], scale=0.25, coefficients=(a, b, c), steps=5)
        torch.set_num_threads(before)
        found.append(torch.stack([weight, mean]))
    assert torch.equal(*found)
    weight, grad, mean = given.double()
    mean = 0.9 * mean + 0.1 * 0.25 * grad
    torch.testing.assert_close(found[0][1].double(), mean, rtol=1e-5, atol=1e-6)
    update = 0.1 * 0.25 * grad + 0.9 * mean
    x = update / update.norm()
    x = x.mT if shape[0] > shape[1] else x
    rounded = x.bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
        gram = rounded @ rounded.mT
        rounded = a * rounded + (b * gram + c * gram @ gram) @ rounded
    made = (0.5 * weight - found[0][0].double()) / 2
    made = made.mT if shape[0] > shape[1] else made
    error, of_bfloat16 = ((y.double() - x).norm() for y in (made, rounded))
    assert error <= of_bfloat16 + 2**-5 * x.norm()


NORMS: dict[str, Callable[[int], nn.Module | None]] = {
    "none": lambda width: None,
    "layer": nn.LayerNorm,
    "layer, no bias": partial(nn.LayerNorm, bias=False),
    "rms": partial(nn.RMSNorm, eps=1e-5),
}


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 40), (300, 128), (77, 17)])
def test_residual_dropout_and_norm(shape: tuple[int, ...], name: str, p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    norm = NORMS[name](shape[-1])
    for parameter in norm.parameters() if norm is not None else ():
        nn.init.normal_(parameter)
    x, grad = torch.randn(shape), torch.randn(shape)
    update = torch.randn(shape).to(dtype)
    generator = torch.get_rng_state()
    found = []
    for n_threads in (1, 3):
        torch.set_rng_state(generator)
        given = [x.clone().requires_grad_(), update.clone().requires_grad_()]
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        output = operators.add_and_norm(*given, norm, p)
        output.backward(grad)
        torch.set_num_threads(before)
        own = [] if norm is None else [parameter.grad for parameter in norm.parameters()]
        found.append([output, *(one.grad for one in given), *own])
        if norm is not None:
            norm.zero_grad()
    torch.set_rng_state(generator)
    factors = operators.add_and_norm(torch.zeros(shape), torch.ones(shape).to(dtype), None, p).double()
    assert set(factors.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))}
    exact = [x.double().requires_grad_(), update.double().requires_grad_()]
    exact_norm = None if norm is None else copy.deepcopy(norm).double()
    total = exact[0] + exact[1] * factors
    expected = total if exact_norm is None else exact_norm(total)
    expected.backward(grad.double())
    own = [] if exact_norm is None else [parameter.grad for parameter in exact_norm.parameters()]
    for ours, again, exactly in zip(*found, [expected, *(one.grad for one in exact), *own], strict=True):
        assert torch.equal(ours, again)
        assert (ours.double() - exactly).norm() <= rounding(ours.dtype) * exactly.norm() + 1e-5


@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (70, 9, 40), (2, 70_000)])
def test_dropout(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Of float32 numbers, whatever the products are of; the gradient is dropped in the same places."""
    torch.manual_seed(4)
    x, grad, dropout = torch.randn(shape, requires_grad=True), torch.randn(shape), Dropout(0.3)
    state = torch.get_rng_state()
    output = dropout(x)
    output.backward(grad)
    torch.set_rng_state(state)
    factors = dropout(torch.ones(shape))
    if factors.numel() > 1000:
        kept = float((factors != 0).double().mean())
        assert (
            abs(kept - 0.7) < 5 * (0.21 / factors.numel()) ** 0.5 + 0.004
        )  # without kernels, p is met to within 0.4 %
    assert output.dtype == torch.float32 and torch.equal(output, x * factors)
    assert x.grad is not None and torch.equal(x.grad, grad * factors)


@pytest.mark.parametrize("shape", [(1, 3), (7, 9, 40)])
@pytest.mark.parametrize("of_norm", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "none"])
def test_a_norm_beside_what_it_reads(name: str, of_norm: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As before a sub-layer with a residual connection. Without a gradient of the norm, x has that of the other."""
    torch.manual_seed(3)
    norm, grads = NORMS[name](shape[-1]), torch.randn(2, *shape)
    assert norm is not None
    x = torch.randn(shape)
    given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    kept, output = operators.normed_beside(given, norm)
    assert torch.equal(kept, x) and torch.equal(output, operators.normed(given, norm))
    exactly = copy.deepcopy(norm).double()
    loss = (kept * grads[0]).sum() + (of_norm * (output * grads[1]).sum() if of_norm else 0.0)
    loss.backward()
    ((exact * grads[0].double()).sum() + of_norm * (exactly(exact) * grads[1].double()).sum()).backward()
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


class Doubled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize(
    "norm",
    [nn.RMSNorm(32), nn.LayerNorm(32, elementwise_affine=False), nn.LayerNorm((3, 32)), Doubled(32), nn.Identity()],
    ids=repr,
)
def test_other_norms_are_pytorchs(norm: nn.Module, residual: str) -> None:
    layer, x = RESIDUALS[residual](norm), torch.randn(2, 3, 32)
    found = []
    for kernels in ("auto", "torch"):
        native.choose_kernels(kernels)
        found.append(layer(x, torch.sin))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "none"])
def test_norm_without_an_update(name: str) -> None:
    torch.manual_seed(3)
    norm = NORMS[name](40)
    assert norm is not None
    nn.init.normal_(norm.weight)
    exactly = copy.deepcopy(norm).double()
    x, grad = torch.randn(7, 9, 40), torch.randn(7, 9, 40)
    given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    output, expected = operators.normed(given, norm), exactly(exact)
    output.backward(grad)
    expected.backward(grad.double())
    own, right = ([output, given.grad, *(p.grad for p in norm.parameters())], [expected, exact.grad])
    for one, other in zip(own, [*right, *(p.grad for p in exactly.parameters())], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_what_is_dropped_is_independent() -> None:
    """Of the rate, of the neighbours in rows and columns, and of another call."""
    shape, p = (3000, 500), 0.3
    ones, zeros = torch.ones(shape), torch.zeros(shape)
    torch.manual_seed(5)
    first, second = ((operators.add_and_norm(zeros, ones, None, p) == 0).double() - p for _ in range(2))
    n = first.numel()
    deviation = (p * (1 - p)) ** 0.5
    assert abs(first.mean()) < 4 * deviation / n**0.5
    pairs = [(first, second), (first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[:, 16:], first[:, :-16])]
    for one, other in pairs:
        assert abs((one * other).mean()) < 4 * deviation**2 / n**0.5
    assert first.mean(0).std() == pytest.approx(deviation / shape[0] ** 0.5, rel=0.2)
    assert first.mean(1).std() == pytest.approx(deviation / shape[1] ** 0.5, rel=0.2)


def test_in_float32_the_kernels_compute_where_gradients_are_enabled() -> None:
    """Validation and translation do not use them: there a sentence's result must not depend on its batch."""
    assert native.dtype_in_use() == torch.float32
    with torch.no_grad():
        assert native.dtype_in_use() is None
    native.choose_kernels("torch")
    assert native.dtype_in_use() is None


MODELS: dict[str, dict[str, object]] = {
    "paper": {},
    "pre-norm, gated, grouped heads": {
        **{"residual": "pre", "norm": "rms", "feed_forward": "gated", "n_kv_heads": 2, "positions": "rotary"},
    },
    "ALiBi, output bias": {"positions": "alibi", "output_bias": True},
    "T5": {"positions": "t5"},
    "Shaw": {"positions": "shaw"},
    "sparse": {"encoder_pattern": "local", "decoder_pattern": "local", "window": 4},
    "SSRU": {"decoder_self": "ssru"},
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_are_as_near_to_float64_as_with_pytorch(name: str, dtype: torch.dtype) -> None:
    sizes = {"d_model": 32, "d_ff": 48, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "dropout": 0.0}
    settings = Settings.from_mapping({"model": sizes | MODELS[name]})
    batch = collate(toys.examples(12))

    def gradient(model: nn.Module, kernels: native.Kernels) -> Tensor:
        native.choose_kernels(kernels)
        model.zero_grad()
        loss, _, _ = predict_tokens(model, batch, smoothing=0.1)
        loss.backward()
        return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])

    ratios = []  # the error of one model is a matter of chance: it differs by a factor of two
    for seed in range(12):
        torch.manual_seed(seed)
        model = build_model(settings.model, n_src=40, n_tgt=40)
        ours, theirs = (gradient(model, kernels) for kernels in ("auto", "torch"))
        assert not torch.equal(ours, theirs)
        model.double()
        with torch.autocast("cpu", enabled=False):
            exact = gradient(model, "torch")
        ratios.append(float((ours - exact).norm() / (theirs - exact).norm()))
    assert statistics.geometric_mean(ratios) <= 1.2 and max(ratios) <= 4


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (5, 13, 70, 40), (9, 31, 33, 128)])
def test_embeddings_with_positions_and_dropout(shape: tuple[int, int, int, int], has_positions: bool, p: float) -> None:
    torch.manual_seed(7)
    batch, length, vocabulary, width = shape
    ids, grad = torch.randint(vocabulary, (batch, length)), torch.randn(batch, length, width)
    table, positions = torch.randn(vocabulary, width), torch.randn(length, width) if has_positions else None
    generator = torch.get_rng_state()
    found = []
    for n_threads in (1, 3):
        torch.set_rng_state(generator)
        given = [x.clone().requires_grad_() for x in (table, positions) if x is not None]
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        output = operators.embedding(ids, given[0], given[1] if has_positions else None, 1.7, p)
        output.backward(grad)
        torch.set_num_threads(before)
        found.append([output, *(x.grad for x in given)])
    torch.set_rng_state(generator)
    factors = operators.embedding(ids, torch.ones(vocabulary, width), None, 1.0, p).double()
    assert set(factors.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))}
    assert abs((factors == 0).double().mean() - p) <= 4 / factors.numel() ** 0.5
    exact = [x.double().requires_grad_() for x in (table, positions) if x is not None]
    expected = (exact[0][ids] * 1.7 + sum(exact[1:])) * factors
    expected.backward(grad.double())
    for ours, again, right in zip(*found, [expected, *(x.grad for x in exact)], strict=True):
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)


def test_an_id_outside_the_table_is_refused() -> None:
    for wrong in (-1, 4):
        with pytest.raises(SettingsError, match="ids: out of range"):
            operators.embedding(torch.tensor([[0, wrong]]), torch.zeros(4, 3), None, 1.0, 0.0)


def test_a_loss_whose_logits_are_far_below_their_bound(dtype: torch.dtype) -> None:
    """The hidden states and the weights have large norms in dimensions that the others lack."""
    torch.manual_seed(8)
    hidden, weight, gold = torch.randn(40, 64), torch.randn(200, 64), torch.randint(1, 200, (40,))
    hidden[::2, 0], weight[:, 0], weight[5, 1] = 100.0, 0.0, 100.0
    hidden[:, 1] = 0.0
    exact = [x.to(dtype).double().requires_grad_() for x in (hidden, weight)]
    given = [x.to(dtype).float().requires_grad_() for x in (hidden, weight)]
    loss, nll = operators.LinearCrossEntropy.apply(*given, None, gold, 0, 0.1, dtype, True)
    loss.backward()
    logits = exact[0] @ exact[1].t()
    right = nn.functional.cross_entropy(logits, gold, label_smoothing=0.1, reduction="sum")
    right.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-4)
    assert nll.item() == pytest.approx(nn.functional.cross_entropy(logits, gold, reduction="sum").item(), rel=1e-4)
    for ours, exactly in zip(given, exact, strict=True):
        assert ours.grad is not None and exactly.grad is not None
        assert (ours.grad.double() - exactly.grad).norm() <= 2 * rounding(dtype) * exactly.grad.norm()


def test_linear_layers_read_the_rounded_copy_of_a_norm_unless_it_has_changed() -> None:
    norm, layer, x = nn.LayerNorm(8), nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    exact, weights = x.detach().double().requires_grad_(), copy.deepcopy(layer).double()
    with autocast(torch.device("cpu"), "bfloat16"):
        if native.dtype_in_use() is None:
            pytest.skip("this CPU has no kernels in bfloat16")
        y = operators.normed(x, norm)
        assert operators.rounded(y).dtype == torch.bfloat16
        (operators.linear(y, layer.weight, layer.bias).sum() + 2 * y[:, 1].sum()).backward()
        y.detach().zero_()
        assert operators.rounded(y) is y, "changed in its place"
        with torch.no_grad():
            z = operators.normed(x, norm)
            assert operators.rounded(z) is z
        y = operators.normed(x, norm)
    assert operators.linear(y, layer.weight, layer.bias).dtype == torch.float32, "read in float32"
    y = nn.functional.layer_norm(exact, (8,))
    (weights(y).sum() + 2 * y[:, 1].sum()).backward()
    assert x.grad is not None and exact.grad is not None
    assert (x.grad.double() - exact.grad).norm() <= 0.02 * exact.grad.norm()


def test_too_little_memory_is_a_memory_error() -> None:
    """A training then divides the batch."""
    numbers = torch.zeros(4)
    call = operators._ResidualCall(2**31 - 1, 1 << 16, False, False, 1e-5, 0.0, 0, *[numbers.data_ptr()] * 7)
    for name in ("grad_output", "normed", "grad_x", "grad_gain", "grad_shift"):
        setattr(call, name, numbers.data_ptr())
    with pytest.raises(MemoryError, match="out of memory"):
        loaded_library().transduce_residual_backward(ctypes.byref(call), 1)
