"""The bias of attention: from a pattern and a positional scheme, as a matrix, or as a computation that avoids one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transduce.native import kernels
from transduce.nn.masks import HIDDEN, attention_bias
from transduce.nn.patterns import CausalPattern, FullPattern, HeadsPattern, Layout, SparsePattern
from transduce.nn.positions import Positions, Relations

Attend = Callable[..., Tensor]
"""Attention of (query, key, value, bias=...) with dropout on its weights."""


_LONG = 1 << 15  # queries times keys from which a fused kernel is faster in training on a CPU


def fuses_on_cpu(n_queries: int, n_keys: int) -> bool:
    """Whether a CPU uses a fused kernel for so many queries and keys: in training, where rounding may differ."""
    return n_queries * n_keys >= _LONG and torch.is_grad_enabled()


class SpecialBias(ABC):
    """A bias that is not a matrix for attention to add to scores."""

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "*B T K"]:
        """Attention under this bias; `attend` computes it for simpler ones, and for those that a kernel knows."""
        return attend(query, key, value, bias=self)

    @abstractmethod
    def dense(self, query: Float[Tensor, "*B T K"]) -> Float[Tensor, "*b T S"]:
        """The same as a matrix."""


Bias = Tensor | SpecialBias | None
"""The bias of attention: None hides nothing."""


def dense_bias(bias: Bias, query: Float[Tensor, "*B T K"]) -> Tensor | None:
    """Any bias as a matrix."""
    return bias.dense(query) if isinstance(bias, SpecialBias) else bias


@dataclass(frozen=True, slots=True, eq=False)
class CausalBias(SpecialBias):
    """The bias of a causal pattern over a whole sequence, for kernels that know this pattern."""

    def dense(self, query: Tensor) -> Tensor:
        places = torch.arange(query.shape[2], device=query.device)
        return attention_bias(CausalPattern().mask(places, places)[None])


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBias(SpecialBias):
    """A bias and relations between positions, which change scores and values (Shaw et al. 2018)."""

    bias: Tensor | None
    relations: Relations

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, bias=self.dense(query), relations=self.relations)

    def dense(self, query: Tensor) -> Tensor:
        scores = self.relations.scores(query)
        return scores if self.bias is None else scores + self.bias


@dataclass(frozen=True, slots=True, eq=False)
class EmptyRows(SpecialBias):
    """The bias of a pattern in which a query may see no key: attention is then a sum over nothing, zero."""

    bias: Tensor | RelativeBias
    some: Bool[Tensor, "*b Q 1"]  # the queries that see a key

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attended(attend, query, key, value, bias=self.bias).masked_fill(~self.some, 0.0)

    def dense(self, query: Tensor) -> Tensor:
        """[..., T, S]: the other rows are minus infinity."""
        bias = dense_bias(self.bias, query)
        assert bias is not None
        return bias.masked_fill(~self.some, -math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class BlockBias(SpecialBias):
    """The bias of attention in blocks. The cost is that of the blocks: N * C * E instead of T * T."""

    layout: Layout
    bias: Bias  # broadcast to [B, H, N, C, E]
    relations: Callable[[], Relations | None]  # of the whole sequence

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = self.layout
        blocks = layout.queries(query), layout.keys(key), layout.keys(value)
        return layout.merge(attended(attend, *blocks, bias=self.bias))

    def dense(self, query: Tensor) -> Tensor:
        n, bias = query.shape[2], dense_bias(self.bias, self.layout.queries(query))
        assert bias is not None
        queries, keys = self.layout.positions(query.device)
        shape = (*queries.shape, keys.shape[1])  # [N, C, E]
        inside = ((queries < n)[:, :, None] & ((keys >= 0) & (keys < n))[:, None, :]).expand(shape)
        rows, columns = (x.expand(shape)[inside] for x in (queries[:, :, None], keys[:, None, :]))
        whole = bias.new_full((*bias.shape[:2], n, n), HIDDEN)
        whole[:, :, rows, columns] = bias.expand(*bias.shape[:2], *shape)[:, :, inside]
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class SplitBias(SpecialBias):
    """A bias for each group of heads."""

    parts: Sequence[tuple[int, Bias]]  # each with its number of heads

    def attend(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes = [n for n, _ in self.parts]
        heads = zip(*(x.split(sizes, dim=1) for x in (query, key, value)), strict=True)
        found = [attended(attend, *qkv, bias=bias) for qkv, (_, bias) in zip(heads, self.parts, strict=True)]
        return torch.cat(found, 1)

    def dense(self, query: Tensor) -> Tensor:
        queries = query.split([n for n, _ in self.parts], dim=1)
        found = [dense_bias(bias, q) for q, (_, bias) in zip(queries, self.parts, strict=True)]
        return torch.cat([x.expand(*q.shape[:3], -1) for x, q in zip(found, queries, strict=True) if x is not None], 1)


def relations_of(bias: Bias) -> Relations | None:
    """The relations between all positions, which all heads share."""
    match bias:
        case RelativeBias():
            return bias.relations
        case EmptyRows():
            return relations_of(bias.bias)
        case SplitBias():
            return relations_of(bias.parts[0][1])
        case BlockBias():
            return bias.relations()
    return None


def attended(attend: Attend, query: Tensor, key: Tensor, value: Tensor, *, bias: Bias) -> Float[Tensor, "*B T K"]:
    """Attention under any bias."""
    if isinstance(bias, SpecialBias):
        return bias.attend(attend, query, key, value)
    return attend(query, key, value, bias=bias)


# --- from patterns and positional schemes -----------------------------------------------------------------------------


_Added = tuple[Tensor | None, Relations | None]  # what a positional scheme adds to scores; to keys and values


def sequence_bias(
    pattern: FullPattern,
    positions: Int[Tensor, " T"],
    scheme: Positions,
    *,
    documents: Int[Tensor, "B T"] | None = None,
) -> Bias:
    """The bias of self-attention over a whole sequence at these positions, from 0 on.

    With `documents`, the number of the document of each token, tokens attend to their own document only.
    """
    n = positions.shape[0]
    has_kernel = positions.is_cuda or fuses_on_cpu(n, n) or kernels.dtype_in_use() is not None

    def of(factor: FullPattern, heads: slice) -> Bias:
        if isinstance(factor, SparsePattern) and factor.worthwhile(n):
            return _sparse_bias(factor, positions, scheme, heads, groups=documents)
        plain = documents is None and type(factor) is FullPattern
        bare = has_kernel and documents is None and type(factor) is CausalPattern
        added = _added(scheme, positions, positions)
        if bare and added == (None, None):
            return CausalBias()
        mask = None if plain else factor.mask(positions, positions)[None]
        if documents is not None and mask is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        bias = None if mask is None else attention_bias(mask)
        return _join(factor, bias, added, heads)

    return _of_heads(pattern, of)


def padded_bias(
    pattern: FullPattern, positions: Int[Tensor, " S"], scheme: Positions, mask: Bool[Tensor, "B 1 S"]
) -> Bias:
    """The bias of self-attention over whole sequences with padding, where `mask` is False.

    A sparse pattern is always computed in blocks: results then do not depend on the longest sequence of a batch. In a
    graph for export, where sizes are symbols, it is a mask.
    """

    def of(factor: FullPattern, heads: slice) -> Bias:
        if isinstance(factor, SparsePattern) and not torch.compiler.is_exporting():
            return _sparse_bias(factor, positions, scheme, heads, groups=mask[:, 0].long())
        seen = mask & factor.mask(positions, positions) if isinstance(factor, SparsePattern) else mask
        return _join(factor, attention_bias(seen), _added(scheme, positions, positions), heads)

    return _of_heads(pattern, of)


def step_bias(
    pattern: FullPattern,
    queries: Int[Tensor, " Q"],
    keys: Int[Tensor, " C"],
    scheme: Positions,
    *,
    history: Float[Tensor, "B 1 Q C"] | None,
    masked: bool,
) -> Bias:
    """The bias of the next tokens over cached keys: `history` and, if `masked`, the pattern."""

    def of(factor: FullPattern, heads: slice) -> Bias:
        bias = history
        if masked:
            own = attention_bias(factor.mask(queries, keys)[None])
            bias = own if history is None else history + own
        return _join(factor, bias, _added(scheme, queries, keys), heads)

    return _of_heads(pattern, of)


def _of_heads(pattern: FullPattern, of: Callable[[FullPattern, slice], Bias]) -> Bias:
    """The bias of each group of heads, from its factor."""
    if not isinstance(pattern, HeadsPattern):
        return of(pattern, slice(None))
    parts, first = list[tuple[int, Bias]](), 0
    for factor, n in zip(pattern.factors, pattern.n_heads, strict=True):
        parts.append((n, of(factor, slice(first, first + n))))
        first += n
    return SplitBias(parts)


def _added(scheme: Positions, queries: Tensor, keys: Tensor) -> _Added:
    return scheme.score_bias(queries, keys), scheme.relations(queries, keys)


def _join(pattern: FullPattern, bias: Tensor | None, of_scheme: _Added, heads: slice) -> Bias:
    """A bias that hides keys and what the positional scheme adds to it; [B, 1, Q, S] or [B, 1, N, Q, S]."""
    some = (bias > HIDDEN / 2).any(-1, keepdim=True) if pattern.may_be_empty and bias is not None else None
    added, relations = of_scheme
    if added is not None:
        added = added[heads] if bias is None or bias.dim() == 4 else added[heads, None]
        bias = added[None] if bias is None else bias + added
    found = bias if relations is None else RelativeBias(bias, relations)
    return found if some is None or found is None else EmptyRows(found, some)


def _sparse_bias(
    pattern: SparsePattern, positions: Tensor, scheme: Positions, heads: slice, *, groups: Tensor | None
) -> BlockBias:
    """The bias of a pattern whose cost follows it; `groups` [B, T]: tokens attend to their own group only."""
    n = positions.shape[0]
    layout = pattern.layout(n)
    queries, keys = layout.positions(positions.device)
    mask = pattern.allowed(queries[:, :, None], keys[:, None, :]) & ((keys >= 0) & (keys < n))[:, None, :]  # [N, C, E]
    mask = mask[None]
    if groups is not None:
        column = groups[:, None, :, None]
        mask = mask & (layout.queries(column) == layout.keys(column).transpose(-1, -2))[:, 0]
    bias = attention_bias(mask)  # [B or 1, 1, N, C, E]
    found = _join(pattern, bias, _added(scheme, queries[0], keys[0]), heads)
    return BlockBias(layout, found, partial(scheme.relations, positions, positions))
