"""Self-attention with relative positions over a memory and a segment (Transformer-XL, Dai et al. 2019, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.nn.attention import MultiHeadAttention
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import FeedForward
from transduce.nn.linear import linear
from transduce.nn.masks import HIDDEN
from transduce.nn.positions import sinusoids
from transduce.nn.projections import FullProjection
from transduce.nn.residual import PostNorm
from transduce.nn.stack import Stack


@dataclass(slots=True)
class SegmentCache:
    """One layer's keys and values of the memory and of the segment so far, one row per text.

    keys, values: [N, H, R, K], of which the first `n_known` are filled. Without room for more, as in training, the
    segment is read in one step and not kept.
    distances: W_R R for distances down to 0.
    inputs: what the layer read in the last step; the memory of the next segment is made of it.
    """

    keys: Float[Tensor, "N H R K"]
    values: Float[Tensor, "N H R K"]
    distances: Float[Tensor, "H E K"]
    n_known: int
    inputs: Float[Tensor, "N Q D"] | None = None

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` keys in all, if that is more than there are."""
        if capacity > self.n_known:
            self.keys, self.values = (self._with_room(x, capacity) for x in (self.keys, self.values))

    def _with_room(self, known: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = known.shape
        wide = known.new_empty(rows, heads, capacity, width)
        wide[:, :, : self.n_known] = known
        return wide

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [N, H, C, K] with the new ones, which are kept if there is room."""
        end = self.n_known + keys.shape[2]
        if end > self.keys.shape[2]:
            return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys[:, :, self.n_known : end] = keys
        self.values[:, :, self.n_known : end] = values
        self.n_known = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def forget(self, n_kept: int) -> None:
        """Keep the last `n_kept` keys only."""
        first = max(0, self.n_known - n_kept)
        if first:
            for kept in (self.keys, self.values):
                kept[:, :, : self.n_known - first] = kept[:, :, first : self.n_known].clone()
            self.n_known -= first


@dataclass(slots=True)
class SegmentState:
    """The caches of all layers for a batch, `length` tokens after the start of its texts.

    Texts are read in segments of `segment_length` tokens from their start. A token attends to its own segment and to
    the last `memory_length` tokens before it.
    """

    layers: list[SegmentCache]
    segment_length: int
    memory_length: int
    length: int = 0

    def begin(self, n_tokens: int) -> int:
        """The number of next tokens that belong to the current segment. After its end, the next one begins.

        The memory then moves on.
        """
        used = self.length % self.segment_length
        if self.length and not used:
            for layer in self.layers:
                layer.forget(self.memory_length)
        return min(n_tokens, self.segment_length - used)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        """Keep only these texts."""
        for layer in self.layers:
            layer.keys, layer.values = (x.index_select(0, sentences) for x in (layer.keys, layer.values))


class Distances(nn.Module):
    """Representation of distances, common to all layers: their sinusoids R, and the biases u and v (section 3.3).

    Distances above `longest` count as `longest`: training shows no longer ones, a longer memory in evaluation does.
    """

    def __init__(self, *, d_model: int, n_heads: int, longest: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.d_model, self.n_heads, self.longest = d_model, n_heads, longest
        self.content_bias = nn.Parameter(torch.zeros(d_model))  # u
        self.position_bias = nn.Parameter(torch.zeros(d_model))  # v
        self.dropout = Dropout(dropout)

    def vectors(self, n: int) -> Float[Tensor, "E D"]:
        """R of the distances n, n - 1, ..., 0."""
        rows = sinusoids(min(n, self.longest) + 1, self.d_model, device=self.content_bias.device).flip(0)
        farther = rows[:1].expand(max(0, n - self.longest), -1)
        return self.dropout(torch.cat([farther, rows]).to(self.content_bias.dtype))

    def biases(self) -> tuple[Float[Tensor, "H 1 K"], Float[Tensor, "H 1 K"]]:
        """The vectors u and v of each head."""
        u, v = (bias.view(self.n_heads, 1, -1) for bias in (self.content_bias, self.position_bias))
        return u, v


def relative_shift(scores: Float[Tensor, "*B Q E"]) -> Float[Tensor, "*B Q C"]:
    """From scores by distance to scores by key (Dai et al. 2019, appendix B); E = C + 1. No copy is made.

    Column e is the distance C - e. The queries are those of the last Q keys, so key j is C - Q + i - j positions before
    query i: row i moves by Q - i columns to the left. Columns of later keys, j > C - Q + i, have no meaning.

    >>> relative_shift(torch.tensor([[3.0, 2, 1, 0], [3, 2, 1, 0]])).tolist()
    [[1.0, 0.0, 3.0], [2.0, 1.0, 0.0]]
    """
    n_queries, n_columns = scores.shape[-2:]
    return scores.flatten(-2)[..., n_queries:].unflatten(-1, (n_queries, n_columns - 1))


def distance_scores(query: Float[Tensor, "B H Q K"], keys: Float[Tensor, "H E K"]) -> Float[Tensor, "B H Q E"]:
    """The product of each query with the vectors of all distances.

    Without gradients on a CPU, each head is a `linear`, whose rows do not depend on the batch.
    """
    if torch.is_grad_enabled() or query.is_cuda:
        rows = query.transpose(0, 1).flatten(1, 2) @ keys.transpose(1, 2)  # [H, B * Q, E]
        return rows.unflatten(1, (query.shape[0], -1)).transpose(0, 1)
    return torch.stack([linear(q, k) for q, k in zip(query.unbind(1), keys.unbind(0), strict=True)], 1)


def later_keys(n_queries: int, n_keys: int, device: torch.device) -> Float[Tensor, "Q C"]:
    """The bias that hides later keys from the queries of the last `n_queries` keys."""
    return torch.full((n_queries, n_keys), HIDDEN, device=device).triu(n_keys - n_queries + 1)


class RelativeAttention(MultiHeadAttention):
    """A segment attends to itself and to its memory (section 3.3).

    The score of query i and key j is the sum of four terms: content with content, content with position, and the
    biases u for content and v for position,

        q_i k_j + q_i W_R R_(i-j) + u k_j + v W_R R_(i-j).

    Projections have no bias, as in the paper.
    """

    def __init__(self, *, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__(d_model=d_model, n_heads=n_heads, dropout=dropout, bias=False)

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """One product gives queries, keys and values; `distance` is W_R."""
        self.query_key_value: FullProjection = project((self.n_heads,) * 3, d_head=self.d_head)  # type: ignore[assignment]
        self.distance = project((self.n_heads,), d_head=self.d_head)

    def remember(
        self, memory: Float[Tensor, "B M D"], vectors: Float[Tensor, "E D"], *, capacity: int = 0
    ) -> SegmentCache:
        """The cache of a segment that follows `memory`, inputs of this layer, with room for `capacity` keys if any.

        `vectors`: R of the longest distance needed and of all shorter ones.
        """
        width = self.n_heads * self.d_head
        both = linear(memory, self.query_key_value.weight[width:]).unflatten(-1, (2, self.n_heads, self.d_head))
        keys, values = both.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, M, K]
        (distances,) = self.distance(vectors[None])
        cache = SegmentCache(keys=keys, values=values, distances=distances[0], n_known=memory.shape[1])
        cache.reserve(capacity)
        return cache

    def forward(
        self, x: Float[Tensor, "B Q D"], *, cache: SegmentCache, distances: Distances, later: Float[Tensor, "Q C"]
    ) -> Float[Tensor, "B Q D"]:
        """The next Q tokens x after attention to what the cache knows and to themselves; `later` hides later keys."""
        cache.inputs = x
        query, key, value = self.query_key_value(x)
        key, value = cache.append(key, value)
        u, v = distances.biases()
        vectors = cache.distances[:, -(key.shape[2] + 1) :]
        scores = distance_scores((query + v) * (1 / math.sqrt(self.d_head)), vectors)
        return self.attend(query + u, key, value, bias=relative_shift(scores) + later)


class RelativeBlock(nn.Module):
    """Relative attention, then feed-forward, each with its residual connection."""

    def __init__(
        self, *, attention: RelativeAttention, feed_forward: FeedForward, residual: Callable[[], PostNorm]
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()

    def forward(
        self, x: Float[Tensor, "B Q D"], *, cache: SegmentCache, distances: Distances, later: Float[Tensor, "Q C"]
    ) -> Float[Tensor, "B Q D"]:
        """x [B, Q, D] after the block, which appends to `cache`."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, cache=cache, distances=distances, later=later)
        )
        return self.feed_forward_residual(x, self.feed_forward)


