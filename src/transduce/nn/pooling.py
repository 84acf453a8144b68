"""From the vectors of a sequence to one vector: the POOLINGS table. Padding is ignored."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

Pooling = Callable[[Float[Tensor, "B S D"], Bool[Tensor, "B S"]], Float[Tensor, "B D"]]
"""Takes the vectors, and a mask of those that are tokens: in each row the first and possibly others."""


def first(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """The vector of the first token: BERT's [CLS] (Devlin et al. 2019, section 3)."""
    return x[:, 0]


def mean(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """The mean over the tokens."""
    counted = real[:, :, None].to(x.dtype)
    return (x * counted).sum(1) / counted.sum(1)


def maximum(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """The largest value of each column over the tokens (Collobert et al. 2011; Kim 2014)."""
    return x.masked_fill(~real[:, :, None], float("-inf")).amax(1)


POOLINGS: dict[str, Pooling] = {"first": first, "mean": mean, "max": maximum}
