"""Masks: bool, True = may attend, combined with `&`, made once per forward (paper 3.2.3)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

HIDDEN = -1e30
"""The bias that hides a key: finite, so that a row that may attend to nothing attends evenly."""


def padding_mask(ids: Int[Tensor, "B S"], *, pad: int = 0) -> Bool[Tensor, "B 1 S"]:
    """Every query may attend to the positions of `ids` that are not padding."""
    return (ids != pad)[:, None, :]


def attention_bias(mask: Bool[Tensor, "B T S"]) -> Float[Tensor, "B 1 T S"]:
    """The bias on attention scores for a mask: 0 where it is True, very negative elsewhere.

    A row that may attend to nothing has even weights, finite in value and gradient.
    """
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)[:, None]
