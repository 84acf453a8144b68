"""Token embeddings, scaled by sqrt(d_model), with positions and dropout (paper 3.4, 3.5, 5.4)."""

from __future__ import annotations

import math

from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.nn.dropout import Dropout
from transduce.nn.positions import NoPositions


class TokenEmbedding(nn.Module):
    """E[ids] * sqrt(d_model) + positions, then dropout. Tables of two embeddings may be one tensor (tied)."""

    def __init__(self, vocab_size: int, d_model: int, *, positions: NoPositions, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, d_model)
        self.positions = positions
        self.scale = math.sqrt(d_model)
        self.dropout = Dropout(dropout)

    def forward(self, ids: Int[Tensor, "B T"], *, offset: int = 0) -> Float[Tensor, "B T D"]:
        """Vectors of `ids` that stand at positions offset .. offset + T."""
        return self.dropout(self.positions.add(self.table(ids) * self.scale, offset))
