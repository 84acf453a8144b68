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
    """A vector for each segment of a text, such as the two texts of a pair (Devlin et al. 2019)."""

    def forward(self, segments: Int[Tensor, "B T"] | None) -> Float[Tensor, "*T D"]:
        """The vector of each token's segment; without segments, the vector of segment 0, [D]."""
        if segments is None:
            return self.weight[0]
        return super().forward(segments)


class TokenTable(nn.Embedding):
    """The table E of token vectors. If it is tied to the output, it is also the matrix before the softmax (3.4)."""

    linear: Callable[..., Tensor] = staticmethod(F.linear)
    """Computes x W^T + b; a subclass may replace it by a faster function."""

    def logits(self, hidden: Float[Tensor, "*B D"], bias: Float[Tensor, " V"] | None) -> Float[Tensor, "*B V"]:
        """Unnormalized log-probabilities of the tokens: hidden E^T + bias."""
        return self.linear(hidden, self.weight, bias)

    def loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        *,
        bias: Float[Tensor, " V"] | None = None,
        smoothing: float = 0.1,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
        """Compute the logits of `hidden` and their `label_smoothed_loss` for the targets."""
        return label_smoothed_loss(hidden, self.weight, targets, bias=bias, smoothing=smoothing, linear=self.linear)


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
        """`scale`: factor of the vectors (default: sqrt(d_model)). `alias`: an id, and the id whose vector it uses."""
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
        """Vectors of `ids` at positions offset .. offset + T, or at `positions`.

        `more`: other vectors to add, such as those of segments.
        """
        ids = self.aliased(ids)
        x = self.positions.add(self.table(ids) * self.scale, offset, positions)
        return self.dropout(self.norm(x if more is None else x + more))

    def aliased(self, ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """Replace the aliased id, if there is one, by the id whose vector it uses."""
        return ids if self.alias is None else ids.masked_fill(ids == self.alias[0], self.alias[1])


class VectorEmbedding(nn.Module):
    """W v + b for vectors v such as image patches (Dosovitskiy et al. 2021, equation 1), then positions, norm, dropout.

    A vector of NaN is padding; it counts as zeros.
    """

    def __init__(
        self, width: int, d_model: int, *, positions: Positions, dropout: float = 0.0, norm: nn.Module | None = None
    ) -> None:
        """`width`: size of an input vector."""
        super().__init__()
        self.projection = nn.Linear(width, d_model)
        self.positions = positions
        self.norm = norm or nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, vectors: Float[Tensor, "B S N"], *, more: Float[Tensor, "*S D"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """The embedded vectors. `more`: other vectors to add, such as those of segments."""
        dtype = self.projection.weight.dtype
        # in the dtype of the weights, like a table lookup, which autocast does not change
        x = self.projection(vectors.nan_to_num().to(dtype)).to(dtype)
        x = x if more is None else x + more
        return self.dropout(self.norm(self.positions.add(x, 0, None)))


def piece_vectors(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that embed tokens or input vectors: their outputs [B, T, D] do not include positions.

    A forward hook on these modules can change the vectors.
    """
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            yield module.table
        elif isinstance(module, VectorEmbedding):
            yield module.projection
