"""Projections of one input to the heads of attention (paper 3.2.2)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transduce.native import kernels
from transduce.native.attention import heads_of, projected_heads
from transduce.nn.linear import Linear


class FullProjection(Linear):
    """Several projections of one input in one product; each head has its own columns (paper 3.2.2)."""

    def __init__(self, d_model: int, heads: tuple[int, ...], *, d_head: int | tuple[int, ...], bias: bool) -> None:
        """`heads`: the number of heads of each projection; `d_head`: their width, or one for each projection."""
        widths = d_head if isinstance(d_head, tuple) else (d_head,) * len(heads)
        rows = tuple(n * width for n, width in zip(heads, widths, strict=True))
        super().__init__(d_model, sum(rows), bias=bias)
        self.heads, self.widths = heads, widths
        self.rows = rows if len(heads) > 1 else ()

    @classmethod
    def problem(cls, *, n_heads: int, n_kv_heads: int, d_key: int, d_value: int) -> str | None:
        """The error in the heads' numbers and widths, if any."""
        return None

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """One [B, H_i, T, K_i] for each of `heads`."""
        if kernels.multiplies(x, self.weight):
            return projected_heads(x, self, self.heads, self.widths)
        y = super().forward(x)
        if y.is_cuda and y.dtype != torch.float32:  # PyTorch's kernels for float32 get copies
            return heads_of(y, self.rows or (y.shape[-1],), self.heads)
        if len(set(self.heads)) == len(set(self.widths)) == 1:
            parts = y.unflatten(-1, (len(self.heads), self.heads[0], -1))  # [B, T, n, H, K]
            return parts.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        parts = zip(self.heads, y.split(self.rows, dim=-1), strict=True)
        return tuple(part.unflatten(-1, (n, -1)).transpose(1, 2).contiguous() for n, part in parts)


class SharedProjection(nn.Module):
    """One d_head x d_head weight for all heads of a projection: each head projects its own slice of the input.

    Some textbooks teach this form; it has H^2 times fewer weights than the paper's, for H heads.
    """

    def __init__(self, d_model: int, heads: tuple[int, ...], *, d_head: int | tuple[int, ...], bias: bool) -> None:
        super().__init__()
        width, *others = d_head if isinstance(d_head, tuple) else (d_head,)
        if any(n * width != d_model for n in heads) or set(others) - {width}:
            raise ValueError("a shared projection needs equal queries, keys and values, as wide together as the input")
        self.d_head = d_head = width
        self.parts = nn.ModuleList(Linear(d_head, d_head, bias=bias) for _ in heads)

    @classmethod
    def problem(cls, *, n_heads: int, n_kv_heads: int, d_key: int, d_value: int) -> str | None:
        """All heads project slices of one width."""
        if n_kv_heads != n_heads:
            return f"model.projection = 'shared' needs n_kv_heads = n_heads, not {n_kv_heads}"
        if d_key != d_value:
            return f"model.projection = 'shared' needs d_key = d_model / n_heads, not {d_key}"
        return None

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:
        """One [B, H, T, K] for each of `heads`."""
        slices = x.unflatten(-1, (-1, self.d_head)).transpose(1, 2).contiguous()  # [B, H, T, K]
        return tuple(part(slices) for part in self.parts)


PROJECTIONS: dict[str, type[FullProjection] | type[SharedProjection]] = {
    "full": FullProjection,
    "shared": SharedProjection,
}
