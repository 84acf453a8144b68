"""Positional schemes: vectors added to the embeddings (paper 3.5), rotations of queries and keys, biases of attention.

To add a scheme, write a subclass of `Positions` and add it to POSITIONS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

Rotate = Callable[[Tensor], Tensor]
Matmul = Callable[[Tensor, Tensor], Tensor]
"""Function that multiplies batches of matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Relations between queries and keys; each relation adds a vector to keys and to values (Shaw et al. 2018).

    index: The relation's number for each query and key, broadcast to [..., Q, S].
    """

    index: Int[Tensor, "*b Q S"]
    key_vectors: Float[Tensor, "R K"]
    value_vectors: Float[Tensor, "R K"]

    def scores(self, query: Float[Tensor, "*B Q K"], *, matmul: Matmul = torch.matmul) -> Float[Tensor, "*B Q S"]:
        """Return the relations' part of the attention scores, q_i a_ij^K / sqrt(K): second term of equation 4."""
        vectors = self.key_vectors.T.expand(*query.shape[:-2], -1, -1)
        of_each = matmul(query, vectors) / math.sqrt(query.shape[-1])  # [..., Q, R]
        return of_each.gather(-1, self.index.expand(*of_each.shape[:-1], -1))

    def values(self, weights: Float[Tensor, "*B Q S"], *, matmul: Matmul = torch.matmul) -> Float[Tensor, "*B Q K"]:
        """Return the relations' part of the output, sum_j alpha_ij a_ij^V, the second term of equation 3."""
        of_each = weights.new_zeros(*weights.shape[:-1], len(self.value_vectors))  # sums over equal relations
        of_each = of_each.scatter_add(-1, self.index.expand(weights.shape), weights)
        vectors = self.value_vectors.to(weights.dtype).expand(*weights.shape[:-2], -1, -1)
        return matmul(of_each, vectors)


class Positions(nn.Module):
    """A positional scheme.

    The base class does nothing. A subclass overrides at most one of four methods, and `setup` if it has weights:

    vectors: the vectors that are added to the embeddings.
    rotation: a rotation of the queries and keys of self-attention.
    score_bias: a bias that is added to the scores of self-attention.
    relations: vectors that are added to the keys and values of self-attention.

    Except for `vectors`, results must depend only on distances between positions. A scheme belongs to one stack, whose
    layers share its weights (`trains_in_attention`: whether only self-attention uses them). The methods are called once
    per forward.
    """

    trains_in_attention: ClassVar[bool] = False

    def __init__(
        self, *, d_model: int, d_head: int, max_positions: int, n_heads: int = 1, causal: bool = False
    ) -> None:
        """`causal`: whether the stack is a decoder, in which queries attend to no later keys."""
        super().__init__()
        self.d_model, self.d_head, self.n_heads = d_model, d_head, n_heads
        self.max_positions, self.causal = max_positions, causal
        self.setup()

    def setup(self) -> None:
        """Create weights and buffers. Models reinitialize every `nn.Embedding`; an `nn.Parameter` keeps its values."""

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """Return an error message if the scheme does not support these widths of a head, or None."""
        return None

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Float[Tensor, "N D"] | None:
        """Return the vectors to add to the embeddings of the n positions from `offset` on; None for no vectors."""
        return None

    @final
    def add(
        self, x: Float[Tensor, "B T D"], offset: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Add to x the vectors of the T positions from `offset` on, or of `positions`, which must be below T."""
        vectors = self.vectors(x.shape[1], offset=offset, device=x.device)
        if vectors is None:
            return x
        return x + (vectors if positions is None else F.embedding(positions, vectors)).to(x.dtype)

    def rotation(self, positions: Int[Tensor, " T"]) -> Rotate:
        """Return a function that rotates queries or keys [B, H, T, K] at these positions."""
        return unchanged

    def score_bias(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H Q S"] | None:
        """Return a bias on the attention scores of queries and keys at these positions; None for no bias.

        Positions need not be consecutive. Keys may be later than a query even in a decoder, where they are masked.
        """
        return None

    def relations(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Relations | None:
        """Return the relations of queries and keys at these positions; None for no relations."""
        return None


def unchanged(x: Tensor) -> Tensor:
    return x


def document_positions(documents: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the position of each token in its document; `documents` has the document number of each token.

    >>> document_positions(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    position = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != F.pad(documents, (1, 0), value=-1)[:, :-1]
    return position - torch.where(begins, position, 0).cummax(1).values


TABLE_ROWS = 1 << 14
"""Number of positions whose sinusoids are kept in memory; the sinusoids of later positions are computed on demand."""


def sinusoids(n_positions: int, d_model: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """Compute the paper's sinusoids (3.5) for positions from `offset` on: [n_positions, d_model], float32.

    PE(pos, 2i) = sin(pos / 10000^(2i/d)) and PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).
    """
    position = torch.arange(offset, offset + n_positions, dtype=torch.float64, device=device)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position[:, None] * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()


def halves(d_model: int) -> Int[Tensor, " D"]:
    """Return the numbers of the columns of `sinusoids`: first of all sines, then of all cosines."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


