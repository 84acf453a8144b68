"""Attention biases, made from a pattern and a positional scheme: as a matrix, or in a form that costs less."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transduce.nn.masks import HIDDEN, attention_bias, later_keys
from transduce.nn.patterns import Blocks, CausalPattern, FullPattern, Pattern, SparsePattern
from transduce.nn.positions import Positions, Relations

Attend = Callable[..., Tensor]
"""Function (query, key, value, bias=matrix, causal=..., relations=...) that computes attention."""

_LONG = 1 << 15  # queries times keys from which a fused kernel is faster in training on a CPU


def fuses_on_cpu(n_queries: int, n_keys: int) -> bool:
    """Whether a CPU computes attention of this size with a fused kernel, whose rounding only training allows."""
    return n_queries * n_keys >= _LONG and torch.is_grad_enabled()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PatternBias:
    """A bias of self-attention that consists of more than a matrix.

    matrix: Numbers that are added to the scores, broadcast to [B, H, T, S] or, with `blocks`, to [B, H, N, C, E].
    causal: Whether later keys are hidden, by a kernel with a causal mode. There is then no matrix.
    relations: Vectors that the positional scheme adds to keys and values (Shaw et al. 2018).
    has_key: True for queries that may attend to at least one key; other queries have zero output.
    blocks: The blocks in which a sparse pattern is computed. `relations` are then the first block's.
    all_relations: With `blocks`, a function that returns the relations of the whole sequence.
    """

    matrix: Tensor | None = None
    causal: bool = False
    relations: Relations | None = None
    has_key: Bool[Tensor, "*b Q 1"] | None = None
    blocks: Blocks | None = None
    all_relations: Callable[[], Relations | None] | None = None

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "B H T K"]:
        if (blocks := self.blocks) is not None:
            query = blocks.take(query, blocks.queries)
            key, value = (blocks.take(x, blocks.keys) for x in (key, value))
        output = attend(query, key, value, bias=self.matrix, causal=self.causal, relations=self.relations)
        output = output if self.has_key is None else output.masked_fill(~self.has_key, 0.0)
        return output if blocks is None else blocks.merge(output)

    def dense(self, query: Float[Tensor, "B H T K"]) -> Float[Tensor, "*b T S"]:
        """Return the bias as a matrix; the row of a query that may attend to no key is minus infinity."""
        if self.causal:
            return later_keys(query.shape[2], query.shape[2], query.device)[None, None]
        query = query if self.blocks is None else self.blocks.take(query, self.blocks.queries)
        matrix = self.matrix
        if self.relations is not None:
            scores = self.relations.scores(query)
            matrix = scores if matrix is None else matrix + scores
        assert matrix is not None
        matrix = matrix if self.has_key is None else matrix.masked_fill(~self.has_key, -math.inf)
        return matrix if self.blocks is None else self.blocks.dense(matrix, other=HIDDEN)


FactorBias = Tensor | PatternBias | None
Bias = FactorBias | tuple[FactorBias, ...]
"""An attention bias: a matrix broadcast to [B, H, T, S], a `PatternBias`, or None, which hides nothing.

