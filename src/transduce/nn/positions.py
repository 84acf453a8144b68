"""How a Transformer knows of order: objects with two hooks, `add` on embeddings, `rotate` on queries and keys."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(n_positions: int, d_model: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same), [n_positions, d_model], float32 (paper 3.5)."""
    position = torch.arange(offset, offset + n_positions, dtype=torch.float64, device=device)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position[:, None] * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()


def halves(d_model: int) -> Int[Tensor, " D"]:
    """The columns of `sinusoids` in the order of `sinusoidal_halves`: those of the sines, then those of the cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


def rotate_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., T, K] as K/2 planes by angle [T, K/2] (Su et al. 2021, 3.4)."""
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def places_within(documents: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Each token's place in its own document, from 0; `documents` is the number of the document of each token.

    >>> places_within(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != F.pad(documents, (1, 0), value=-1)[:, :-1]
    return place - torch.where(begins, place, 0).cummax(1).values


class Positions(Protocol):
    """What a kind of positions offers."""

    def add(self, x: Float[Tensor, "B T D"], offset: int) -> Float[Tensor, "B T D"]:
        """Embeddings with position information, for positions offset .. offset + T."""
        ...

    def add_at(self, x: Float[Tensor, "B T D"], places: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Embeddings with position information, each for the place that is told."""
        ...

    def rotate(self, x: Float[Tensor, "B H T K"], offset: int) -> Float[Tensor, "B H T K"]:
        """Queries or keys of self-attention with position information; only distances may matter."""
        ...


class NoPositions(nn.Module):
    """No positions at all: an encoder that sees a bag of words."""

    def __init__(self, *, d_model: int, d_head: int, max_positions: int) -> None:
        super().__init__()
        self.d_model, self.d_head, self.max_positions = d_model, d_head, max_positions

    def add(self, x: Tensor, offset: int) -> Tensor:
        """x as it is."""
        return x

    def add_at(self, x: Tensor, places: Tensor) -> Tensor:
        """x as it is."""
        return x

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        """x as it is."""
        return x


class SinusoidalPositions(NoPositions):
    """The paper's fixed sinusoids, added to the embeddings (3.5); any length."""

    def __init__(self, *, d_model: int, d_head: int, max_positions: int) -> None:
        super().__init__(d_model=d_model, d_head=d_head, max_positions=max_positions)
        self.register_buffer("table", self._rows(max_positions), persistent=False)
        self.table: Tensor

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """The vectors of positions offset .. offset + n, [n, D]."""
        return sinusoids(n, self.d_model, offset=offset, device=device)

    def add(self, x: Tensor, offset: int) -> Tensor:
        """x plus the sinusoids of its positions."""
        end = offset + x.shape[1]
        known = end <= self.max_positions
        rows = self.table[offset:end] if known else self._rows(x.shape[1], offset=offset, device=x.device)
        return x + rows.to(x.dtype)

    def add_at(self, x: Tensor, places: Tensor) -> Tensor:
        """x plus the sinusoids of these places."""
        n = x.shape[1]
        rows = self.table if n <= self.max_positions else self._rows(n, device=x.device)
        return x + rows[places].to(x.dtype)


class HalvedSinusoidalPositions(SinusoidalPositions):
    """The same sinusoids, all sines in the first half of the columns and all cosines in the second, as Marian has them.

    A model with these is one with the paper's whose residual stream has its columns in another order.
    """

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        pairs = super()._rows(n, offset=offset, device=device)
        return pairs[:, halves(self.d_model).to(pairs.device)]


class LearnedPositions(NoPositions):
    """A learned vector a position (paper table 3, row E); at most `max_positions`."""

    def __init__(self, *, d_model: int, d_head: int, max_positions: int) -> None:
        super().__init__(d_model=d_model, d_head=d_head, max_positions=max_positions)
        self.embedding = nn.Embedding(max_positions, d_model)

    def add(self, x: Tensor, offset: int) -> Tensor:
        """x plus the learned vectors of its positions; ValueError past `max_positions`."""
        end = offset + x.shape[1]
        if end > self.max_positions:
            raise ValueError(f"a sequence of {end} tokens; learned positions hold {self.max_positions}")
        return x + self.embedding.weight[offset:end].to(x.dtype)

    def add_at(self, x: Tensor, places: Tensor) -> Tensor:
        """x plus the learned vectors of these places, which are below `max_positions`."""
        return x + self.embedding(places).to(x.dtype)


class RotaryPositions(NoPositions):
    """Queries and keys rotated by their position, so that their product knows only the distance (Su et al. 2021)."""

    def rotate(self, x: Tensor, offset: int) -> Tensor:
        """x rotated: plane i of position p by p * 10000^(-2i/K)."""
        plane = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=x.device)
        position = torch.arange(offset, offset + x.shape[-2], dtype=torch.float32, device=x.device)
        return rotate_pairs(x, position[:, None] * torch.exp(plane * (-math.log(10000.0) / self.d_head)))


POSITIONS: dict[str, type[NoPositions]] = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_halves": HalvedSinusoidalPositions,
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "none": NoPositions,
}
