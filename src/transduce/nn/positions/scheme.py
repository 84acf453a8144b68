"""The interface of positional schemes, and the scheme without positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

Rotate = Callable[[Tensor], Tensor]


class Positions(nn.Module):
    """A positional scheme. This one does nothing; a subclass overrides one of the three hooks, and `setup`.

    add: changes the embeddings.
    rotation: changes queries and keys of self-attention.
    score_bias: is added to the scores of self-attention.

    The last two may depend on distances only. A scheme serves one stack; all its layers share the scheme's weights.
    """

    def __init__(
        self, *, d_model: int, d_head: int, max_positions: int, n_heads: int = 1, causal: bool = False
    ) -> None:
        """`causal`: the stack is a decoder, whose keys never come after their query."""
        super().__init__()
        self.d_model, self.d_head, self.n_heads = d_model, d_head, n_heads
        self.max_positions, self.causal = max_positions, causal
        self.setup()

    def setup(self) -> None:
        """Create weights and buffers."""

    @classmethod
    def problem(cls, *, d_head: int) -> str | None:
        """What is wrong with the sizes, if anything."""
        return None

    def add(
        self, x: Float[Tensor, "B T D"], offset: int = 0, places: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Embeddings of the positions offset .. offset + T, or of the positions `places`, all below T."""
        return x

    def rotation(self, positions: Int[Tensor, " T"]) -> Rotate:
        """A function that rotates queries or keys [B, H, T, K] at these positions."""
        return _unchanged

    def score_bias(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H Q S"] | None:
        """A bias on the scores of queries and keys at these positions; None for no bias."""
        return None


def _unchanged(x: Tensor) -> Tensor:
    return x


def places_within(documents: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The position of each token in its own document; `documents` is the number of each token's document.

    >>> places_within(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != F.pad(documents, (1, 0), value=-1)[:, :-1]
    return place - torch.where(begins, place, 0).cummax(1).values
