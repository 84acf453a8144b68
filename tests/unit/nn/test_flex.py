"""Sparse patterns by FlexAttention compared with a dense product under the same mask.

Without a GPU, FlexAttention is a dense product itself: that shows the masks and biases, and the tiles are tested apart.
"""

from __future__ import annotations

from typing import Any

import jaxtyping
import pytest
import torch
from torch.nn.attention import flex_attention

from transduce.nn.attention import SelfAttention
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import (
    BlockBias,
    FlexBias,
    FullPattern,
    SplitBias,
    bias,
    make_patterns,
    padded_bias,
    sequence_bias,
    step_bias,
)
from transduce.nn.patterns.flex import TILE, tiles
from transduce.nn.positions import POSITIONS

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
CASES: dict[str, dict[str, Any]] = {
    "documents, alibi": dict(name="local", size=40, scheme="alibi", causal=True),
    "documents": dict(name="fixed", size=33, summary=5, scheme="none", causal=True),
    "padding, t5": dict(name="strided", size=7, scheme="t5", causal=False),
}


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention on every device, as on a GPU. PyTorch has its gradients on a CPU too, but refuses them to users.

    Masks are compiled; checks of shapes cannot be.
    """
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setitem(bias.COMPUTATIONS, "cpu", bias.COMPUTATIONS["cuda"])


def biases_of(found: Any) -> list[Any]:
    return [part for _, part in found.parts] if isinstance(found, SplitBias) else [found]


def dense_of(pattern: FullPattern, groups: torch.Tensor | None, scheme: Any, *, n: int, device: str) -> Any:
    places = torch.arange(n, device=device)
    history = None if groups is None else attention_bias(groups[:, :, None] == groups[:, None, :])
    return step_bias(pattern, places, places, scheme, history=history, masked=True)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("flex")
def test_equals_the_dense_computation(case: dict[str, Any], device: str) -> None:
    """Values and gradients, also of a learned bias: decoders with packed documents, encoders with padding."""
    options, n, causal = dict(case), 150, case["causal"]
    dtype = torch.float64 if device == "cpu" else torch.float32
    scheme = POSITIONS[options.pop("scheme")](d_model=32, d_head=16, max_positions=300, n_heads=2, causal=causal)
    scheme, attention = scheme.to(device, dtype), SelfAttention(d_model=32, n_heads=2, n_kv_heads=1).to(device, dtype)
    places = torch.arange(n, device=device)
    (pattern,) = make_patterns(**options, n_heads=2)
    if causal:
        groups = (torch.randint(0, 2, (2, n)).cumsum(1) // 30).to(device)
        ours = sequence_bias(pattern, places, scheme, documents=groups)
    else:
        groups = (places < torch.tensor([[n], [n - 44]], device=device)).long()
        ours = padded_bias(pattern, places, scheme, groups[:, None].bool())
    assert all(isinstance(part, FlexBias) for part in biases_of(ours))
    x = torch.randn(2, n, 32, device=device, dtype=dtype, requires_grad=True)
    outputs = []
    for one in (ours, dense_of(pattern, groups, scheme, n=n, device=device)):
        y = attention(x, bias=one, rotate=lambda q: q)
        inputs = [x, *scheme.parameters()]
        outputs.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
@pytest.mark.parametrize("size", [3, 100, 300])
@pytest.mark.parametrize("name", ["local", "strided", "fixed"])
def test_tiles_contain_all_visible_pairs_and_few_others(name: str, size: int, causal: bool) -> None:
    counts = []
    for n in (1500, 3000):
        for pattern in make_patterns(name, size=size, summary=2, spread="layers", n_heads=2, causal=causal):
            layout = pattern.layout(n)
            assert layout is not None
            queries, keys = layout.order(torch.device("cpu"))
            found = tiles(layout, queries, keys, causal=causal)
            visible = pattern.mask(queries, keys) & (queries < n)[:, None] & (keys < n)
            inside = found.repeat_interleave(TILE, 0)[: len(queries)].repeat_interleave(TILE, 1)[:, : len(keys)]
            assert not (visible & ~inside).any()
            counts.append(int(found.sum()))
    if name == "local":
        assert counts[1] < 2.3 * counts[0], "linear in the length"
    if name == "strided" and size == 100:
        assert counts[3] * TILE**2 < 0.2 * 3000**2, "columns are near to each other"


@pytest.mark.usefixtures("flex")
def test_what_the_kernel_cannot_do_is_computed_in_blocks() -> None:
    """Relations between positions, dropout of weights, and the weights themselves."""
    places = torch.arange(100)
    (pattern,) = make_patterns("local", size=9, n_heads=2, causal=True)
    shaw = POSITIONS["shaw"](d_model=16, d_head=8, max_positions=300, n_heads=2, causal=True)
    assert isinstance(sequence_bias(pattern, places, shaw), BlockBias)
    none = POSITIONS["none"](d_model=16, d_head=8, max_positions=300, n_heads=2, causal=True)
    ours = sequence_bias(pattern, places, none)
    assert isinstance(ours, FlexBias)
    attention, x = SelfAttention(d_model=16, n_heads=2, dropout=0.5), torch.randn(1, 100, 16)
    dropped = []
    for one in (ours, ours.blocks):
        torch.manual_seed(1)
        dropped.append(attention(x, bias=one, rotate=lambda q: q))
    assert torch.equal(*dropped)
    attention.eval()(x, bias=ours, rotate=lambda q: q)  # heads of 8 are too narrow for the GPU
    assert ours._kernel is None
    query = torch.randn(1, 2, 100, 8)
    assert torch.equal(ours.dense(query) > -1, pattern.mask(places, places)[None, None])