class SinusoidalPositions(Positions):
    """The paper's fixed sinusoids (3.5), for sequences of any length."""

    def setup(self) -> None:
        """Compute the table of the first positions. On the meta device, `arange` would import PyTorch's compiler."""
        n = min(self.max_positions, TABLE_ROWS)
        on_meta = torch.get_default_device().type == "meta"
        self.register_buffer("table", torch.empty(n, self.d_model) if on_meta else self._rows(n), persistent=False)
        self.table: Tensor

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """Compute the vectors [n, D] of the n positions from `offset` on."""
        return sinusoids(n, self.d_model, offset=offset, device=device)

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        known = offset + n <= len(self.table)
        return self.table[offset : offset + n] if known else self._rows(n, offset=offset, device=device)


class HalvedSinusoidalPositions(SinusoidalPositions):
    """The sinusoids of transformers' MarianMTModel: all sines in the first half of the columns, then all cosines.

    Permuting the columns of its residual stream turns a model with this order into a model with the paper's order.
    """

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        pairs = super()._rows(n, offset=offset, device=device)
        return pairs[:, halves(self.d_model).to(pairs.device)]


class MarianPositions(SinusoidalPositions):
    """Marian's sinusoids, which are Tensor2Tensor's too: all sines before all cosines.

    The wavelengths are a geometric series from 2 pi to exactly 10000 * 2 pi; the paper's series ends just before.
    """

    first = 0
    """Number that the formula uses for position 0."""

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        half = self.d_model // 2
        position = torch.arange(offset, offset + n, dtype=torch.float64, device=device) + self.first
        series = torch.arange(half, dtype=torch.float64, device=device) * (-math.log(10000.0) / max(1, half - 1))
        angle = position[:, None] * series.exp()
        return F.pad(torch.cat([angle.sin(), angle.cos()], 1), (0, self.d_model % 2)).float()


class FairseqPositions(MarianPositions):
    """fairseq's sinusoids (M2M-100, NLLB): Marian's sinusoids, but position 0 has the vector of Marian's position 2."""

    first = 2


class LearnedPositions(Positions):
    """A learned vector for each of the first `max_positions` positions (paper table 3, row E)."""

    def setup(self) -> None:
        self.embedding = nn.Embedding(self.max_positions, self.d_model)

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """Return the vectors of the n positions from `offset` on; raise `ValueError` past `max_positions`."""
        if offset + n > self.max_positions:
            raise ValueError(f"a sequence of {offset + n} tokens; there are {self.max_positions} learned positions")
        return self.embedding.weight[offset : offset + n]


N_BUCKETS = 32
MAX_DISTANCE = 128
CLIP = 16


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., T, K] by angles given as cosines and sines [T, K/2] (Su et al. 2021, section 3.4).

    Column i of the first half and column i of the second half are the coordinates of plane i.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class RotaryPositions(Positions):
    """Rotary positions (Su et al. 2021): plane i of queries and keys at position p is rotated by p * 10000^(-2i/K)."""

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """Return an error message if the width of queries and keys is odd, which leaves a column without a plane."""
        return f"rotary positions need an even head width, not {d_key}" if d_key % 2 else None

    def rotation(self, positions: Tensor) -> Rotate:
        """Compute the angles once for all layers."""
        cos, sin = self.angles(positions)
        return lambda x: rotate_pairs(x, cos, sin)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines [T, K/2] of all planes' angles at these positions."""
        plane = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=positions.device)
        angle = positions.to(torch.float32)[:, None] * torch.exp(plane * (-math.log(10000.0) / self.d_head))
        return angle.cos(), angle.sin()


