"""Self-attention with relative positions over a memory and a segment (Transformer-XL, Dai et al. 2019, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.nn.attention import FullProjection, MultiHeadAttention
from transduce.nn.masks import later_keys
from transduce.nn.positions import sinusoids
from transduce.nn.stack import EncoderBlock, Stack


@dataclass(slots=True)
class SegmentCache:
    """One layer's keys and values [N, H, C, K] of the memory and of the segment so far; one row per text.

    distances: the projected vectors of distances, W_R R, from the longest distance down to 0.
    inputs: the layer's inputs in the last step, from which the memory of the next segment is made.
    """

    keys: Float[Tensor, "N H C K"]
    values: Float[Tensor, "N H C K"]
    distances: Float[Tensor, "H E K"]
    inputs: Float[Tensor, "N Q D"] | None = None

    @property
    def n_known(self) -> int:
        return self.keys.shape[2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values; return all cached keys and all cached values."""
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values

    def forget(self, n_kept: int) -> None:
        first = max(0, self.n_known - n_kept)
        self.keys, self.values = self.keys[:, :, first:], self.values[:, :, first:]


@dataclass(slots=True)
class SegmentState:
    """The state of a Transformer-XL in decoding: the caches of all layers after `length` tokens of each text.

    Texts are read in segments of `segment_length` tokens from their start. A token attends to its own segment and to
    the last `memory_length` tokens before the segment.
    """

    layers: list[SegmentCache]
    segment_length: int
    memory_length: int
    length: int = 0

    def begin(self, n_tokens: int) -> int:
        """Return how many of the next `n_tokens` tokens fit into the current segment.

        If the segment is full, update the memory and begin the next segment first.
        """
        used = self.length % self.segment_length
        if self.length and not used:
            for layer in self.layers:
                layer.forget(self.memory_length)
        return min(n_tokens, self.segment_length - used)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        for layer in self.layers:
            layer.keys, layer.values = (x.index_select(0, sentences) for x in (layer.keys, layer.values))


