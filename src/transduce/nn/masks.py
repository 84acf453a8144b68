"""Attention masks (paper 3.2.3): bool tensors, True = may attend, combined with `&`, made once per forward."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

PAD = 0
"""Token id of padding, in inputs and targets."""
WIDTH = 16
"""Padded lengths are a multiple of this. It is itself a multiple of every CPU's vector width in float32 numbers."""
HIDDEN = -1e30
"""Attention bias that hides a key. As it is finite, a query whose keys are all hidden has even weights, not NaN."""


SourceInput = Int[Tensor, "B S"] | Float[Tensor, "B S N"]
"""Input of an encoder: token ids with PAD as padding, or vectors of N numbers with NaN as padding."""


def is_real(inputs: SourceInput) -> Bool[Tensor, "B S"]:
    """Return a mask that is False at padding."""
    return ~inputs[..., 0].isnan() if inputs.is_floating_point() else inputs != PAD


def padding_mask(inputs: SourceInput) -> Bool[Tensor, "B 1 S"]:
    """Return the attention mask that hides padding from all queries."""
    return is_real(inputs)[:, None, :]


def pad_memory(
    x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B *one S"], *, more: int = 0
) -> tuple[Float[Tensor, "B P D"], Bool[Tensor, "B *one P"]]:
    """Pad vectors and their mask, so that the new number of positions P plus `more` is divisible by WIDTH.

    `more`: positions that the caller will add. A CPU adds up attention weights in an order that depends on the number
    of keys modulo its vector width. With this padding, results do not depend on the longest sentence of the batch.
    """
    missing = -(x.shape[1] + more) % WIDTH
    return F.pad(x, (0, 0, 0, missing)), F.pad(mask, (0, missing))


def attention_bias(mask: Bool[Tensor, "B *N T S"]) -> Float[Tensor, "B 1 *N T S"]:
    """Convert a mask to a bias on attention scores: 0 if a query may attend to a key, very negative (HIDDEN) if not.

    A query that may attend to no key has even weights, with finite values and gradients.
    """
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)[:, None]


def later_keys(n_queries: int, n_keys: int, device: torch.device) -> Float[Tensor, "Q C"]:
    """Return the causal bias [Q, C] for queries at the last `n_queries` of the keys' positions."""
    return torch.full((n_queries, n_keys), HIDDEN, device=device).triu(n_keys - n_queries + 1)
