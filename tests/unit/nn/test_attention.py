"""Attention: any mask compared with the oracle, rotations, empty rows, dropout, sizes; positions."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from oracle import numpy_transformer as oracle
from transduce.nn.attention import CrossAttention, SelfAttention, attention_weights, scaled_dot_product_attention
from transduce.nn.masks import attention_bias
from transduce.nn.positions import POSITIONS, RotaryPositions, buckets, sinusoids, slopes

EXACT = {"rtol": 0, "atol": 1e-10}  # float64, values of order 10


def same(x: Tensor) -> Tensor:
    return x


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    n_rows=st.integers(1, 3),
    n_queries=st.integers(1, 6),
    n_keys=st.integers(1, 6),
    n_heads=st.integers(1, 3),
    d_head=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    seed=st.integers(0, 1000),
)
def test_scaled_dot_product_attention_with_any_mask(
    n_rows: int, n_queries: int, n_keys: int, n_heads: int, d_head: int, share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(n_rows, n_heads, n, d_head).double() for n in (n_queries, n_keys, n_keys))
    mask = torch.rand(n_rows, n_queries, n_keys) < share
    bias = attention_bias(mask)
    output, weights = scaled_dot_product_attention(query, key, value, bias=bias), attention_weights(query, key, bias)
    for b in range(n_rows):
        for h in range(n_heads):
            inputs = (tensor[b, h].numpy() for tensor in (query, key, value))
            theirs, their_weights = oracle.attention(*inputs, mask[b].numpy())
            np.testing.assert_allclose(output[b, h].numpy(), theirs, **EXACT)
            np.testing.assert_allclose(weights[b, h].numpy(), their_weights, **EXACT)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 1, 2, 4), 300.0)
    key = torch.stack([torch.full((4,), 300.0), torch.full((4,), -300.0)])[None, None]
    value = torch.randn(1, 1, 2, 4)
    assert torch.equal(scaled_dot_product_attention(query, key, value), value[:, :, [0, 0]])


def test_rotary_self_attention_depends_on_distances_only() -> None:
    rotary = RotaryPositions(d_model=12, d_head=6, max_positions=0)
    module = SelfAttention(d_model=12, n_heads=2).double()
    x, mask = torch.randn(1, 5, 12).double(), torch.ones(1, 5, 5, dtype=torch.bool)
    near, far = (
        module(x, bias=attention_bias(mask), rotate=rotary.rotation(torch.arange(at, at + x.shape[1])))
        for at in (0, 50)
    )
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)  # angles are computed in float32
    assert not torch.allclose(near, module(x, bias=attention_bias(mask), rotate=same), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_everything_masked_stay_finite_and_do_not_affect_others(dtype: torch.dtype) -> None:
    module = SelfAttention(d_model=12, n_heads=2).to(dtype)
    x = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 4, 4, dtype=torch.bool)
    mask[0, 1] = False
    mask[1] = False
    y = module(x, bias=attention_bias(mask), rotate=same)
    y.square().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    full = module(x, bias=attention_bias(torch.ones_like(mask)), rotate=same)
    assert torch.equal(y[0, [0, 2, 3]], full[0, [0, 2, 3]])


def test_attention_dropout_drops_weights_in_training_only() -> None:
    module = SelfAttention(d_model=12, n_heads=2, dropout=0.5)
    x, bias = torch.randn(4, 6, 12), attention_bias(torch.ones(4, 6, 6, dtype=torch.bool))
    quiet = module.eval()(x, bias=bias, rotate=same)
    torch.testing.assert_close(module(x, bias=bias, rotate=same), quiet)
    module.train()
    mean = torch.stack([module(x, bias=bias, rotate=same) for _ in range(1500)]).mean(0)
    assert not torch.allclose(module(x, bias=bias, rotate=same), quiet, atol=1e-3)
    torch.testing.assert_close(mean, quiet, rtol=0, atol=0.08)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, "12 is not divisible by n_heads 5"),
        ({"n_heads": 4, "n_kv_heads": 3}, "not divisible by n_kv_heads 3"),
    ],
)
def test_contradicting_sizes_are_refused(options: dict[str, int], message: str) -> None:
    for kind in (SelfAttention, CrossAttention):
        with pytest.raises(ValueError, match=message):
            kind(d_model=12, **options)


def test_shared_projection_refuses_groups() -> None:
    with pytest.raises(ValueError, match="shared projection"):
        SelfAttention(d_model=12, n_heads=4, n_kv_heads=2, projection="shared")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bias_gives_forbidden_positions_a_weight_of_exactly_zero(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[True, False, True], [False, False, True]]])
    scores = (torch.tensor([[[[50.0, -50.0, 0.0], [1e4, 1e4, -1e4]]]])).to(dtype)
    weights = (scores + attention_bias(mask).to(dtype)).softmax(-1)
    assert (weights[0, 0][~mask[0]] == 0).all()
    assert weights[0, 0, 1].tolist() == [0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_of_a_fully_masked_row_is_finite_in_value_and_gradient(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[False, False, False], [True, False, False]]])
    scores = torch.randn(1, 1, 2, 3, dtype=dtype, requires_grad=True)
    weights = (scores + attention_bias(mask).to(dtype)).softmax(-1)
    torch.testing.assert_close(weights[0, 0, 0], torch.full((3,), 1 / 3, dtype=dtype))
    weights.square().sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()


ANGLE_ROUNDING = 2e-6  # float32 sines of angles computed in float64; and of float32 angles below 16


def make(kind: str, *, d_model: int = 12, d_head: int = 6, max_positions: int = 16, **more: Any) -> Any:
    return POSITIONS[kind](d_model=d_model, d_head=d_head, max_positions=max_positions, **more)


def rotated(scheme: Any, x: torch.Tensor, offset: int) -> torch.Tensor:
    return scheme.rotation(torch.arange(offset, offset + x.shape[-2]))(x)


@given(n_positions=st.integers(1, 20), d_model=st.integers(1, 17), offset=st.integers(0, 600))
def test_sinusoids_equal_the_papers_formula(n_positions: int, d_model: int, offset: int) -> None:
    ours = sinusoids(n_positions, d_model, offset=offset).numpy()
    np.testing.assert_allclose(ours, oracle.sinusoid(offset + n_positions, d_model)[offset:], atol=1e-6)


@pytest.mark.parametrize("kind", POSITIONS)
def test_offset_continues_where_a_prefix_ended(kind: str) -> None:
    positions = make(kind)
    x, heads = torch.randn(2, 7, 12), torch.randn(2, 3, 7, 6)
    torch.testing.assert_close(positions.add(x, 0)[:, 4:], positions.add(x[:, 4:], 4))
    torch.testing.assert_close(rotated(positions, heads, 0)[:, :, 4:], rotated(positions, heads[:, :, 4:], 4))


@pytest.mark.parametrize(
    ("kind", "hooks"),
    [
        ("sinusoidal", (True, False, False)),
        ("sinusoidal_halves", (True, False, False)),
        ("sinusoidal_fairseq", (True, False, False)),
        ("sinusoidal_marian", (True, False, False)),
        ("learned", (True, False, False)),
        ("rotary", (False, True, False)),
        ("alibi", (False, False, True)),
        ("t5", (False, False, True)),
        ("shaw", (False, False, False)),
        ("none", (False, False, False)),
    ],
)
def test_each_scheme_uses_one_hook_or_none(kind: str, hooks: tuple[bool, bool, bool]) -> None:
    scheme = make(kind, n_heads=3)
    x, heads, places = torch.randn(2, 7, 12), torch.randn(2, 3, 7, 6), torch.arange(1, 8)
    bias = scheme.score_bias(places, places)
    assert (not torch.equal(scheme.add(x, 1), x), not torch.equal(rotated(scheme, heads, 1), heads)) == hooks[:2]
    assert (bias is not None and bias.shape == (3, 7, 7)) == hooks[2]


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_halves", "sinusoidal_marian"])
def test_positions_past_the_table_but_below_max_positions(kind: str) -> None:
    """The table has fewer rows than max_positions: positions of separate documents must not index past it."""
    scheme = make(kind, d_model=4, max_positions=20_000)
    x, places = torch.zeros(1, 17_000, 4), torch.arange(17_000)[None]
    torch.testing.assert_close(scheme.add(x, 0, places)[0], scheme.add(x)[0], atol=ANGLE_ROUNDING, rtol=0)


# --- biases on scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize("causal", [True, False])
def test_score_biases_depend_on_distances_only(kind: str, causal: bool) -> None:
    scheme = make(kind, n_heads=3, causal=causal)
    near, far = (scheme.score_bias(torch.arange(5) + at, torch.arange(9) + at) for at in (0, 1000))
    torch.testing.assert_close(near, far)
    torch.testing.assert_close(scheme.score_bias(torch.arange(2, 4), torch.arange(9)), near[:, 2:4])


def test_alibi_slopes_are_the_papers() -> None:
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(12)[:8] == slopes(8) and slopes(12)[8:] == slopes(16)[0:8:2]
    assert [len(slopes(n)) for n in range(1, 20)] == list(range(1, 20))


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_equal_those_of_transformers(causal: bool) -> None:
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    queries, keys = torch.arange(300, 310), torch.arange(600)
    theirs = attention._relative_position_bucket(keys[None] - queries[:, None], bidirectional=not causal)
    seen = keys[None] <= queries[:, None] if causal else torch.ones_like(theirs, dtype=torch.bool)
    assert torch.equal(buckets(queries, keys, causal=causal)[seen], theirs[seen])
    assert len(theirs[seen].unique()) >= 31


def test_t5_learns_its_table() -> None:
    scheme = make("t5", n_heads=3)
    scheme.score_bias(torch.arange(4), torch.arange(4)).sum().backward()
    assert (scheme.bias.weight.grad.abs().sum(1) > 0).sum() == 7  # distances -3 to 3
