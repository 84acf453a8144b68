"""Attention patterns: which keys a query may attend to, by their positions, and how sparse patterns are computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from transduce.nn.masks import HIDDEN, attention_bias
from transduce.nn.positions import Positions


class FullPattern:
    """Every query may attend to every key: an encoder's."""

    block: int | None = None
    """Block size of a blocked computation, if the pattern has one."""

    def mask(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Bool[Tensor, "Q S"]:
        """True where the query at a position may attend to the key at a position."""
        return torch.ones(queries.shape[0], keys.shape[0], dtype=torch.bool, device=queries.device)

    def first_key(self, position: int) -> int:
        """The first position that queries at `position` and later may attend to."""
        return 0


class CausalPattern(FullPattern):
    """A query may attend to its own position and to earlier ones (paper 3.2.3): a decoder's."""

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[Q, S]."""
        return keys[None, :] <= queries[:, None]


class LocalPattern(CausalPattern):
    """A query may attend to the last `window` positions, its own included (Child et al. 2019; Beltagy et al. 2020)."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.block = max(window, 32)

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[Q, S]."""
        return super().mask(queries, keys) & (queries[:, None] - keys[None, :] < self.window)

    def first_key(self, position: int) -> int:
        """The beginning of the window."""
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True, eq=False)
class CausalBias:
    """The bias of a causal pattern over a whole sequence, for kernels that know this pattern."""

    def dense(self, n: int, device: torch.device) -> Float[Tensor, "1 1 T T"]:
        """The same as a matrix."""
        positions = torch.arange(n, device=device)
        return attention_bias(CausalPattern().mask(positions, positions)[None])


@dataclass(frozen=True, slots=True, eq=False)
class BlockBias:
    """The bias of attention in blocks: block n of C queries attends to the key blocks n - 1 and n.

    The cost is proportional to T * C instead of T * T.
    """

    bias: Float[Tensor, "B H N C E"]  # E = 2 C

    def queries(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H N C K"]:
        """Queries in blocks, padded with zeros to whole blocks."""
        n_blocks, size = self.bias.shape[2:4]
        return F.pad(x, (0, 0, 0, n_blocks * size - x.shape[2])).unflatten(2, (n_blocks, size))

    def keys(self, x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H N E K"]:
        """Keys or values in overlapping pairs of blocks; the first block has zeros before it."""
        blocks = F.pad(self.queries(x), (0, 0, 0, 0, 1, 0))
        return torch.cat([blocks[:, :, :-1], blocks[:, :, 1:]], 3)

    def dense(self, n: int) -> Float[Tensor, "B H T T"]:
        """The same as a matrix."""
        batch, heads, n_blocks, size = self.bias.shape[:4]
        whole = self.bias.new_full((batch, heads, n_blocks, size, (n_blocks + 1) * size), HIDDEN)
        for i in range(n_blocks):
            whole[:, :, i, :, i * size : (i + 2) * size] = self.bias[:, :, i]
        return whole.flatten(2, 3)[:, :, :n, size : size + n]


Bias = Tensor | BlockBias | CausalBias | None
"""The bias of attention: None hides nothing."""


def dense_bias(bias: Bias, query: Float[Tensor, "B H T K"]) -> Tensor | None:
    """Any bias as a matrix."""
    if isinstance(bias, CausalBias):
        return bias.dense(query.shape[2], query.device)
    return bias.dense(query.shape[2]) if isinstance(bias, BlockBias) else bias


def sequence_bias(
    pattern: FullPattern,
    positions: Int[Tensor, " T"],
    scheme: Positions,
    *,
    documents: Int[Tensor, "B T"] | None = None,
) -> Bias:
    """The bias of self-attention over a whole sequence at these positions, from 0 on.

    With `documents`, the number of the document of each token, tokens attend to their own document only.
    """
    n = positions.shape[0]
    if pattern.block is not None and n > 2 * pattern.block:
        return _block_bias(pattern, pattern.block, positions, scheme, documents)
    added = scheme.score_bias(positions, positions)
    if positions.is_cuda and type(pattern) is CausalPattern and documents is None and added is None:
        return CausalBias()
    if type(pattern) is FullPattern and documents is None:
        return None if added is None else added[None]
    mask = pattern.mask(positions, positions)[None]
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None, :])
    bias = attention_bias(mask)
    return bias if added is None else bias + added


def _block_bias(
    pattern: FullPattern, size: int, positions: Tensor, scheme: Positions, documents: Tensor | None
) -> BlockBias:
    n = len(positions)
    n_blocks = -(-n // size)
    queries = torch.arange(n_blocks * size, device=positions.device).view(n_blocks, size)
    keys = torch.cat([queries - size, queries], 1)  # [N, 2 C]; those below 0 are the padding before the first block
    mask = pattern.mask(queries[1], keys[1]) & (keys >= 0)[:, None, :]  # [N, C, 2 C]: only distances matter
    if documents is not None:
        known = F.pad(documents, (0, n_blocks * size - n), value=-1)
        mask = mask & (known[:, queries][..., :, None] == known[:, keys.clamp(min=0)][..., None, :])
    else:
        mask = mask[None]
    bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN)[:, None]  # [B or 1, 1, N, C, 2 C]
    added = scheme.score_bias(queries[1], keys[1])
    return BlockBias(bias if added is None else bias + added[:, None])
