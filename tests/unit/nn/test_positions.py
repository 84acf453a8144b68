"""Positions against the oracle, whatever the offset and the length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import numpy_transformer as oracle
from transduce.nn.positions import POSITIONS, rotate_pairs, sinusoids

ANGLE_ROUNDING = 2e-6  # float32 sines of angles computed in float64; and of float32 angles below 16


def make(kind: str, *, d_model: int = 12, d_head: int = 6, max_positions: int = 16) -> torch.nn.Module:
    return POSITIONS[kind](d_model=d_model, d_head=d_head, max_positions=max_positions)


@given(n_positions=st.integers(1, 20), d_model=st.integers(1, 17), offset=st.integers(0, 600))
def test_sinusoids_equal_the_papers_formula(n_positions: int, d_model: int, offset: int) -> None:
    ours = sinusoids(n_positions, d_model, offset=offset).numpy()
    np.testing.assert_allclose(ours, oracle.sinusoid(offset + n_positions, d_model)[offset:], atol=1e-6)


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 16), (3, 5), (12, 8), (40, 4)], ids=str)
def test_sinusoidal_positions_are_added_within_and_past_the_table(offset: int, length: int) -> None:
    x = torch.randn(2, length, 12)
    added = make("sinusoidal").add(x, offset) - x
    expected = oracle.sinusoid(offset + length, 12)[offset:]
    np.testing.assert_allclose(added.numpy(), np.broadcast_to(expected, added.shape), atol=ANGLE_ROUNDING)


def test_learned_positions_are_added_and_reach_their_gradient() -> None:
    positions = make("learned")
    x = torch.randn(2, 4, 12)
    added = positions.add(x, 3)
    torch.testing.assert_close(added - x, positions.embedding.weight[None, 3:7].expand(2, -1, -1))
    added.sum().backward()
    used = positions.embedding.weight.grad.abs().sum(-1) > 0
    assert used.nonzero().flatten().tolist() == [3, 4, 5, 6]


def test_learned_positions_refuse_what_they_do_not_hold() -> None:
    positions = make("learned", max_positions=5)
    positions.add(torch.zeros(1, 2, 12), 3)
    with pytest.raises(ValueError, match="6 tokens"):
        positions.add(torch.zeros(1, 3, 12), 3)


@given(n_positions=st.integers(1, 16), d_head=st.sampled_from([2, 4, 6, 16]))
def test_rotary_equals_the_oracle_but_for_the_order_of_columns(n_positions: int, d_head: int) -> None:
    """We turn column i with column i + K/2, the oracle 2i with 2i + 1: the same planes under another order."""
    x = torch.randn(2, 3, n_positions, d_head)
    ours = make("rotary", d_head=d_head).rotate(x, 0)
    pairs = torch.arange(d_head).view(2, -1).T.flatten()  # 0, K/2, 1, K/2 + 1, ...
    for b in range(2):
        for h in range(3):
            expected = oracle.rotate(x[b, h][:, pairs].double().numpy())
            np.testing.assert_allclose(ours[b, h][:, pairs].numpy(), expected, atol=ANGLE_ROUNDING * 5)


def test_rotary_scores_know_only_the_distance() -> None:
    rotary = make("rotary", d_head=8)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    scores = [(rotary.rotate(query, at + 5) * rotary.rotate(key, at)).sum().item() for at in (0, 1, 7, 100)]
    np.testing.assert_allclose(scores, scores[0], rtol=0, atol=1e-4)
    assert abs((rotary.rotate(query, 6) * rotary.rotate(key, 0)).sum().item() - scores[0]) > 1e-3


def test_rotation_keeps_lengths() -> None:
    x, angle = torch.randn(3, 5, 8), torch.randn(5, 4)
    torch.testing.assert_close(rotate_pairs(x, angle).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("kind", POSITIONS)
def test_offset_continues_where_a_prefix_ended(kind: str) -> None:
    positions = make(kind)
    x, heads = torch.randn(2, 7, 12), torch.randn(2, 3, 7, 6)
    torch.testing.assert_close(positions.add(x, 0)[:, 4:], positions.add(x[:, 4:], 4))
    torch.testing.assert_close(positions.rotate(heads, 0)[:, :, 4:], positions.rotate(heads[:, :, 4:], 4))


@pytest.mark.parametrize(
    ("kind", "adds", "rotates"),
    [("sinusoidal", 1, 0), ("sinusoidal_halves", 1, 0), ("learned", 1, 0), ("rotary", 0, 1), ("none", 0, 0)],
)
def test_each_kind_uses_one_hook_or_none(kind: str, adds: int, rotates: int) -> None:
    positions = make(kind)
    x, heads = torch.randn(2, 7, 12), torch.randn(2, 3, 7, 6)
    assert (not torch.equal(positions.add(x, 1), x)) == bool(adds)
    assert (not torch.equal(positions.rotate(heads, 1), heads)) == bool(rotates)


def test_every_kind_is_tested() -> None:
    assert set(POSITIONS) == {"sinusoidal", "sinusoidal_halves", "learned", "rotary", "none"}
