"""Embeddings of tokens (paper 3.4) and of vectors, with positions (3.5), norm and dropout (5.4)."""

from __future__ import annotations

import math

from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.native import kernels, operators
from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear
from transduce.nn.positions import Positions


class SegmentEmbedding(nn.Embedding):
    """A vector for each segment of a text: of a pair, for example (Devlin et al. 2019)."""

    def forward(self, segments: Int[Tensor, "B T"] | None) -> Float[Tensor, "*T D"]:
        """The vector of each token's segment; without segments that of segment 0, [D]."""
        if segments is None:
            return self.weight[0]
        if kernels.embeds(self, segments):
            return operators.embedding(segments, self.weight, None, 1.0, 0.0)
        return super().forward(segments)


class TokenEmbedding(nn.Module):
    """E[ids] * scale + positions, then a norm if there is one, then dropout. Tied tables share one tensor."""

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
        """`scale`: default sqrt(d_model). `alias`: an id, and the id whose vector it uses."""
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        self.positions = positions
        self.scale = math.sqrt(d_model) if scale is None else scale
        self.norm = norm or nn.Identity()
        self.alias = alias
        self.dropout = Dropout(dropout)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        offset: int = 0,
        more: Float[Tensor, "*T D"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Vectors of `ids` at positions offset .. offset + T, or at `positions`.

        `more`: other vectors to add, such as those of segments.
        """
        if self.alias is not None:
            ids = ids.masked_fill(ids == self.alias[0], self.alias[1])
        if positions is None and kernels.embeds(self.table, ids):
            vectors = self.positions.vectors(ids.shape[1], offset=offset, device=ids.device)
            is_all = more is None and isinstance(self.norm, nn.Identity)
            x = operators.embedding(ids, self.table.weight, vectors, self.scale, self.dropout.rate if is_all else 0.0)
            if is_all:
                return x
        else:
            x = self.positions.add(self.table(ids) * self.scale, offset, positions)
        return self.dropout(self.norm(x if more is None else x + more))


class VectorEmbedding(nn.Module):
    """W v + b of vectors v, as for image patches (Dosovitskiy et al. 2021, equation 1), then as for tokens.

    A vector of NaN is padding; it counts as zeros.
    """

    def __init__(
        self, width: int, d_model: int, *, positions: Positions, dropout: float = 0.0, norm: nn.Module | None = None
    ) -> None:
        """`width`: numbers of a vector."""
        super().__init__()
        self.projection = Linear(width, d_model)
        self.positions = positions
        self.norm = norm or nn.Identity()
        self.dropout = Dropout(dropout)

    def forward(
        self, vectors: Float[Tensor, "B S N"], *, more: Float[Tensor, "*S D"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """The embedded vectors. `more`: other vectors to add, such as those of segments."""
        dtype = self.projection.weight.dtype
        x = self.projection(vectors.nan_to_num().to(dtype)).to(dtype)  # as from a table, which is not autocast
        x = x if more is None else x + more
        return self.dropout(self.norm(self.positions.add(x, 0, None)))
