"""Positions compared with the oracle, for any offset and length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import numpy_transformer as oracle
from transduce.nn.positions import POSITIONS, buckets, sinusoids, slopes

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
