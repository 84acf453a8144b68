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
"""A product of batches of matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Vectors added to keys and to values, chosen by the relation of query and key (Shaw et al. 2018).

    index: The number of the relation of each query and key, broadcast to [..., Q, S].
    """

    index: Int[Tensor, "*b Q S"]
    key_vectors: Float[Tensor, "R K"]
    value_vectors: Float[Tensor, "R K"]

    def scores(self, query: Float[Tensor, "*B Q K"], *, matmul: Matmul = torch.matmul) -> Float[Tensor, "*B Q S"]:
        """q_i a_ij^K / sqrt(K), the second term of equation 4, from one product with all vectors (section 3.3)."""
        vectors = self.key_vectors.T.expand(*query.shape[:-2], -1, -1)
        of_each = matmul(query, vectors) / math.sqrt(query.shape[-1])  # [..., Q, R]
        return of_each.gather(-1, self.index.expand(*of_each.shape[:-1], -1))

    def values(self, weights: Float[Tensor, "*B Q S"], *, matmul: Matmul = torch.matmul) -> Float[Tensor, "*B Q K"]:
        """sum_j alpha_ij a_ij^V, the second term of equation 3: weights are summed by relation first."""
        of_each = weights.new_zeros(*weights.shape[:-1], len(self.value_vectors))
        of_each = of_each.scatter_add(-1, self.index.expand(weights.shape), weights)
        vectors = self.value_vectors.to(weights.dtype).expand(*weights.shape[:-2], -1, -1)
        return matmul(of_each, vectors)


class Positions(nn.Module):
    """A positional scheme.

    The base class does nothing; a subclass overrides at most one hook, and `setup` if it has weights.

    vectors: are added to the embeddings.
    rotation: changes queries and keys of self-attention.
    score_bias: is added to the scores of self-attention.
    relations: add vectors to the keys and values of self-attention.

    trains_in_attention: whether it has weights that only self-attention uses.

    All but `vectors` must depend on relative distances only. A scheme belongs to one stack; all its layers
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
        """Return an error message if the scheme does not work with heads of these widths, otherwise None."""
        return None

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Float[Tensor, "N D"] | None:
        """Embeddings of the positions offset .. offset + n, which are added to token embeddings, or None."""
        return None

    @final
    def add(
        self, x: Float[Tensor, "B T D"], offset: int = 0, positions: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Add to x the embeddings of the positions offset .. offset + T, or of `positions`, which are all below T."""
        vectors = self.vectors(x.shape[1], offset=offset, device=x.device)
        if vectors is None:
            return x
        return x + (vectors if positions is None else F.embedding(positions, vectors)).to(x.dtype)

    def rotation(self, positions: Int[Tensor, " T"]) -> Rotate:
        """A function that rotates queries or keys [B, H, T, K] at these positions."""
        return unchanged

    def score_bias(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Float[Tensor, "H Q S"] | None:
        """A bias on the scores of queries and keys at these positions; None for no bias.

        Keys may come after their query (they are masked later) and positions need not be consecutive.
        """
        return None

    def relations(self, queries: Int[Tensor, " Q"], keys: Int[Tensor, " S"]) -> Relations | None:
        """The relations of queries and keys at these positions, as for `score_bias`, or None."""
        return None


def unchanged(x: Tensor) -> Tensor:
    return x


def document_positions(documents: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The position of each token in its own document; `documents` is the number of each token's document.

    >>> document_positions(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    position = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = documents != F.pad(documents, (1, 0), value=-1)[:, :-1]
    return position - torch.where(begins, position, 0).cummax(1).values


TABLE_ROWS = 1 << 14
"""Number of positions whose sinusoids are kept in memory; later ones are computed on demand."""


def sinusoids(n_positions: int, d_model: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """PE(p, 2i) = sin(a), PE(p, 2i+1) = cos(a), a = p / 10000^(2i/d): [n_positions, d_model], float32 (paper 3.5)."""
    position = torch.arange(offset, offset + n_positions, dtype=torch.float64, device=device)
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device=device)
    angle = position[:, None] * torch.exp(even * (-math.log(10000.0) / d_model))
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :d_model].float()


def halves(d_model: int) -> Int[Tensor, " D"]:
    """The indices of the columns of `sinusoids` with all sines first, then all cosines, as in `sinusoidal_halves`."""
    return torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])


class SinusoidalPositions(Positions):
    """The paper's fixed sinusoids (3.5); any length."""

    def setup(self) -> None:
        """Compute the first rows. On the meta device, where `arange` would import torch's compiler, only a shape."""
        n = min(self.max_positions, TABLE_ROWS)
        on_meta = torch.get_default_device().type == "meta"
        self.register_buffer("table", torch.empty(n, self.d_model) if on_meta else self._rows(n), persistent=False)
        self.table: Tensor

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """The vectors of positions offset .. offset + n, [n, D]."""
        return sinusoids(n, self.d_model, offset=offset, device=device)

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        known = offset + n <= len(self.table)
        return self.table[offset : offset + n] if known else self._rows(n, offset=offset, device=device)


