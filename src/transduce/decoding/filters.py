"""Filters of logits before sampling: pure functions; excluded tokens become -inf."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor


def apply_temperature(logits: Float[Tensor, "*B V"], temperature: float) -> Float[Tensor, "*B V"]:
    """The logits over the temperature: below 1 sharper, above 1 flatter; ValueError unless above 0."""
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} is not above 0")
    return logits if temperature == 1 else logits / temperature


def keep_top_k(logits: Float[Tensor, "*B V"], k: int) -> Float[Tensor, "*B V"]:
    """Only the k largest of each row (Fan et al. 2018), with all that equal the k-th; 0 keeps all."""
    if k < 0:
        raise ValueError(f"top_k {k} is negative")
    if k == 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Float[Tensor, "*B V"], p: float) -> Float[Tensor, "*B V"]:
    """The fewest most likely tokens of each row that sum to at least p (Holtzman et al. 2020); 1 keeps all.

    At least one token stays, however small p is.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"top_p {p} is not within 0 .. 1")
    if p == 1:
        return logits
    ordered, place = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # of all tokens that are more likely
    ruled_out = before >= p
    ruled_out[..., 0] = False
    return logits.masked_fill(ruled_out.scatter(-1, place, ruled_out), -math.inf)
