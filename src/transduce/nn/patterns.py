"""Attention patterns: which keys a query may attend to, by their positions, and how sparse patterns are computed.

Full, causal and local attention, and the factors of the Sparse Transformer. To add one: a class with a layout, and a
row of PATTERNS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from transduce.nn.masks import WIDTH


class Layout(ABC):
    """N blocks of C queries and E keys each, of a sequence of `n` positions in parts of `size`."""

    def __init__(self, n: int, size: int) -> None:
        self.n, self.size = n, size
        self.n_parts = -(-n // size)

    def split(self, x: Shaped[Tensor, "B H T K"]) -> Shaped[Tensor, "B H N C K"]:
        """The parts of the sequence, padded with zeros to whole parts."""
        return F.pad(x, (0, 0, 0, self.n_parts * self.size - self.n)).unflatten(2, (self.n_parts, self.size))

    def places(self, device: torch.device) -> Int[Tensor, "N C"]:
        """The positions of the parts; those from `n` on are padding."""
        return torch.arange(self.n_parts * self.size, device=device).view(self.n_parts, self.size)

    def queries(self, x: Shaped[Tensor, "B H T K"]) -> Shaped[Tensor, "B H N C K"]:
        """Queries in blocks."""
        return self.split(x)

    @abstractmethod
    def keys(self, x: Shaped[Tensor, "B H T K"]) -> Shaped[Tensor, "B H N E K"]:
        """The keys or values of each block of queries."""

    @abstractmethod
    def positions(self, device: torch.device) -> tuple[Int[Tensor, "N C"], Int[Tensor, "N E"]]:
        """The positions of queries and keys; those below 0 and from `n` on are padding.

        Distances in all blocks are those in the first.
        """

    def merge(self, y: Shaped[Tensor, "B H N C K"]) -> Shaped[Tensor, "B H T K"]:
        """Blocks of outputs as a sequence."""
        return y.flatten(2, 3)[:, :, : self.n]


class BlockLayout(Layout):
    """A part attends to itself."""

    def keys(self, x: Tensor) -> Tensor:
        return self.split(x)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.places(device), self.places(device)


class NeighbourLayout(Layout):
    """A part attends to itself, to the part before it and, unless `causal`, to the one after it."""

    def __init__(self, n: int, size: int, *, causal: bool) -> None:
        super().__init__(n, size)
        self.shifts = range(-1, 1 if causal else 2)

    def keys(self, x: Tensor) -> Tensor:
        """Overlapping groups of two or three parts, with zeros before the first and after the last."""
        padded = F.pad(self.split(x), (0, 0, 0, 0, 1, len(self.shifts) - 2))
        return torch.cat([padded[:, :, 1 + shift : 1 + shift + self.n_parts] for shift in self.shifts], 3)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        places = self.places(device)
        return places, torch.cat([places + shift * self.size for shift in self.shifts], 1)


class StrideLayout(Layout):
    """Block i has the i-th position of each part: `size` interleaved sequences, each of which attends to itself."""

    def queries(self, x: Tensor) -> Tensor:
        return self.split(x).transpose(2, 3)

    def keys(self, x: Tensor) -> Tensor:
        return F.pad(self.queries(x), (0, 0, 0, -self.n_parts % WIDTH))

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        columns = self.places(device).T
        return columns, F.pad(columns, (0, -self.n_parts % WIDTH), value=self.n)

    def merge(self, y: Tensor) -> Tensor:
        return super().merge(y.transpose(2, 3))


class SummaryLayout(Layout):
    """One block: all queries attend to the last `summary` positions of each part."""

    def __init__(self, n: int, size: int, summary: int) -> None:
        super().__init__(n, size)
        self.summary = summary
        self.missing = -(self.n_parts * summary) % WIDTH

    def queries(self, x: Tensor) -> Tensor:
        return x[:, :, None]

    def keys(self, x: Tensor) -> Tensor:
        ends = self.split(x)[:, :, :, -self.summary :].flatten(2, 3)
        return F.pad(ends, (0, 0, 0, self.missing))[:, :, None]

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ends = self.places(device)[:, -self.summary :].flatten()
        return torch.arange(self.n, device=device)[None], F.pad(ends, (0, self.missing), value=self.n)[None]

    def merge(self, y: Tensor) -> Tensor:
        return y[:, :, 0]


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
    """Base of sparse patterns: parts of `size` positions, in one direction (`causal`) or both."""

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
        """Block layout for n positions, at a cost that follows the pattern."""

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
"""Functions that distribute factors: the patterns of the layers, one after another and again from the first."""


def make_patterns(
    name: str, *, size: int = 0, summary: int = 0, spread: str = "heads", n_heads: int, causal: bool
) -> Factors:
    """The patterns of a stack's layers, of which layer i has number i mod their number."""
    factors = PATTERNS[name](size, summary, causal)
    return factors if len(factors) == 1 else SPREADS[spread](factors, n_heads)
