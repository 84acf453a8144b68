"""Attention of a recurrent decoder's state to the memory (Bahdanau et al. 2015; Luong et al. 2015)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from transduce.nn.attention import Attention, softmax_over_keys
from transduce.nn.linear import Linear, batched_product, wide, wide_linear


class StateAttention(Attention):
    """context = sum_j a_j m_j with a = softmax(score(s, m_j)): one head, of the width of the memory.

    What depends on the memory alone is computed once per sentence: the keys.
    """

    def __init__(self, d_hidden: int) -> None:
        super().__init__()
        self.d_hidden = d_hidden

    @abstractmethod
    def keys(self, memory: Float[Tensor, "B S H"]) -> Float[Tensor, "B S H"]:
        """What scores need of the memory."""

    @abstractmethod
    def scores(self, query: Float[Tensor, "B Q H"], keys: Float[Tensor, "B S H"]) -> Float[Tensor, "B Q S"]:
        """The scores of states."""

    def attend(
        self, query: Float[Tensor, "B Q H"], keys: Tensor, memory: Float[Tensor, "B S H"], bias: Tensor
    ) -> Float[Tensor, "B Q H"]:
        """The contexts of states; `bias` [B, 1, S] hides padding."""
        return batched_product(self.weights(query, keys, memory, bias)[:, 0], memory)

    def weights(self, query: Tensor, keys: Tensor, memory: Tensor, bias: Tensor) -> Float[Tensor, "B 1 Q S"]:
        return softmax_over_keys(self.scores(query, keys) + bias)[:, None]


class DotAttention(StateAttention):
    """score = s^T m (Luong et al. 2015, equation 8)."""

    def keys(self, memory: Tensor) -> Tensor:
        return memory

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        return batched_product(query, keys.transpose(1, 2))


class GeneralAttention(DotAttention):
    """score = s^T W m."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__(d_hidden)
        self.key = Linear(d_hidden, d_hidden, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))


class AdditiveAttention(StateAttention):
    """score = v^T tanh(W s + U m) (Bahdanau et al. 2015, A.1.2; Luong's concat)."""

    def __init__(self, d_hidden: int) -> None:
        super().__init__(d_hidden)
        self.query = Linear(d_hidden, d_hidden, bias=False)
        self.key = Linear(d_hidden, d_hidden)
        self.score = Linear(d_hidden, 1, bias=False)

    def keys(self, memory: Tensor) -> Tensor:
        return wide(self.key(memory))

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        projected = wide_linear(query, self.query.weight, None)
        hidden = torch.tanh(projected[:, :, None] + keys[:, None])  # [B, Q, S, H]
        return hidden @ wide(self.score.weight)[0]


SCORES: dict[str, type[StateAttention]] = {
    "dot": DotAttention,
    "general": GeneralAttention,
    "concat": AdditiveAttention,
}
