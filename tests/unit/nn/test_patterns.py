"""Attention patterns: their masks, and blocked computations compared with dense ones."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import nn

from oracle.adapter import fitting, randomize
from oracle.cases import VOCAB
from transduce.models.registry import build_model
from transduce.nn.attention import SelfAttention
from transduce.nn.bias import CAUSAL, PatternBias, dense_bias, padded_bias, sequence_bias, step_bias
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import PATTERNS, CausalPattern, LocalPattern, Pattern, make_patterns
from transduce.nn.positions import POSITIONS, Positions


def definition(name: str, i: int, j: int, *, size: int, summary: int, causal: bool) -> tuple[bool, ...]:
    """Whether query i may attend to key j by each factor, by the equations of Child et al. 2019, section 4.2."""
    order = j <= i or not causal
    factors = {
        "local": (abs(i - j) < size,),
        "strided": (abs(i - j) < size, (i - j) % size == 0),
        "fixed": (i // size == j // size, j % size in range(max(0, size - summary), size)),
        "full": (True,),
    }
    return tuple(found and order for found in factors[name])


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(PATTERNS)),
    size=st.integers(1, 9),
    summary=st.integers(1, 9),
    first=st.integers(0, 9),
    n=st.integers(1, 9),
    causal=st.booleans(),
)
def test_factors_are_the_papers(name: str, size: int, summary: int, first: int, n: int, causal: bool) -> None:
    queries, keys = torch.arange(first, first + n), torch.arange(first + n)
    layers = make_patterns(name, size=size, summary=summary, spread="layers", causal=causal)
    wanted = [[definition(name, i, j, size=size, summary=summary, causal=causal) for j in keys] for i in queries]
    for k, factor in enumerate(layers):
        mask = factor.mask(queries, keys)
        assert mask.tolist() == [[one[k] for one in row] for row in wanted]
        hidden = factor.first_key(first)
        assert not causal or not mask[:, :hidden].any()
        if causal and factor.contiguous:
            assert factor.mask(queries[:1], keys[: first + 1])[0, hidden:].all()
    (heads,) = make_patterns(name, size=size, summary=summary, spread="heads", causal=causal)
    bias = step_bias(heads, queries, keys, scheme_of("none", causal=causal), history=None, masked=True)
    visible = (dense_bias(bias, torch.zeros(1, 3, n, 4))[0] == 0).expand(3, -1, -1)
    groups = [layers[0], layers[0], layers[-1]]
    assert torch.equal(visible, torch.stack([factor.mask(queries, keys) for factor in groups]))


def scheme_of(name: str, *, causal: bool) -> Any:
    return POSITIONS[name](d_model=16, d_head=4, max_positions=300, n_heads=4, causal=causal).double()


def dense_of(pattern: Pattern, n: int, groups: torch.Tensor | None, scheme: Positions) -> Any:
    """The same bias made of one mask."""
    places = torch.arange(n)
    history = None if groups is None else attention_bias(groups[:, :, None] == groups[:, None, :])
    return step_bias(pattern, places, places, scheme, history=history, masked=True)


BLOCKED: dict[str, dict[str, Any]] = {
    "window of one": dict(name="local", size=1),
    "window": dict(name="local", size=40),
    "strided": dict(name="strided", size=7),
    "strided layers": dict(name="strided", size=32, spread="layers"),
    "fixed": dict(name="fixed", size=16, summary=3),
    "fixed layers": dict(name="fixed", size=33, summary=5, spread="layers"),
}


def is_in_blocks(bias: Any) -> bool:
    parts = bias if isinstance(bias, tuple) else [bias]
    return all(isinstance(part, PatternBias) and part.blocks is not None for part in parts)


def compare(pattern: Pattern, bias: Any, groups: torch.Tensor | None, scheme: Positions, n: int) -> None:
    """Attention in blocks equals attention under a mask, values and gradients, in float64."""
    attention = SelfAttention(d_model=16, n_heads=4, n_kv_heads=2).double()
    x = torch.randn(3, n, 16, dtype=torch.float64, requires_grad=True)
    expected = dense_of(pattern, n, groups, scheme)
    query = torch.randn(3, 4, n, 4, dtype=torch.float64)
    ours, theirs = (dense_bias(one, query) for one in (bias, expected))
    shape = torch.broadcast_shapes(ours.shape, theirs.shape)
    seen = (theirs > -1e20).expand(shape)
    assert torch.equal((ours > -1e20).expand(shape), seen)
    torch.testing.assert_close(ours.expand(shape)[seen], theirs.expand(shape)[seen], check_dtype=False)
    outputs = [attention(x, bias=b, rotate=lambda y: y) for b in (bias, expected)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    inputs = [x, *scheme.parameters()]
    gradients = [torch.autograd.grad(y.square().sum(), inputs, allow_unused=True) for y in outputs]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scheme", ["none", "alibi", "t5", "shaw"])
@pytest.mark.parametrize("options", BLOCKED.values(), ids=BLOCKED)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_causal_blocks_equal_the_dense_computation(scheme: str, options: dict[str, Any], packed: bool) -> None:
    positions = scheme_of(scheme, causal=True)
    for n in (99, 130):
        torch.manual_seed(n)
        documents = torch.randint(0, 2, (3, n)).cumsum(1) // 20 if packed else None
        for pattern in make_patterns(**options, causal=True):
            bias = sequence_bias(pattern, torch.arange(n), positions, documents=documents)
            assert is_in_blocks(bias)
            compare(pattern, bias, documents, positions, n)


@pytest.mark.parametrize("scheme", ["none", "alibi", "t5", "shaw"])
@pytest.mark.parametrize("options", BLOCKED.values(), ids=BLOCKED)
def test_blocks_in_both_directions_equal_the_dense_computation(scheme: str, options: dict[str, Any]) -> None:
    """With padding on either side; real positions are compared."""
    positions = scheme_of(scheme, causal=False)
    for n in (1, 31, 100):
        torch.manual_seed(n)
        mask = torch.ones(3, 1, n, dtype=torch.bool)
        mask[1, :, n - n // 3 :] = mask[2, :, : n // 4] = False
        for pattern in make_patterns(**options, causal=False):
            bias = padded_bias(pattern, torch.arange(n), positions, mask)
            assert is_in_blocks(bias)
            compare(pattern, bias, mask[:, 0], positions, n)


def test_short_sequences_are_computed_at_once() -> None:
    none = scheme_of("none", causal=True)
    assert isinstance(sequence_bias(LocalPattern(40), torch.arange(80), none), torch.Tensor)


@pytest.mark.parametrize("factor", [0, 1], ids=["own block", "ends"])
def test_blocks_are_used_where_they_have_fewer_pairs(factor: int) -> None:
    pattern: Any = make_patterns("fixed", size=40, summary=4, spread="layers", causal=True)[factor]
    for n in (40, 64, 65, 80, 100):
        blocks = pattern.blocks(n, torch.device("cpu"))
        n_pairs = blocks.queries.numel() * blocks.keys.shape[1]
        assert blocks.worthwhile() == (n > 64 and n_pairs < n * n)
        assert sorted(blocks.queries.flatten().tolist())[:n] == list(range(n))
        bias = sequence_bias(pattern, torch.arange(n), scheme_of("none", causal=True))
        compare(pattern, bias, None, scheme_of("none", causal=True), n)


def test_the_bias_of_fused_causal_kernels_as_a_matrix() -> None:
    expected = attention_bias(CausalPattern().mask(torch.arange(5), torch.arange(5))[None])
    assert torch.equal(CAUSAL.dense(torch.empty(1, 1, 5, 4)), expected)
    attention, x = SelfAttention(d_model=16, n_heads=4), torch.randn(2, 5, 16)
    assert torch.equal(*(attention(x, bias=bias, rotate=lambda y: y) for bias in (CAUSAL, expected)))


@pytest.mark.parametrize("case", ["causal", "matrix", "one per row"])
def test_the_fused_kernel_of_long_sequences_equals_products(case: str) -> None:
    """In training, without dropout; values and gradients, in float64."""
    n = 300
    places, documents = torch.arange(n), torch.arange(n).repeat(2, 1) // torch.tensor([[70], [200]])
    groups = documents if case == "one per row" else None
    bias = sequence_bias(CausalPattern(), places, scheme_of("none", causal=True), documents=groups)
    if case == "matrix":
        bias = dense_bias(bias, torch.empty(1, 1, n, 4))
    assert (bias is CAUSAL) == (case == "causal")
    attention, x = SelfAttention(d_model=16, n_heads=4).double(), torch.randn(2, n, 16, dtype=torch.float64)
    x.requires_grad_()
    fused = attention(x, bias=bias, rotate=lambda y: y)
    (gradient,) = torch.autograd.grad(fused.square().sum(), x)
    with torch.no_grad():
        torch.testing.assert_close(fused, attention(x, bias=bias, rotate=lambda y: y), rtol=0, atol=1e-10)
    matrix = dense_bias(bias, torch.empty(2, 4, n, 4))
    assert matrix is not None
    products = attention(x, bias=matrix.double().requires_grad_(), rotate=lambda y: y)  # no kernel has its gradient
    torch.testing.assert_close(gradient, torch.autograd.grad(products.square().sum(), x)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [5, 300], ids=["products", "kernel"])
def test_the_bias_of_positions_is_computed_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, calls = scheme_of("t5", causal=True), list[int]()
    compute = scheme.score_bias
    monkeypatch.setattr(scheme, "score_bias", lambda q, k: calls.append(1) or compute(q, k))
    sequence_bias(CausalPattern(), torch.arange(n), scheme)
    assert len(calls) == 1


def make(kind: str, **options: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 24, "n_heads": 4, "n_encoder_layers": 1, "n_decoder_layers": 2, "dropout": 0.0}
    model = build_model(fitting(kind=kind, **sizes, **options), n_src=VOCAB, n_tgt=VOCAB).eval()
    randomize(model)
    return model.double()


@pytest.mark.parametrize("cuts", [[1] * 90, [80, 1, 1, 3, 5]], ids=["tokens", "prompt"])
@pytest.mark.parametrize(
    "options",
    [
        {"positions": "rotary", "decoder_pattern": "local"},
        {"positions": "t5", "decoder_pattern": "local"},
        {"positions": "alibi", "decoder_pattern": "strided", "n_kv_heads": 2},
        {"positions": "shaw", "decoder_pattern": "fixed", "summary_tokens": 2},
        {"positions": "rotary", "decoder_pattern": "fixed", "factors": "layers"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@torch.no_grad()
def test_cached_steps_beyond_the_window_equal_one_forward(options: dict[str, Any], cuts: list[int]) -> None:
    """The prompt and the whole sequence are computed in blocks; steps skip the keys before a local window."""
    model = make("gpt", **options, window=7)
    ids = torch.randint(1, VOCAB, (2, 90))
    state = model.start(ids[:, :0], capacity=90)
    steps = [model.advance(part, state) for part in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=0, atol=1e-9)
    assert (state.skipped > 70) == (options["decoder_pattern"] == "local")