def slopes(n_heads: int) -> list[float]:
    """Return ALiBi's slope of each of n heads: a geometric sequence from 2^(-8/n) to 2^-8.

    If n is not a power of two: the slopes for the next lower power, then every other slope for the next higher power.
    """
    lower = 1 << (n_heads.bit_length() - 1)
    between = range(0, 2 * (n_heads - lower), 2)
    return [2 ** (-8 * (i + 1) / lower) for i in range(lower)] + [2 ** (-4 * (i + 1) / lower) for i in between]


class AlibiPositions(Positions):
    """ALiBi (Press et al. 2022): the scores of head h get the bias -slope_h * |distance|, in encoders and decoders."""

    def setup(self) -> None:
        self.register_buffer("slopes", torch.tensor(slopes(self.n_heads)), persistent=False)
        self.slopes: Tensor

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None] - keys[None, :]).abs()
        return self.slopes[:, None, None] * -distance.to(torch.float32)


def buckets(queries: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """Return T5's bucket number [Q, S] of each distance between a query position and a key position.

    Each small distance has its own bucket. Larger distances share buckets whose width grows exponentially, and all
    distances from MAX_DISTANCE on share the last bucket. In a decoder (`causal`) all buckets are for earlier keys; in
    an encoder half of the buckets are for later keys.
    """
    distance = queries[:, None] - keys[None, :]
    n_buckets, first = (N_BUCKETS, 0) if causal else (N_BUCKETS // 2, (distance < 0) * (N_BUCKETS // 2))
    distance = distance.clamp(min=0) if causal else distance.abs()
    n_exact = n_buckets // 2
    scale = (n_buckets - n_exact) / math.log(MAX_DISTANCE / n_exact)
    far = n_exact + (torch.log(distance.clamp(min=1).float() / n_exact) * scale).long()
    return first + torch.where(distance < n_exact, distance, far.clamp(max=n_buckets - 1))


class T5Positions(Positions):
    """T5's positions (Raffel et al. 2020, 2.1): all layers share a learned bias per head and bucket of distances."""

    trains_in_attention = True

    def setup(self) -> None:
        self.bias = nn.Embedding(N_BUCKETS, self.n_heads)

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.bias(buckets(queries, keys, causal=self.causal)).permute(2, 0, 1)


class ShawPositions(Positions):
    """Relative position representations (Shaw et al. 2018): keys and values get a learned vector per distance.

    Distances are clipped to CLIP, the paper's k. All heads share the vectors (section 3.3); here all layers do too.
    """

    trains_in_attention = True

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """Return an error message if a head's keys and values differ in width, or None."""
        if d_key == d_value:
            return None
        return f"model.positions = 'shaw' needs d_key = d_model / n_heads, not {d_key}"

    def setup(self) -> None:
        """Create the vectors of all distances; a decoder has no vectors for later keys."""
        n = CLIP + 1 if self.causal else 2 * CLIP + 1
        self.key_vectors, self.value_vectors = nn.Embedding(n, self.d_head), nn.Embedding(n, self.d_head)

    def relations(self, queries: Tensor, keys: Tensor) -> Relations:
        """Number relations by the distance from key to query, clipped; in an encoder, CLIP is added."""
        before = (queries[:, None] - keys[None, :]).clamp(0 if self.causal else -CLIP, CLIP)
        index = before if self.causal else before + CLIP
        return Relations(index, self.key_vectors.weight, self.value_vectors.weight)


POSITIONS = {
    "sinusoidal": SinusoidalPositions,
    "sinusoidal_halves": HalvedSinusoidalPositions,
    "sinusoidal_fairseq": FairseqPositions,
    "sinusoidal_marian": MarianPositions,
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "alibi": AlibiPositions,
    "t5": T5Positions,
    "shaw": ShawPositions,
    "none": Positions,
}
