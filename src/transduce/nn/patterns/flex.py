"""Sparse patterns as one kernel that skips tiles of hidden keys: PyTorch's FlexAttention (Dong et al. 2024)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from transduce.nn.patterns.layouts import Layout
from transduce.nn.patterns.pattern import SparsePattern

TILE = 128
"""Queries and keys of a tile, which the kernel computes as a whole or not at all."""
NARROWEST = 16
"""Width of a head from which the kernel works on a GPU."""

_VARIANTS = 64  # of the compiled kernel: patterns, biases, with and without gradients, batches of one, lengths


class FlexKernel:
    """Attention under a sparse pattern. A query that sees no key gets zeros.

    Queries and keys are sorted as in the layout's blocks, so that visible keys lie in few tiles: those of a strided
    pattern, sorted by column, are as near to each other as those of a local one.
    """

    def __init__(
        self,
        pattern: SparsePattern,
        layout: Layout,
        *,
        device: torch.device,
        groups: Int[Tensor, "B T"] | None = None,
        by_distance: Float[Tensor, "H R"] | None = None,
    ) -> None:
        """`groups`: tokens see their own group only. `by_distance`: added to the scores, see `Layout.reach`."""
        self.layout = layout
        queries, keys = layout.order(device)
        real, shifted = keys < layout.n, queries + layout.reach
        group = None if groups is None else F.pad(groups, (0, layout.reach + 1 - layout.n), value=-1)

        # no integer that changes with the length may be captured here: the kernel would be compiled for each one
        def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            found = pattern.allowed(queries[q], keys[k]) & real[k]
            return found if group is None else found & (group[b, queries[q]] == group[b, keys[k]])

        def add(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            assert by_distance is not None
            return score + by_distance[h, shifted[q] - keys[k]]

        self.add = None if by_distance is None else add
        table = tiles(layout, queries, keys, causal=pattern.causal)[None, None]
        self.mask = BlockMask.from_kv_blocks(
            table.sum(-1, dtype=torch.int32),
            table.int().argsort(dim=-1, descending=True, stable=True).int(),
            BLOCK_SIZE=TILE,
            mask_mod=is_visible,
            seq_lengths=(len(queries), len(keys)),
        )

    def __call__(
        self, query: Float[Tensor, "B H T K"], key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T K_v"]
    ) -> Float[Tensor, "B H T K_v"]:
        """softmax(Q K^T / sqrt(d_k) + bias) V."""
        layout = self.layout
        blocks = layout.queries(query)
        sorted_query, sorted_key, sorted_value = blocks.flatten(2, 3), layout.sort_keys(key), layout.sort_keys(value)
        kernel: Any = _compiled if query.is_cuda and not torch.compiler.is_compiling() else flex_attention
        with torch.autocast(query.device.type, enabled=False):
            found = kernel(sorted_query, sorted_key, sorted_value, score_mod=self.add, block_mask=self.mask)
        return layout.merge(found.unflatten(2, blocks.shape[2:4]))


def _compiled(*args: Any, **kwargs: Any) -> Tensor:
    """The kernel. Without compilation, as on a CPU, FlexAttention computes a dense product: too many variants raise."""
    with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
        return _compile()(*args, **kwargs)


@cache
def _compile() -> Any:
    return torch.compile(flex_attention, fullgraph=True)


def tiles(
    layout: Layout, queries: Int[Tensor, " Q"], keys: Int[Tensor, " K"], *, causal: bool
) -> Bool[Tensor, "q_tiles k_tiles"]:
    """Which tiles may contain a visible pair of the sorted positions; the cost is that of these.

    The keys of a block of queries are those of neighboring blocks, `layout.shifts` away, or of the only block.
    """
    width = layout.positions(queries.device)[0].shape[1]
    starts, others = (torch.arange(0, len(x), TILE, device=x.device) for x in (queries, keys))
    first = (starts // width + layout.shifts[0]) * width
    end = ((starts + TILE - 1) // width + layout.shifts[-1] + 1) * width
    near = (first[:, None] < others + TILE) & (end[:, None] > others)
    if not causal:
        return near
    last = F.pad(queries, (0, -len(queries) % TILE), value=-1).view(-1, TILE).amax(1)
    lowest = F.pad(keys, (0, -len(keys) % TILE), value=layout.reach).view(-1, TILE).amin(1)
    return near & (lowest <= last[:, None])
