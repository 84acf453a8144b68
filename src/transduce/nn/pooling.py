"""Pool the token vectors of a text into one vector, ignoring padding. POOLINGS is the table of methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.convolutional import windows

Pool = Callable[[Float[Tensor, "B S D"], Bool[Tensor, "B S"]], Float[Tensor, "B D"]]
"""Function that pools vectors, given a mask that is False at padding; the first vector of a row is never padding."""


def first(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """Return the vector of each text's first token, which is [CLS] in BERT (Devlin et al. 2019, section 3)."""
    return x[:, 0]


def mean(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    counted = real[:, :, None].to(x.dtype)
    return (x * counted).sum(1) / counted.sum(1).clamp_min(1)


def maximum(x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
    """Return the maximum of each column over a text's tokens (Collobert et al. 2011; Kim 2014)."""
    return x.masked_fill(~real[:, :, None], float("-inf")).amax(1)


class Pooler(nn.Module):
    """BERT's pooler, tanh(W x + b), for a vector x pooled by any function (default: the first token's vector)."""

    def __init__(self, d_model: int, *, bias: bool, pool: Pool = first) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model, bias=bias)
        self.pool = pool

    def forward(self, x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
        return self.dense(self.pool(x, real)).tanh()


class ConvPooler(nn.Module):
    """A convolution of width 3 with ReLU, then the maximum of each column over the tokens (Kim 2014, section 2).

    max_t max(0, W [x_t-1; x_t; x_t+1] + b). It learns short phrases from far less text than attention.
    """

    def __init__(self, d_model: int, *, bias: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(3 * d_model, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "B S D"], real: Bool[Tensor, "B S"]) -> Float[Tensor, "B D"]:
        x = F.pad(x.masked_fill(~real[:, :, None], 0), (0, 0, 1, 1))  # [B, S + 2, D]
        return maximum(self.dense(windows(x, 3)).relu(), real)


POOLINGS: dict[str, Callable[..., nn.Module]] = {
    "first": Pooler,
    "mean": partial(Pooler, pool=mean),
    "max": partial(Pooler, pool=maximum),
    "conv": ConvPooler,
}
"""Poolers by the value of the setting `model.pooling`; each is made from `d_model` and `bias`."""