A tuple contains one bias for each group of heads (`group_sizes`).
"""

CAUSAL = PatternBias(causal=True)


def group_sizes(n_heads: int, n_groups: int) -> list[int]:
    """Split heads evenly and return the number of heads of each group; a remainder goes to the first groups."""
    return [len(range(i, n_heads, n_groups)) for i in range(n_groups)]


def dense_bias(bias: Bias, query: Float[Tensor, "*B T K"]) -> Tensor | None:
    """Convert an attention bias of any form to a matrix, or None if it is None; relations need the `query`."""
    if isinstance(bias, tuple):
        queries = query.split(group_sizes(query.shape[1], len(bias)), dim=1)
        matrices = [(dense_bias(part, q), q) for part, q in zip(bias, queries, strict=True)]
        return torch.cat([matrix.expand(*q.shape[:3], -1) for matrix, q in matrices if matrix is not None], 1)
    return bias.dense(query) if isinstance(bias, PatternBias) else bias


def relations_of(bias: Bias) -> Relations | None:
    """Return the relations between all queries and keys (Shaw et al. 2018) that a bias contains, or None."""
    if isinstance(bias, tuple):
        return relations_of(bias[0])
    if not isinstance(bias, PatternBias):
        return None
    return bias.relations if bias.all_relations is None else bias.all_relations()


def attended(attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, bias: Bias) -> Float[Tensor, "B H T K"]:
    """Compute attention under a bias of any form; `attend` is called once for each group of heads."""
    if isinstance(bias, tuple):
        sizes = group_sizes(query.shape[1], len(bias))
        groups = zip(*(x.split(sizes, dim=1) for x in (query, key, value)), bias, strict=True)
        return torch.cat([attended(attend, q, k, v, bias=part) for q, k, v, part in groups], 1)
    if isinstance(bias, PatternBias):
        return bias.attend(attend, query, key, value)
    return attend(query, key, value, bias=bias)


# --- from patterns and positional schemes -----------------------------------------------------------------------------


def sequence_bias(
    pattern: Pattern, positions: Int[Tensor, " T"], scheme: Positions, *, documents: Int[Tensor, "B T"] | None = None
) -> Bias:
    """Return the bias of self-attention over a whole sequence; `positions` are 0, 1, ..., T - 1.

    `documents`: each token's document number; tokens attend only to tokens of their own document.
    """
    n = positions.shape[0]

    def bias_of(factor: FullPattern, heads: slice) -> FactorBias:
        if isinstance(factor, SparsePattern) and (blocks := factor.blocks(n, positions.device)).worthwhile():
            return _blocked(factor, blocks, positions, scheme, heads, groups=documents)
        added, has_kernel = _added(scheme, positions, positions), positions.is_cuda or fuses_on_cpu(n, n)
        if has_kernel and documents is None and type(factor) is CausalPattern and added == (None, None):
            return CAUSAL
        mask = None if type(factor) is FullPattern and documents is None else factor.mask(positions, positions)[None]
        if documents is not None and mask is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        return _joined(factor, None if mask is None else attention_bias(mask), added, heads)

    return _of_heads(pattern, scheme.n_heads, bias_of)


def padded_bias(pattern: Pattern, positions: Int[Tensor, " S"], scheme: Positions, mask: Bool[Tensor, "B 1 S"]) -> Bias:
    """Return the bias of self-attention over whole padded sequences; `mask` is False at padding.

    A sparse pattern is always computed in blocks, so that results do not depend on the longest sequence of a batch.
    """

    def bias_of(factor: FullPattern, heads: slice) -> FactorBias:
        if isinstance(factor, SparsePattern):
            blocks = factor.blocks(positions.shape[0], positions.device)
            return _blocked(factor, blocks, positions, scheme, heads, groups=mask[:, 0].long())
        return _joined(factor, attention_bias(mask), _added(scheme, positions, positions), heads)

    return _of_heads(pattern, scheme.n_heads, bias_of)


def step_bias(
    pattern: Pattern,
    queries: Int[Tensor, " Q"],
    keys: Int[Tensor, " C"],
    scheme: Positions,
    *,
    history: Float[Tensor, "B 1 Q C"] | None,
    masked: bool,
) -> Bias:
    """Return the bias for attention of a decoder's next tokens (at positions `queries`) to its cached keys.

    It is the sum of the positional scheme's bias, of `history` (which hides the keys of other beams), and, if `masked`,
    of the bias that hides keys outside the pattern.
    """

    def bias_of(factor: FullPattern, heads: slice) -> FactorBias:
        matrix = history
        if masked:
            own = attention_bias(factor.mask(queries, keys)[None])
            matrix = own if history is None else history + own
        return _joined(factor, matrix, _added(scheme, queries, keys), heads)

    return _of_heads(pattern, scheme.n_heads, bias_of)


def _of_heads(pattern: Pattern, n_heads: int, bias_of: Callable[[FullPattern, slice], FactorBias]) -> Bias:
    """Return the bias of all heads or, if the pattern has several factors, a tuple with one bias per group of heads."""
    if not isinstance(pattern, tuple):
        return bias_of(pattern, slice(None))
    ends = [*accumulate(group_sizes(n_heads, len(pattern)), initial=0)]
    return tuple(bias_of(factor, slice(*heads)) for factor, heads in zip(pattern, pairwise(ends), strict=True))


def _added(scheme: Positions, queries: Tensor, keys: Tensor) -> tuple[Tensor | None, Relations | None]:
    """Return a positional scheme's bias on scores and its relations, each None if the scheme has none."""
    return scheme.score_bias(queries, keys), scheme.relations(queries, keys)


def _blocked(
    pattern: SparsePattern, blocks: Blocks, positions: Tensor, scheme: Positions, heads: slice, *, groups: Tensor | None
) -> FactorBias:
    """Return the bias of a sparse pattern in blocks; `groups` [B, T]: tokens attend only to tokens of equal number."""
    queries, keys = blocks.queries, blocks.keys
    mask = (pattern.allowed(queries[:, :, None], keys[:, None, :]) & blocks.mask())[None]  # [1, N, C, E]
    if groups is not None:
        of_queries, of_keys = (blocks.take(groups[:, None, :, None], x)[:, 0] for x in (queries, keys))
        mask = mask & (of_queries == of_keys.transpose(-1, -2))
    bias = _joined(pattern, attention_bias(mask), _added(scheme, queries[0], keys[0]), heads)
    parts = bias if isinstance(bias, PatternBias) else PatternBias(matrix=bias)
    return replace(parts, blocks=blocks, all_relations=partial(scheme.relations, positions, positions))


def _joined(
    pattern: FullPattern, matrix: Tensor | None, added: tuple[Tensor | None, Relations | None], heads: slice
) -> FactorBias:
    """Combine a matrix that hides keys, [B, 1, Q, S] or [B, 1, N, C, E], with the result of `_added`."""
    has_key = None
    if pattern.may_be_empty and matrix is not None:
        has_key = (matrix > HIDDEN / 2).any(-1, keepdim=True)
    scores, relations = added
    if scores is not None:
        scores = scores[heads] if matrix is None or matrix.dim() == 4 else scores[heads, None]
        matrix = scores[None] if matrix is None else matrix + scores
    if relations is None and has_key is None:
        return matrix
    return PatternBias(matrix=matrix, relations=relations, has_key=has_key)