class HalvedSinusoidalPositions(SinusoidalPositions):
    """The sinusoids of transformers' MarianMTModel: all sines in the first half of the columns, then all cosines.

    A model with this order equals a model with the paper's order if the columns of its residual stream are permuted.
    """

    def _rows(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        pairs = super()._rows(n, offset=offset, device=device)
        return pairs[:, halves(self.d_model).to(pairs.device)]


class MarianPositions(SinusoidalPositions):
    """Sinusoids of Marian and Tensor2Tensor: all sines before all cosines.

    The wavelengths are a geometric series from 2 pi to exactly 10000 * 2 pi; the paper's series ends just before.
    """

    first = 0
    """The position whose sinusoids the first token gets."""

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
    """A learned vector for each of `max_positions` positions (paper table 3, row E)."""

    def setup(self) -> None:
        self.embedding = nn.Embedding(self.max_positions, self.d_model)

    def vectors(self, n: int, *, offset: int = 0, device: torch.device | None = None) -> Tensor:
        """The vectors of positions offset .. offset + n. Raises `ValueError` past `max_positions`."""
        if offset + n > self.max_positions:
            raise ValueError(f"a sequence of {offset + n} tokens; there are {self.max_positions} learned positions")
        return self.embedding.weight[offset : offset + n]


N_BUCKETS = 32
MAX_DISTANCE = 128
CLIP = 16


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., T, K] as K/2 planes, by angles [T, K/2] (section 3.4)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class RotaryPositions(Positions):
    """Rotary positions (Su et al. 2021): plane i of a query or key at position p is rotated by p * 10000^(-2i/K)."""

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """Return an error message if the width of keys is odd and so cannot be divided into planes, otherwise None."""
        return f"rotary positions need an even head width, not {d_key}" if d_key % 2 else None

    def rotation(self, positions: Tensor) -> Rotate:
        """Compute the angles once for all layers."""
        cos, sin = self.angles(positions)
        return lambda x: rotate_pairs(x, cos, sin)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all planes [T, K/2] at these positions."""
        plane = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=positions.device)
        angle = positions.to(torch.float32)[:, None] * torch.exp(plane * (-math.log(10000.0) / self.d_head))
        return angle.cos(), angle.sin()


def slopes(n_heads: int) -> list[float]:
    """The slope of each of n heads in ALiBi: a geometric sequence from 2^(-8/n) to 2^-8.

    If n is not a power of two: the slopes for the next lower power, then every other slope for the next higher power.
    """
    lower = 1 << (n_heads.bit_length() - 1)
    between = range(0, 2 * (n_heads - lower), 2)
    return [2 ** (-8 * (i + 1) / lower) for i in range(lower)] + [2 ** (-4 * (i + 1) / lower) for i in between]


class AlibiPositions(Positions):
    """ALiBi (Press et al. 2022): the bias of head h is -slope_h * |distance|, in an encoder in both directions."""

    def setup(self) -> None:
        self.register_buffer("slopes", torch.tensor(slopes(self.n_heads)), persistent=False)
        self.slopes: Tensor

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None] - keys[None, :]).abs()
        return self.slopes[:, None, None] * -distance.to(torch.float32)


def buckets(queries: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """The bucket of each distance, [Q, S].

    Small distances have a bucket each; larger ones share buckets whose width grows logarithmically, up to MAX_DISTANCE,
    beyond which all share one bucket. Without `causal`, keys before and after a query have half of the buckets each.
    """
    distance = queries[:, None] - keys[None, :]
    n_buckets, first = (N_BUCKETS, 0) if causal else (N_BUCKETS // 2, (distance < 0) * (N_BUCKETS // 2))
    distance = distance.clamp(min=0) if causal else distance.abs()
    n_exact = n_buckets // 2
    scale = (n_buckets - n_exact) / math.log(MAX_DISTANCE / n_exact)
    far = n_exact + (torch.log(distance.clamp(min=1).float() / n_exact) * scale).long()
    return first + torch.where(distance < n_exact, distance, far.clamp(max=n_buckets - 1))


class T5Positions(Positions):
    """T5's learned bias per head and bucket of distances (Raffel et al. 2020, section 2.1), shared by all layers."""

    trains_in_attention = True

    def setup(self) -> None:
        self.bias = nn.Embedding(N_BUCKETS, self.n_heads)

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.bias(buckets(queries, keys, causal=self.causal)).permute(2, 0, 1)


class ShawPositions(Positions):
    """Relative position representations (Shaw et al. 2018): a vector per distance is added to each key and value.

    Distances are clipped to CLIP, the paper's k. All heads share the vectors (section 3.3), and here all layers too.
    """

    trains_in_attention = True

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """Return an error message unless keys and values have one width, as the vectors added to them; else None."""
        if d_key == d_value:
            return None
        return f"model.positions = 'shaw' needs d_key = d_model / n_heads, not {d_key}"

    def setup(self) -> None:
        """Create the vectors of all distances; a decoder has no vectors for later keys."""
        n = CLIP + 1 if self.causal else 2 * CLIP + 1
        self.key_vectors, self.value_vectors = nn.Embedding(n, self.d_head), nn.Embedding(n, self.d_head)

    def relations(self, queries: Tensor, keys: Tensor) -> Relations:
        """The relation of a query and a key r positions before it: r, clipped; plus CLIP if keys may be later."""
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