class RelativeDecoder(Stack):
    """Blocks with relative attention. A token attends to the memory, to earlier tokens of its segment and to itself."""

    def __init__(self, blocks: Iterable[RelativeBlock], *, norm: nn.Module, distances: Distances) -> None:
        super().__init__(blocks, norm=norm)
        self.distances = distances

    def start(
        self, memory: Sequence[Float[Tensor, "B M D"]], *, n_tokens: int, capacity: int = 0
    ) -> list[SegmentCache]:
        """The caches of all layers after `memory`, for at most `n_tokens` in all with the memory's.

        `memory`: earlier inputs of the attention of each layer. Without `capacity`, they serve one step.
        """
        vectors = self.distances.vectors(n_tokens)
        return [
            block.self_attention.remember(known, vectors, capacity=capacity)
            for block, known in zip(self.blocks, memory, strict=True)
        ]

    def forward(self, x: Float[Tensor, "N Q D"], layers: Sequence[SegmentCache]) -> Float[Tensor, "N Q D"]:
        """The next Q embedded tokens of a segment after all blocks; the caches advance in place."""
        later = later_keys(x.shape[1], layers[0].n_known + x.shape[1], x.device)
        for block, cache in zip(self.blocks, layers, strict=True):
            x = block(x, cache=cache, distances=self.distances, later=later)
        return self.norm(x)
