"""Attention patterns: their masks, and blocked computations compared with dense ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from oracle.adapter import fitting, randomize
from oracle.cases import VOCAB
from transduce.models.registry import build_model
from transduce.nn.attention import SelfAttention
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import BlockBias, CausalBias, CausalPattern, LocalPattern, dense_bias, sequence_bias
from transduce.nn.positions import POSITIONS, Positions


@given(window=st.integers(1, 9), first=st.integers(0, 5), n=st.integers(1, 9))
def test_a_window_includes_the_query_and_ends_there(window: int, first: int, n: int) -> None:
    queries, keys = torch.arange(first, first + n), torch.arange(first + n)
    mask = LocalPattern(window).mask(queries, keys)
    assert mask.tolist() == [[t - window < s <= t for s in keys.tolist()] for t in queries.tolist()]
    hidden = LocalPattern(window).first_key(first)
    assert not mask[:, :hidden].any() and mask[0, hidden]


def schemes() -> dict[str, Positions]:
    made: dict[str, Any] = {
        name: POSITIONS[name](d_model=16, d_head=4, max_positions=300, n_heads=4, causal=True)
        for name in ("none", "alibi", "t5")
    }
    return made


@pytest.mark.parametrize("scheme", ["none", "alibi", "t5"])
@pytest.mark.parametrize(("window", "n"), [(1, 65), (5, 66), (32, 100), (40, 81), (40, 300)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_blocks_equal_the_dense_computation(scheme: str, window: int, n: int, packed: bool) -> None:
    torch.manual_seed(n)
    positions, pattern = schemes()[scheme], LocalPattern(window)
    places, documents = torch.arange(n), torch.randint(0, 2, (3, n)).cumsum(1) // 20
    bias = sequence_bias(pattern, places, positions, documents=documents if packed else None)
    assert isinstance(bias, BlockBias)
    mask = pattern.mask(places, places)[None]
    expected = attention_bias(mask & (documents[:, :, None] == documents[:, None, :]) if packed else mask)
    if (added := positions.score_bias(places, places)) is not None:
        expected = expected + added
    seen = expected > -1e20
    dense = dense_bias(bias, torch.empty(3, 4, n, 4)).expand(expected.shape)
    assert torch.equal(dense > -1e20, seen)
    torch.testing.assert_close(dense[seen], expected[seen])
    attention = SelfAttention(d_model=16, n_heads=4, n_kv_heads=2).double()
    x = torch.randn(3, n, 16, dtype=torch.float64, requires_grad=True)
    outputs = [attention(x, bias=b, rotate=lambda y: y) for b in (bias, expected)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


def test_short_sequences_are_computed_at_once() -> None:
    assert isinstance(sequence_bias(LocalPattern(40), torch.arange(80), schemes()["none"]), torch.Tensor)


def test_the_bias_of_fused_causal_kernels_as_a_matrix() -> None:
    expected = attention_bias(CausalPattern().mask(torch.arange(5), torch.arange(5))[None])
    assert torch.equal(CausalBias().dense(5, torch.device("cpu")), expected)
    attention, x = SelfAttention(d_model=16, n_heads=4), torch.randn(2, 5, 16)
    assert torch.equal(*(attention(x, bias=bias, rotate=lambda y: y) for bias in (CausalBias(), expected)))


def make(kind: str, **options: Any) -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 24, "n_heads": 4, "n_encoder_layers": 1, "n_decoder_layers": 2, "dropout": 0.0}
    model = build_model(fitting(kind=kind, **sizes, **options), n_src=VOCAB, n_tgt=VOCAB).eval()
    randomize(model)
    return model.double()


@pytest.mark.parametrize("cuts", [[1] * 90, [80, 1, 1, 3, 5]], ids=["tokens", "prompt"])
@pytest.mark.parametrize("positions", ["rotary", "alibi", "t5"])
@torch.no_grad()
def test_cached_steps_beyond_the_window_equal_one_forward(positions: str, cuts: list[int]) -> None:
    """The prompt and the whole sequence are computed in blocks; steps skip the keys before the window."""
    model = make("gpt", positions=positions, window=7)
    ids = torch.randint(1, VOCAB, (2, 90))
    state = model.start(ids[:, :0], capacity=90)
    steps = [model.advance(part, state) for part in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids), rtol=0, atol=1e-9)
    assert state.skipped > 70


@torch.no_grad()
def test_beams_after_a_prompt_beyond_the_window_equal_one_forward() -> None:
    model = make("gpt", positions="t5", window=7)
    ids = torch.randint(1, VOCAB, (2, 90)).repeat_interleave(3, 0)
    ids[:, 80:] = torch.randint(1, VOCAB, (6, 10))
    state = model.start(ids[::3, :80], capacity=10, n_beams=3)
    steps = [model.advance(part, state) for part in ids[:, 80:].split([1] * 8 + [2], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids)[:, 80:], rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_token_beyond_the_reach_of_all_layers_changes_nothing() -> None:
    model = make("gpt", window=4)
    ids = torch.randint(1, VOCAB, (1, 90))
    changed = ids.clone()
    changed[0, 10] = ids[0, 10] % (VOCAB - 1) + 1
    differs = (model(ids) != model(changed)).any(-1)[0]
    assert differs.nonzero()[:, 0].tolist() == list(range(10, 10 + 2 * 3 + 1))  # two layers, three tokens back each
