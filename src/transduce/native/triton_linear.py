"""Sums over rows for bias gradients on a GPU, and a linear layer that uses them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_COLUMNS, _ROWS = 64, 32  # size of a tile
_PARTS = 64  # most partial sums of a column


@triton.jit(do_not_specialize=["n_rows"])
def _column_sums(x, sums, n_rows, n_columns, step, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of some columns over every n-th tile of rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, n_parts = tl.program_id(1), tl.num_programs(1)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * ROWS, n_rows, n_parts * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
        places = rows[:, None].to(tl.int64) * step + columns[None, :]
        found += tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + part * n_columns + columns, tl.sum(found, 0), mask=columns < n_columns)


def column_sums(x: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """The sum over rows, in float32. The last axis of x has stride 1."""
    n_rows, n_columns = x.shape
    n_parts = min(_PARTS, -(-n_rows // _ROWS))
    sums = x.new_empty(n_parts, n_columns, dtype=torch.float32)
    grid = -(-n_columns // _COLUMNS), n_parts
    _column_sums[grid](x, sums, n_rows, n_columns, x.stride(0), _COLUMNS, _ROWS, num_warps=4)
    return sums.sum(0)


class GpuLinear(torch.autograd.Function):
    """x W^T + b, with products in `dtype`. Gradients have the dtypes of x and of the weight."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):  # type: ignore[no-untyped-def]
        rows, w = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
        ctx.save_for_backward(rows, w)
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype)
        return torch.addmm(bias.to(dtype), rows, w.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, w = ctx.saved_tensors
        grads, wanted = grad.reshape(-1, grad.shape[-1]).contiguous(), ctx.needs_input_grad
        grad_x = (grads @ w).view(ctx.shape).to(ctx.dtypes[0]) if wanted[0] else None
        grad_w = (grads.t() @ rows).to(ctx.dtypes[1]) if wanted[1] else None
        return grad_x, grad_w, column_sums(grads).to(ctx.dtypes[1]) if wanted[2] else None, None
