"""Positions that change attention: rotary, ALiBi's linear biases, T5's learned ones. All depend on distances only."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from transduce.nn.positions.scheme import Positions, Relations, Rotate

N_BUCKETS = 32
MAX_DISTANCE = 128
CLIP = 16


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., T, K] as K/2 planes, by angles [T, K/2] (section 3.4)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class RotaryPositions(Positions):
    """Queries and keys are rotated (Su et al. 2021): plane i of position p by p * 10000^(-2i/K)."""

    @classmethod
    def problem(cls, *, d_key: int, d_value: int) -> str | None:
        """An odd width has no planes."""
        return f"rotary positions need an even head width, not {d_key}" if d_key % 2 else None

    def rotation(self, positions: Tensor) -> Rotate:
        """Compute the angles once for all layers."""
        plane = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=positions.device)
        angle = positions.to(torch.float32)[:, None] * torch.exp(plane * (-math.log(10000.0) / self.d_head))
        cos, sin = angle.cos(), angle.sin()
        return lambda x: rotate_pairs(x, cos, sin)


def slopes(n_heads: int) -> list[float]:
    """The slope of each head: a geometric sequence from 2^(-8/n) to 2^-8.

    For a number that is no power of two: the slopes of the next lower power, then every other one of the next higher.
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
    beyond which there is one. Without `causal`, keys before and after a query have half of the buckets each.
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
        """Keys and values get vectors of the same width."""
        if d_key == d_value:
            return None
        return f"model.positions = 'shaw' needs d_key = d_model / n_heads, not {d_key}"

    def setup(self) -> None:
        """Create the vectors; a decoder has none for later keys."""
        n = CLIP + 1 if self.causal else 2 * CLIP + 1
        self.key_vectors, self.value_vectors = nn.Embedding(n, self.d_head), nn.Embedding(n, self.d_head)

    def relations(self, queries: Tensor, keys: Tensor) -> Relations:
        """Relation r of a query and a key r positions before it; r is negative for later keys, and CLIP is added."""
        before = (queries[:, None] - keys[None, :]).clamp(0 if self.causal else -CLIP, CLIP)
        index = before if self.causal else before + CLIP
        return Relations(index, self.key_vectors.weight, self.value_vectors.weight)
