"""The layers of the Star-Transformer: a ring of satellite nodes around a relay node (Guo et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.attention import CrossAttention, FullProjection, head_width
from transduce.nn.dtypes import wide
from transduce.nn.masks import attention_bias
from transduce.nn.pooling import maximum, mean


@dataclass(frozen=True, slots=True)
class Ring:
    """Indices of each token's two neighbours in a ring that joins the ends of its sentence.

    before, after: rows of the neighbours in a batch flattened to [B * S, D]; padding is its own neighbour.
    real: False at padding.
    """

    before: Int[Tensor, " N"]
    after: Int[Tensor, " N"]
    real: Bool[Tensor, "B S"]

    @classmethod
    def of(cls, real: Bool[Tensor, "B S"]) -> Ring:
        """Make the rings of a batch of sentences; `real` is False at padding, which is at a sentence's ends."""
        width = real.shape[1]
        column = torch.arange(width, device=real.device)
        first = real.int().argmax(1, keepdim=True)
        n = real.sum(1, keepdim=True).clamp_min(1)
        start = torch.arange(len(real), device=real.device)[:, None] * width

        def rows(step: int) -> Tensor:
            return (start + torch.where(real, first + (column - first + step) % n, column)).flatten()

        return cls(rows(-1), rows(1), real)

    def neighbours(self, x: Float[Tensor, "B S D"]) -> list[Tensor]:
        """Return three tensors [B, S, D]: each token's previous vector in the ring, its own vector, and its next."""
        rows = x.flatten(0, 1)
        before, after = (rows.index_select(0, which).view_as(x) for which in (self.before, self.after))
        return [before, x, after]


class SatelliteAttention(nn.Module):
    """Multi-head attention of each token to five vectors: its neighbours, itself, its embedding and the relay node.

    Section 3.1, equations 4 and 5. A vector's key and value are projected once, although several tokens attend to it.
    """

    def __init__(self, d_model: int, *, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.n_heads, self.scale = n_heads, head_width(d_model, n_heads) ** -0.5
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key_value = FullProjection(d_model, (1, 1), d_head=d_model, bias=bias)
        self.output = nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self, x: Float[Tensor, "B S D"], embedded: Float[Tensor, "B S D"], relay: Float[Tensor, "B 1 D"], ring: Ring
    ) -> Float[Tensor, "B S D"]:
        sizes = [x.shape[1], x.shape[1], 1]
        query = self.query(x) * self.scale
        pair = (part[:, 0] for part in self.key_value(torch.cat([x, embedded, relay], dim=1)))
        parts = (y.split(sizes, dim=1) for y in pair)
        keys, values = ([*ring.neighbours(own), *others] for own, *others in parts)
        scores = torch.stack([self._heads(query * key).sum(-1) for key in keys], dim=-1)  # [B, S, H, 5]
        weights = wide(scores).softmax(-1).to(scores.dtype)
        read = [
            weight[..., None] * self._heads(value) for weight, value in zip(weights.unbind(-1), values, strict=True)
        ]
        return self.output(sum(read[1:], read[0]).flatten(2))

    def _heads(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S H K"]:
        return x.unflatten(2, (self.n_heads, -1))


class RelayAttention(CrossAttention):
    """Attention of the relay node to itself and to all satellite nodes (section 3.2)."""


class StarBlock(nn.Module):
    """One layer of a Star-Transformer: update the satellite nodes, then the relay node (sections 3.1 and 3.2).

    Each update is LayerNorm(ReLU(attention)). There are no residual connections; instead, a node attends to its own
    previous vector too.
    """

    def __init__(
        self, d_model: int, *, n_heads: int, dropout: float = 0.0, attention_dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.satellite_attention = SatelliteAttention(d_model, n_heads=n_heads, bias=bias)
        self.relay_attention = RelayAttention(d_model=d_model, n_heads=n_heads, dropout=attention_dropout, bias=bias)
        self.satellite_norm, self.relay_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        relay: Float[Tensor, "B 1 D"],
        *,
        embedded: Float[Tensor, "B S D"],
        ring: Ring,
        bias: Tensor,
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B 1 D"]]:
        """Return the satellite nodes x and the relay node after the update; `bias` [B, 1, 1, S + 1] hides padding."""
        x = self._update(self.satellite_attention(x, embedded, relay, ring), self.satellite_norm)
        key, value = self.relay_attention.key_value(torch.cat([relay, x], dim=1))
        return x, self._update(self.relay_attention(relay, key, value, bias=bias), self.relay_norm)

    def _update(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(self.dropout(F.relu(x)))


class StarEncoder(nn.Module):
    """A stack of star blocks. The cost is linear in the sentence's length; the relay node connects any two tokens."""

    def __init__(self, blocks: Iterable[StarBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self, x: Float[Tensor, "B S D"], *, real: Bool[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B 1 D"]]:
        """Return the satellite nodes, one per embedded token of x, and the relay node; `real` is False at padding.

        The relay node's first vector is the mean of the embedded tokens.
        """
        embedded, ring = x, Ring.of(real)
        relay = mean(x, real)[:, None]
        bias = attention_bias(F.pad(real, (1, 0), value=True)[:, None])
        for block in self.blocks:
            x, relay = block(x, relay, embedded=embedded, ring=ring, bias=bias)
        return x, relay


def pool_star(
    x: Float[Tensor, "B S D"], relay: Float[Tensor, "B 1 D"], real: Bool[Tensor, "B S"]
) -> Float[Tensor, "B D"]:
    """Return one vector per text: the mean of the relay node and of the tokens' maximum in each column.

    Section 4.1, in the form of the authors' code. x: satellite nodes. real: False at padding.
    """
    return (maximum(x, real) + relay[:, 0]) / 2
