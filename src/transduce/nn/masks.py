"""Masks: bool, True = may attend, combined with `&`, made once a forward (paper 3.2.3)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

HIDDEN = -1e30
"""The bias on a score that hides a key: finite, so that a row with nothing to attend to attends evenly."""


def padding_mask(ids: Int[Tensor, "B S"], *, pad: int = 0) -> Bool[Tensor, "B 1 S"]:
    """Every query may attend to the positions of `ids` that are not padding."""
    return (ids != pad)[:, None, :]


def causal_mask(n_queries: int, n_keys: int, *, device: torch.device | None = None) -> Bool[Tensor, "1 T S"]:
    """A position may attend to itself and to what stands before it; the last query is aligned with the last key."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(n_keys - n_queries)[None]


def attention_bias(mask: Bool[Tensor, "B T S"]) -> Float[Tensor, "B 1 T S"]:
    """What is added to attention scores so that softmax obeys `mask`: 0 where it may attend, very negative elsewhere.

    A row with nothing to attend to gives even weights, finite in value and gradient.
    """
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)[:, None]
