"""Masks: bool, True = may attend, combined with `&`, made once per forward (paper 3.2.3)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

PAD = 0
"""The id of padding, in inputs and targets."""
WIDTH = 16
"""A multiple of the vector width of any CPU, in numbers."""
HIDDEN = -1e30
"""The bias that hides a key: finite, so that a row that may attend to nothing attends evenly."""


SourceInput = Int[Tensor, "B S"] | Float[Tensor, "B S N"]
"""Input of an encoder: ids, with PAD as padding, or vectors, with NaN as padding."""


def is_real(inputs: SourceInput) -> Bool[Tensor, "B S"]:
    """Mask of inputs that are not padding."""
    return ~inputs[..., 0].isnan() if inputs.is_floating_point() else inputs != PAD


def padding_mask(inputs: SourceInput) -> Bool[Tensor, "B 1 S"]:
    """Attention mask that lets all queries attend to all inputs that are not padding."""
    return is_real(inputs)[:, None, :]


def pad_memory(
    x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B *one S"], *, more: int = 0
) -> tuple[Float[Tensor, "B P D"], Bool[Tensor, "B *one P"]]:
    """Pad vectors and their mask to P positions, so that P + `more` is divisible by WIDTH.

    A CPU adds up attention weights in an order that depends on the row's width modulo its vector width, so results then
    do not depend on the longest sentence of the batch.
    """
    missing = -(x.shape[1] + more) % WIDTH
    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))


def attention_bias(mask: Bool[Tensor, "B *N T S"]) -> Float[Tensor, "B 1 *N T S"]:
    """The bias on attention scores for a mask: 0 where it is True, very negative elsewhere.

    A query that may attend to no key then has equal weights for all keys, without NaN in values or gradients.
    """
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)[:, None]


def later_keys(n_queries: int, n_keys: int, device: torch.device) -> Float[Tensor, "Q C"]:
    """The bias that hides keys after the query; the queries are at the positions of the last `n_queries` keys."""
    return torch.full((n_queries, n_keys), HIDDEN, device=device).triu(n_keys - n_queries + 1)
