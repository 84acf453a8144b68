"""Attention patterns, which decide by position if a query may attend to a key, and blocks that compute sparse patterns.

Full, causal and local attention, and the factors of the Sparse Transformer (Child et al. 2019). To add a pattern, write
a class and add a row to PATTERNS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from transduce.nn.masks import WIDTH

MIN_BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """N blocks of C queries and E keys that together contain all (query, key) pairs of a sparse pattern.

    queries, keys: Positions in a sequence of n; positions below 0 and from n on are padding. Every position from 0 to
    n - 1 is a query of exactly one block. Query c and key e have the same distance in every block, so that positional
    scores of the first block hold for all blocks.
    """

    n: int
    queries: Int[Tensor, "N C"]
    keys: Int[Tensor, "N E"]

    def worthwhile(self) -> bool:
        """Whether computing the blocks costs less than computing all pairs of a query and a key."""
        return self.n > 2 * MIN_BLOCK and self.queries.numel() * self.keys.shape[1] < self.n**2

    def take(self, x: Shaped[Tensor, "B H T K"], positions: Int[Tensor, "N C"]) -> Shaped[Tensor, "B H N C K"]:
        """Return the vectors of x at the blocks' query or key `positions`; padding gets arbitrary vectors."""
        rows = x.flatten(0, 1).index_select(1, positions.clamp(0, self.n - 1).flatten())
        return rows.view(*x.shape[:2], *positions.shape, -1)

    def merge(self, y: Shaped[Tensor, "B H N C K"]) -> Shaped[Tensor, "B H T K"]:
        """Reorder the outputs of the blocks' queries into the order of the sequence."""
        order = self.queries.flatten().argsort()[: self.n]
        return y.flatten(0, 1).flatten(1, 2).index_select(1, order).unflatten(0, y.shape[:2])

    def mask(self) -> Bool[Tensor, "N C E"]:
        """Return a mask that is True for pairs in which neither the query nor the key is padding."""
        queries, keys = ((x >= 0) & (x < self.n) for x in (self.queries, self.keys))
        return queries[:, :, None] & keys[:, None, :]

    def dense(self, x: Shaped[Tensor, "B H N C E"], *, other: float) -> Shaped[Tensor, "B H T T"]:
        """Arrange the values of the blocks' pairs as a matrix; pairs outside all blocks get the value `other`."""
        mask = self.mask()
        rows, columns = self.queries[:, :, None].expand_as(mask)[mask], self.keys[:, None, :].expand_as(mask)[mask]
        matrix = x.new_full((*x.shape[:2], self.n, self.n), other)
        matrix[:, :, rows, columns] = x.expand(*x.shape[:2], *mask.shape)[:, :, mask]
        return matrix


