"""Who may attend to whom: full, causal and local attention, and the factors of the Sparse Transformer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from transduce.nn.patterns.layouts import BlockLayout, Layout, NeighbourLayout, StrideLayout, SummaryLayout

MIN_BLOCK = 32


class FullPattern:
    """Every query may attend to every key: an encoder's."""

    contiguous = True
    """Whether the last query may attend to all keys from `first_key` on."""
    may_be_empty = False
    """Whether a query may see no key."""

    def allowed(self, queries: Int[Tensor, "*q"], keys: Int[Tensor, "*k"]) -> Bool[Tensor, "*s"]:
        """True where the query at a position may attend to the key at a position; elementwise, may be broadcast."""
        return torch.ones_like(keys, dtype=torch.bool)

    def mask(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Bool[Tensor, "Q S"]:
        """`allowed` of each query and each key."""
        return self.allowed(queries[:, None], keys[None, :]).expand(queries.shape[0], -1)

    def first_key(self, position: int) -> int:
        """The first position that queries at `position` and later may attend to."""
        return 0


class CausalPattern(FullPattern):
    """A query may attend to its own position and to earlier ones (paper 3.2.3): a decoder's."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries


class SparsePattern(FullPattern, ABC):
    """What sparse patterns share: parts of `size` positions, in one direction (`causal`) or both."""

    def __init__(self, size: int, *, causal: bool = True) -> None:
        self.size, self.causal = size, causal

    @abstractmethod
    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The pattern without regard to order."""

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        related = self.related(queries, keys)
        return related & (keys <= queries) if self.causal else related

    @abstractmethod
    def layout(self, n: int) -> Layout:
        """How a sequence of n positions is computed at a cost that follows the pattern."""

    def worthwhile(self, n: int) -> bool:
        """Whether that is faster than a dense product: for more than two parts."""
        return n > 2 * max(self.size, MIN_BLOCK)


class LocalPattern(SparsePattern):
    """A query may attend to the nearest `size` positions, its own included (Child et al. 2019; Beltagy et al. 2020).

    The first factor of the strided pattern; the authors' code too has `size` positions, their equation one more.
    """

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys > queries - self.size) & (keys < queries + self.size)

    def first_key(self, position: int) -> int:
        """The beginning of the window."""
        return max(0, position - self.size + 1)

    def layout(self, n: int) -> Layout:
        return NeighbourLayout(n, max(self.size, MIN_BLOCK), causal=self.causal)


class StridedPattern(SparsePattern):
    """A query may attend to every `size`-th position: (i - j) mod l = 0 (Child et al. 2019, 4.2, strided)."""

    contiguous = False

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries % self.size == keys % self.size

    def layout(self, n: int) -> Layout:
        return StrideLayout(n, self.size)


class BlockPattern(SparsePattern):
    """A query may attend to its own block: floor(j / l) = floor(i / l), the fixed pattern's first factor (4.2)."""

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return queries // self.size == keys // self.size

    def first_key(self, position: int) -> int:
        return position // self.size * self.size

    def worthwhile(self, n: int) -> bool:
        """Whether fewer pairs of a query and a key are in whole blocks than in all."""
        return n > MIN_BLOCK and -(-n // self.size) * self.size**2 < n * n

    def layout(self, n: int) -> Layout:
        return BlockLayout(n, self.size)


class SummaryPattern(SparsePattern):
    """A query may attend to the last `summary` positions of every block: j mod l >= l - c (4.2, fixed)."""

    contiguous = False
    may_be_empty = True

    def __init__(self, size: int, summary: int, *, causal: bool = True) -> None:
        super().__init__(size, causal=causal)
        self.summary = min(size, summary)

    def related(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys % self.size >= self.size - self.summary

    def worthwhile(self, n: int) -> bool:
        """Whether the ends of all blocks are at most half of the keys; padding costs more in a short part of one."""
        return 4 * n >= self.size and n > MIN_BLOCK and 2 * self.summary * -(-n // self.size) <= n

    def layout(self, n: int) -> Layout:
        return SummaryLayout(n, self.size, self.summary)


class HeadsPattern(FullPattern):
    """Each factor is the pattern of a group of heads (Child et al. 2019, 4.3, the third way to combine factors)."""

    contiguous = False

    def __init__(self, factors: Sequence[FullPattern], *, n_heads: int) -> None:
        """Equal groups; the first ones have a head more if the number of heads is no multiple."""
        self.factors = tuple(factors)
        self.n_heads = [len(range(i, n_heads, len(factors))) for i in range(len(factors))]

    def first_key(self, position: int) -> int:
        return min(factor.first_key(position) for factor in self.factors)


Factors = tuple[FullPattern, ...]

PATTERNS: dict[str, Callable[..., Factors]] = {
    "full": lambda size, summary, causal: (CausalPattern() if causal else FullPattern(),),
    "local": lambda size, summary, causal: (LocalPattern(size, causal=causal),),
    "strided": lambda size, summary, causal: (LocalPattern(size, causal=causal), StridedPattern(size, causal=causal)),
    "fixed": lambda size, summary, causal: (
        BlockPattern(size, causal=causal),
        SummaryPattern(size, summary, causal=causal),
    ),
}
"""The factors of each pattern of whole stacks, from the window (the paper's stride l) and the summary (c)."""

SPREADS: dict[str, Callable[[Factors, int], Factors]] = {
    "heads": lambda factors, n_heads: (HeadsPattern(factors, n_heads=n_heads),),
    "layers": lambda factors, n_heads: factors,
}
"""How factors are spread: the patterns of the layers, one after another and again from the first."""


def make_patterns(
    name: str, *, size: int = 0, summary: int = 0, spread: str = "heads", n_heads: int, causal: bool
) -> Factors:
    """The patterns of a stack's layers, of which layer i has number i mod their number."""
    factors = PATTERNS[name](size, summary, causal)
    return factors if len(factors) == 1 else SPREADS[spread](factors, n_heads)