class Distances(nn.Module):
    """Parts of relative attention that all layers share: sinusoids R of distances, biases u and v (section 3.3).

    Distances above `longest`, which occur only if evaluation uses a longer memory, count as `longest`.
    """

    def __init__(self, *, d_model: int, n_heads: int, longest: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.longest = d_model, n_heads, longest
        self.content_bias = nn.Parameter(torch.zeros(d_model))  # u
        self.position_bias = nn.Parameter(torch.zeros(d_model))  # v
        self.dropout = nn.Dropout(dropout)

    def vectors(self, n: int) -> Float[Tensor, "E D"]:
        """Return the sinusoids R of the distances n, n - 1, ..., 0; E = n + 1."""
        rows = sinusoids(min(n, self.longest) + 1, self.d_model, device=self.content_bias.device).flip(0)
        farther = rows[:1].expand(max(0, n - self.longest), -1)
        return self.dropout(torch.cat([farther, rows]).to(self.content_bias.dtype))

    def biases(self) -> tuple[Float[Tensor, "H 1 K"], Float[Tensor, "H 1 K"]]:
        """The vectors u and v of each head."""
        u, v = (bias.view(self.n_heads, 1, -1) for bias in (self.content_bias, self.position_bias))
        return u, v


def relative_shift(scores: Float[Tensor, "*B Q E"]) -> Float[Tensor, "*B Q C"]:
    """Convert scores by distance to scores by key, as a view (Dai et al. 2019, appendix B); E = C + 1.

    Column e is the distance C - e. The queries belong to the last Q keys, so key j is C - Q + i - j positions before
    query i: row i moves by Q - i columns to the left. Columns of later keys, j > C - Q + i, have no meaning.

    >>> relative_shift(torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0]])).tolist()
    [[1.0, 0.0, 3.0], [2.0, 1.0, 0.0]]
    """
    n_queries, n_columns = scores.shape[-2:]
    return scores.flatten(-2)[..., n_queries:].unflatten(-1, (n_queries, n_columns - 1))


class RelativeAttention(MultiHeadAttention):
    """Relative attention of Transformer-XL (section 3.3): a segment attends to itself and to its memory.

    The score of query i and key j is the sum of four terms: content with content, content with position, and the
    biases u for content and v for position,

        q_i k_j + q_i W_R R_(i-j) + u k_j + v W_R R_(i-j).

    Projections have no bias, as in the paper.
    """

    def __init__(self, *, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model=d_model, n_heads=n_heads, dropout=dropout, bias=False)

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Create the projection to queries, keys and values, which is one product, and the projection W_R."""
        self.query_key_value: FullProjection = project((self.n_heads,) * 3, d_head=self.d_head)  # type: ignore[assignment]
        self.distance = project((self.n_heads,), d_head=self.d_head)

    def remember(self, memory: Float[Tensor, "B M D"], vectors: Float[Tensor, "E D"]) -> SegmentCache:
        """Return the cache for a segment that follows `memory`, which consists of earlier inputs of this layer.

        `vectors`: sinusoids R of the longest distance needed and of all shorter distances.
        """
        _, keys, values = self.query_key_value(memory)  # [B, H, M, K]
        (distances,) = self.distance(vectors[None])
        return SegmentCache(keys=keys, values=values, distances=distances[0])

    def forward(
        self, x: Float[Tensor, "B Q D"], *, cache: SegmentCache, distances: Distances, later: Float[Tensor, "Q C"]
    ) -> Float[Tensor, "B Q D"]:
        """Attend from the next Q tokens x to the cached keys and to x itself; the bias `later` hides later keys."""
        cache.inputs = x
        query, key, value = self.query_key_value(x)
        key, value = cache.append(key, value)
        u, v = distances.biases()
        vectors = cache.distances[:, -(key.shape[2] + 1) :]
        scores = self.matmul((query + v) * (1 / math.sqrt(self.d_head)), vectors.transpose(1, 2))
        return self.attend(query + u, key, value, bias=relative_shift(scores) + later)


class RelativeBlock(EncoderBlock):
    """A block with relative attention and a feed-forward network, each with a residual connection."""

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "B Q D"], *, cache: SegmentCache, distances: Distances, later: Float[Tensor, "Q C"]
    ) -> Float[Tensor, "B Q D"]:
        """Apply the block to the next Q tokens x; append their keys and values to `cache`."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, cache=cache, distances=distances, later=later)
        )
        return self.feed_forward_residual(x, self.feed_forward)


class RelativeDecoder(Stack):
    """The stack of Transformer-XL. A token attends to the memory, to earlier tokens of its segment and to itself."""

    def __init__(self, blocks: Iterable[RelativeBlock], *, norm: nn.Module, distances: Distances) -> None:
        super().__init__(blocks, norm=norm)
        self.distances = distances

    def start(self, memory: Sequence[Float[Tensor, "B M D"]], *, n_tokens: int) -> list[SegmentCache]:
        """Return the caches of all layers after `memory`, for at most `n_tokens` tokens including the memory.

        `memory`: for each layer, earlier inputs of its attention.
        """
        vectors = self.distances.vectors(n_tokens)
        return [
            block.self_attention.remember(inputs, vectors) for block, inputs in zip(self.blocks, memory, strict=True)
        ]

    def forward(self, x: Float[Tensor, "N Q D"], layers: Sequence[SegmentCache]) -> Float[Tensor, "N Q D"]:
        """Apply all blocks to the next Q embedded tokens of a segment; `layers`, the caches, are updated in place."""
        later = later_keys(x.shape[1], layers[0].n_known + x.shape[1], x.device)
        for block, cache in zip(self.blocks, layers, strict=True):
            x = block(x, cache=cache, distances=self.distances, later=later)
        return self.norm(x)