def parts(n: int, size: int, device: torch.device) -> Int[Tensor, "N C"]:
    """Cut the positions 0 .. n - 1 into rows of `size` positions. The last row may continue beyond n - 1."""
    n_parts = -(-n // size)
    return torch.arange(n_parts * size, device=device).view(n_parts, size)


def padded(keys: Int[Tensor, "N E"], n: int) -> Int[Tensor, "N P"]:
    """Pad key positions with n to a multiple of WIDTH, so that sums do not depend on the length of the batch."""
    return F.pad(keys, (0, -keys.shape[1] % WIDTH), value=n)


class FullPattern:
    """The pattern of an encoder: every query may attend to every key. Also the base of all patterns."""

    contiguous = True
    """Whether the newest query may attend to all keys from `first_key` to its own position, without a mask."""
    may_be_empty = False
    """Whether there may be queries that cannot attend to any key."""

    def allowed(self, queries: Int[Tensor, "*q"], keys: Int[Tensor, "*k"]) -> Bool[Tensor, "*s"]:
        """Whether queries may attend to keys, given the positions of both; elementwise, with broadcasting."""
        return torch.ones_like(keys, dtype=torch.bool)

    def mask(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Bool[Tensor, "Q S"]:
        """Return the attention mask for all pairs of a query position and a key position."""
        return self.allowed(queries[:, None], keys[None, :]).expand(queries.shape[0], -1)

    def first_key(self, position: int) -> int:
        """Return the first position that a query at `position` or later may attend to."""
        return 0


class CausalPattern(FullPattern):
    """The pattern of a decoder: a query may attend to its own position and to earlier positions (paper 3.2.3)."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries


class SparsePattern(FullPattern, ABC):
    """Base of sparse patterns with parts of `size` positions; `causal` patterns hide later keys."""

    def __init__(self, size: int, *, causal: bool = True) -> None:
        self.size, self.causal = size, causal

    @abstractmethod
    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether the pattern connects queries with keys (positions, elementwise), apart from causality."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        related = self.related(queries, keys)
        return related & (keys <= queries) if self.causal else related

    @abstractmethod
    def blocks(self, n: int, device: torch.device) -> Blocks:
        """Return the blocks for a sequence of n positions; their number of pairs grows as the pattern's pairs do."""


class LocalPattern(SparsePattern):
    """A query may attend to the nearest `size` positions, its own included (Child et al. 2019; Beltagy et al. 2020).

    The first factor of the strided pattern. The authors' code has `size` positions too; their equation has one more.
    """

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys > queries - self.size) & (keys < queries + self.size)

    def first_key(self, position: int) -> int:
        return max(0, position - self.size + 1)

    def blocks(self, n: int, device: torch.device) -> Blocks:
        """Return one block per part: its keys are its own part, the part before and, in an encoder, the part after."""
        queries = parts(n, max(self.size, MIN_BLOCK), device)
        shifts = range(-1, 1 if self.causal else 2)
        return Blocks(n, queries, torch.cat([queries + shift * queries.shape[1] for shift in shifts], 1))


class StridedPattern(SparsePattern):
    """Query i may attend to key j if (i - j) mod l = 0, with l = `size` (Child et al. 2019, 4.2, strided)."""

    contiguous = False

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries % self.size == keys % self.size

    def blocks(self, n: int, device: torch.device) -> Blocks:
        """Return `size` blocks; block i consists of the i-th position of each part."""
        columns = parts(n, self.size, device).T
        return Blocks(n, columns, padded(columns, n))


class BlockPattern(SparsePattern):
    """Query i may attend to key j of its block of l = `size` positions: floor(j / l) = floor(i / l) (4.2, fixed)."""

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries // self.size == keys // self.size

    def first_key(self, position: int) -> int:
        return position // self.size * self.size

    def blocks(self, n: int, device: torch.device) -> Blocks:
        return Blocks(n, *[parts(n, self.size, device)] * 2)


class SummaryPattern(SparsePattern):
    """A query may attend to key j if it is among the last c = `summary` of a block: j mod l >= l - c (4.2, fixed)."""

    contiguous = False
    may_be_empty = True

    def __init__(self, size: int, summary: int, *, causal: bool = True) -> None:
        super().__init__(size, causal=causal)
        self.summary = min(size, summary)

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys % self.size >= self.size - self.summary

    def blocks(self, n: int, device: torch.device) -> Blocks:
        """Return a single block, with all positions as queries and the ends of all parts as keys."""
        ends = parts(n, self.size, device)[:, -self.summary :].flatten()
        return Blocks(n, torch.arange(n, device=device)[None], padded(ends[None], n))


Factors = tuple[FullPattern, ...]
Pattern = FullPattern | Factors
"""A layer's pattern: one for all heads, or one factor for each group of heads (Child et al. 2019, 4.3, third way)."""

PATTERNS: dict[str, Callable[..., Factors]] = {
    "full": lambda size, summary, causal: (CausalPattern() if causal else FullPattern(),),
    "local": lambda size, summary, causal: (LocalPattern(size, causal=causal),),
    "strided": lambda size, summary, causal: (LocalPattern(size, causal=causal), StridedPattern(size, causal=causal)),
    "fixed": lambda size, summary, causal: (
        BlockPattern(size, causal=causal),
        SummaryPattern(size, summary, causal=causal),
    ),
}
"""Functions (size, summary, causal) that make a pattern's factors; in the paper, size is l and summary is c."""

SPREADS: dict[str, Callable[[Factors], tuple[Pattern, ...]]] = {
    "heads": lambda factors: (factors,),
    "layers": lambda factors: factors,
}
"""Functions that distribute a pattern's factors over heads or over layers; layers use the resulting tuple in turn."""


def make_patterns(
    name: str, *, size: int = 0, summary: int = 0, spread: str = "heads", causal: bool
) -> tuple[Pattern, ...]:
    """Make the attention patterns of a stack of layers; of the n patterns returned, layer i uses number i mod n.

    `size`: the window or stride, in positions. `summary`: number of summary positions of a block. `spread`: whether the
    factors of a sparse pattern belong to different "heads" or to different "layers".
    """
    factors = PATTERNS[name](size, summary, causal)
    return factors if len(factors) == 1 else SPREADS[spread](factors)
