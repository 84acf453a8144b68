"""Vectors that are added to the embeddings: sinusoids and learned vectors (paper 3.5)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from transduce.nn.positions.scheme import Positions

TABLE_ROWS = 1 << 14
"""Sinusoids that are kept in memory; those of later positions are computed on demand."""


def sinusoids(n_positions: int, d_model: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same), [n_positions, d_model], float32 (paper 3.5)."""
    position = torch.arange(offset, offset + n_positions, dtype=torch.float64, device=device)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position[:, None] * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()


def halves(d_model: int) -> Int[Tensor, " D"]:
    """The columns of `sinusoids` in the order of `sinusoidal_halves`: all sines, then all cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


class SinusoidalPositions(Positions):
    """The paper's fixed sinusoids (3.5); any length."""

    def setup(self) -> None:
        """Compute the first rows; on the meta device, where `arange` imports torch's compiler, only their shape."""
        n = min(self.max_positions, TABLE_ROWS)
        on_meta = torch.get_default_device().type == "meta"
        self.register_buffer("table", torch.empty(n, self.d_model) if on_meta else self._rows(n), persistent=False)
        self.table: Tensor

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """The vectors of positions offset .. offset + n, [n, D]."""
        return sinusoids(n, self.d_model, offset=offset, device=device)

    def add(self, x: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        end = offset + x.shape[1]
        known = end <= len(self.table)
        rows = self.table[offset:end] if known else self._rows(x.shape[1], offset=offset, device=x.device)
        return x + (rows if positions is None else rows[positions]).to(x.dtype)


class HalvedSinusoidalPositions(SinusoidalPositions):
    """The same sinusoids with all sines in the first half of the columns and all cosines in the second, as in Marian.

    A model with these equals one with the paper's whose residual stream has its columns in another order.
    """

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        pairs = super()._rows(n, offset=offset, device=device)
        return pairs[:, halves(self.d_model).to(pairs.device)]


class LearnedPositions(Positions):
    """A learned vector for each of `max_positions` positions (paper table 3, row E)."""

    def setup(self) -> None:
        self.embedding = nn.Embedding(self.max_positions, self.d_model)

    def add(self, x: Tensor, offset: int = 0, positions: Tensor | None = None) -> Tensor:
        """x plus the vectors of its positions; ValueError past `max_positions`."""
        if positions is not None:
            return x + self.embedding(positions).to(x.dtype)
        end = offset + x.shape[1]
        if end > self.max_positions:
            raise ValueError(f"a sequence of {end} tokens; there are {self.max_positions} learned positions")
        return x + self.embedding.weight[offset:end].to(x.dtype)
