"""Layouts: sequences as blocks of queries with the keys that they may attend to, so that cost follows a pattern."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Int, Shaped
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
