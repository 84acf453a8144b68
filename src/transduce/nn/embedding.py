"""Embeddings of tokens (paper 3.4) and of vectors, with positions (3.5), norm and dropout (5.4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.loss import label_smoothed_loss
from transduce.nn.positions import Positions


class SegmentEmbedding(nn.Embedding):
    """A learned vector for each segment, such as each of two texts in a pair (Devlin et al. 2019)."""

    def forward(self, segments: Int[Tensor, "B T"] | None) -> Float[Tensor, "*T D"]:
        """Return the vector of each token's segment number or, for None, segment 0's vector [D]."""
        if segments is None:
            return self.weight[0]
        return super().forward(segments)


class TokenTable(nn.Embedding):
    """The embedding matrix E, a vector for each token. It may also be the matrix before the softmax (paper 3.4)."""

    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Function that computes x W^T + b; a subclass may use another implementation."""

    def logits(self, hidden: Float[Tensor, "*B D"], bias: Float[Tensor, " V"] | None) -> Float[Tensor, "*B V"]:
        """Compute the logits of all tokens: hidden E^T + bias."""
        return self.linear(hidden, self.weight, bias)

    def loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        *,
        bias: Float[Tensor, " V"] | None = None,
        smoothing: float = 0.1,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
        """Compute the loss of `targets` from hidden states; `label_smoothed_loss` describes the result."""
        return label_smoothed_loss(hidden, self.weight, targets, bias=bias, smoothing=smoothing, linear=self.linear)


class TokenEmbedding(nn.Module):
    """Embedding of tokens: E[ids] * scale + positions, then an optional norm, and dropout."""

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        positions: Positions,
        dropout: float = 0.0,
        scale: float | None = None,
        norm: nn.Module | None = None,
        alias: tuple[int, int] | None = None,
    ) -> None:
        """`scale`: default sqrt(d_model). `alias`: a pair of ids; the first id uses the second id's vector."""
        super().__init__()
        self.table = TokenTable(vocab_size, d_model)
        self.positions = positions
        self.scale = math.sqrt(d_model) if scale is None else scale
        self.norm = norm or nn.Identity()
        self.alias = alias
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        offset: int = 0,
        more: Float[Tensor, "*T D"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Embed `ids` at the T positions from `offset` on, or at `positions` if given.

        `more`: other vectors to add, such as segment vectors.
        """
        ids = self.aliased(ids)
        x = self.positions.add(self.table(ids) * self.scale, offset, positions)
        return self.dropout(self.norm(x if more is None else x + more))

    def aliased(self, ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Replace the alias, if there is one, by the id whose vector it uses."""
        return ids if self.alias is None else ids.masked_fill(ids == self.alias[0], self.alias[1])


class VectorEmbedding(nn.Module):
    """Embedding of input vectors v, such as image patches (Dosovitskiy et al. 2021, equation 1): W v + b + positions.

    An optional norm and dropout follow. A vector of NaN is padding and counts as zeros.
    """

    def __init__(
        self, width: int, d_model: int, *, positions: Positions, dropout: float = 0.0, norm: nn.Module | None = None
    ) -> None:
        """`width`: number of values of an input vector."""
        super().__init__()
        self.projection = nn.Linear(width, d_model)
        self.positions = positions
        self.norm = norm or nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, vectors: Float[Tensor, "B S N"], *, more: Float[Tensor, "*S D"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """Embed input vectors. `more`: other vectors to add, such as segment vectors."""
        dtype = self.projection.weight.dtype
        # The result has the dtype of the weights, as a table lookup has: autocast must not change it.
        x = self.projection(vectors.nan_to_num().to(dtype)).to(dtype)
        x = x if more is None else x + more
        return self.dropout(self.norm(self.positions.add(x, 0, None)))


def piece_vectors(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose outputs [B, T, D] are embeddings of tokens or input vectors, without positions.

    A forward hook on these modules can change the embeddings.
    """
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            yield module.table
        elif isinstance(module, VectorEmbedding):
            yield module.projection
