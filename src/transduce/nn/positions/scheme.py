"""The interface of positional schemes, and the scheme without positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.linear import batched_product

Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Vectors that relations add to keys and to values (Shaw et al. 2018).

    index: the relation of each query and key, broadcast to [..., Q, S]. Products are made row by row of the batch, so
    that they do not depend on its size.
    """

    index: Int[Tensor, "*b Q S"]
    key_vectors: Float[Tensor, "R K"]
    value_vectors: Float[Tensor, "R K"]

    def scores(self, query: Float[Tensor, "*B Q K"]) -> Float[Tensor, "*B Q S"]:
        """q_i a_ij^K / sqrt(K), the second term of equation 4, from one product with all vectors (section 3.3)."""
        vectors = self.key_vectors.T.expand(*query.shape[:-2], -1, -1)
        of_each = batched_product(query, vectors) / math.sqrt(query.shape[-1])  # [..., Q, R]
        return of_each.gather(-1, self.index.expand(*of_each.shape[:-1], -1))

    def values(self, weights: Float[Tensor, "*B Q S"]) -> Float[Tensor, "*B Q K"]:
        """sum_j alpha_ij a_ij^V, the second term of equation 3: weights are summed by relation first."""
        of_each = weights.new_zeros(*weights.shape[:-1], len(self.value_vectors))
        of_each = of_each.scatter_add(-1, self.index.expand(weights.shape), weights)
        vectors = self.value_vectors.to(weights.dtype).expand(*weights.shape[:-2], -1, -1)
        return batched_product(of_each, vectors)


class Positions(nn.Module):
    """A positional scheme. This one does nothing; a subclass overrides at most one hook, and `setup` if it has weights.

    add: changes the embeddings.
    rotation: changes queries and keys of self-attention.
    score_bias: is added to the scores of self-attention.
    relations: add vectors to the keys and values of self-attention.

    trains_in_attention: whether it has weights that only self-attention uses.

    All but `add` must depend on relative distances only. A scheme belongs to one stack; all its layers
    share the scheme's weights. The hooks are called once per forward.
    """

    trains_in_attention: ClassVar[bool] = False

    def __init__(
        self, *, d_model: int, d_head: int, max_positions: int, n_heads: int = 1, causal: bool = False
    ) -> None:
        """`causal`: the stack is a decoder, whose keys never come after their query."""
        super().__init__()
        self.d_model, self.d_head, self.n_heads = d_model, d_head, n_heads
        self.max_positions, self.causal = max_positions, causal
        self.setup()

    def setup(self) -> None:
        """Create weights and buffers. Models reinitialize every `nn.Embedding`; an `nn.Parameter` keeps its values."""

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """What is wrong with the widths of a head's queries and keys and of its values, if anything."""
        return None

    def add(
        self, x: Float[Tensor, "B T D"], offset: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Embeddings of the positions offset .. offset + T, or of `positions`, all below T."""
        return x

    def rotation(self, positions: Int[Tensor, " T"]) -> Rotate:
        """A function that rotates queries or keys [B, H, T, K] at these positions."""
        return _unchanged

    def score_bias(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H Q S"] | None:
        """A bias on the scores of queries and keys at these positions; None for no bias.

        Keys may come after their query (they are masked later) and positions need not be consecutive.
        """
        return None

    def relations(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Relations | None:
        """The relations of queries and keys at these positions, as for `score_bias`; None for none."""
        return None


def _unchanged(x: Tensor) -> Tensor:
    return x


def document_positions(documents: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The position of each token in its own document; `documents` is the number of each token's document.

    >>> document_positions(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    position = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != F.pad(documents, (1, 0), value=-1)[:, :-1]
    return position - torch.where(begins, position, 0).cummax(1).values
