"""Triton kernels for a GPU: the bias gradient of linear layers, and the loss of a large vocabulary.

The kernel of the loss overwrites logits by their gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

_COLUMNS, _ROWS = 64, 32  # size of a tile
_PARTS = 64  # maximum number of partial sums of a column
_CHUNK = 1 << 28  # logits in memory at a time: 512 MiB in bfloat16


@triton.jit(do_not_specialize=["n_rows"])
def _column_sums(x, sums, n_rows, n_columns, step, COLUMNS: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Kernel that sums some columns over every n-th tile of rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part, n_parts = tl.program_id(1), tl.num_programs(1)
    partial = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * ROWS, n_rows, n_parts * ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < n_columns)
        places = rows[:, None].to(tl.int64) * step + columns[None, :]
        partial += tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + part * n_columns + columns, tl.sum(partial, 0), mask=columns < n_columns)


def column_sums(x: Float[Tensor, "N D"]) -> Float[Tensor, " D"]:
    """Sum over the rows of x, in float32. The last axis of x must have stride 1."""
    n_rows, n_columns = x.shape
    n_parts = min(_PARTS, -(-n_rows // _ROWS))
    sums = x.new_empty(n_parts, n_columns, dtype=torch.float32)
    grid = -(-n_columns // _COLUMNS), n_parts
    _column_sums[grid](x, sums, n_rows, n_columns, x.stride(0), _COLUMNS, _ROWS, num_warps=4)
    return sums.sum(0)


class GpuLinear(torch.autograd.Function):
    """Autograd function of x W^T + b, with products in `dtype`. Gradients have the dtypes of x and of the weight."""

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


@triton.jit(do_not_specialize=["pad"])
def _of_logits(  # type: ignore[no-untyped-def]
    logits, bias, gold, losses, step, pad, smoothing,
    VOCABULARY: tl.constexpr, BIASED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel: compute -log p(gold) and -mean_v log p(v) of a row; replace its logits by p - (1 - s) onehot - s/V."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(gold + row)
    own = logits + row * step
    counts = target != pad
    of_gold = tl.load(own + target).to(tl.float32)  # read before other threads overwrite it
    if BIASED:
        of_gold += tl.load(bias + target)
    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < VOCABULARY
        x = tl.load(own + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if BIASED:
            x += tl.load(bias + columns, mask=inside, other=0.0)
        plain += tl.sum(tl.where(inside, x, 0.0))
        highest = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - highest) + tl.sum(tl.exp(x - highest))
        top = highest
    log_z = top + tl.log(total)
    tl.store(losses + 2 * row, tl.where(counts, log_z - of_gold, 0.0))
    tl.store(losses + 2 * row + 1, tl.where(counts, log_z - plain / VOCABULARY, 0.0))
    if WANTED:
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            x = tl.load(own + columns, mask=inside, other=0.0).to(tl.float32)
            if BIASED:
                x += tl.load(bias + columns, mask=inside, other=0.0)
            x = tl.exp(x - log_z) - smoothing / VOCABULARY - tl.where(columns == target, 1 - smoothing, 0.0)
            tl.store(own + columns, tl.where(counts, x, 0.0).to(logits.dtype.element_ty), mask=inside)


class GpuLinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the sums of `label_smoothed_loss`, computed for a chunk of rows at a time.

    The forward pass also computes the gradients if `wanted`.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        hidden: Float[Tensor, "N D"],
        weight: Float[Tensor, "V D"],
        bias: Float[Tensor, " V"] | None,
        gold: Int[Tensor, " N"],
        pad: int,
        smoothing: float,
        dtype: torch.dtype,
        wanted: bool,
    ):
        n, vocabulary, gold = len(hidden), len(weight), gold.contiguous()
        h, w = hidden.to(dtype), weight.to(dtype)
        grads = [
            torch.zeros_like(x, dtype=torch.float32) if wanted and x is not None else None
            for x in (hidden, weight, bias)
        ]
        grad_h, grad_w, grad_b = grads
        losses = torch.empty(n, 2, device=hidden.device)
        rows = max(16, _CHUNK // vocabulary // 16 * 16)
        for start in range(0, n, rows):
            cut = slice(start, start + rows)
            logits = h[cut] @ w.t()  # [rows, V]
            _of_logits[(len(logits),)](
                logits, logits if bias is None else bias, gold[cut], losses[cut], logits.stride(0), pad, smoothing,
                vocabulary, bias is not None, wanted, min(4096, triton.next_power_of_2(vocabulary)), num_warps=8,
            )  # fmt: skip
            if grad_h is not None and grad_w is not None:
                grad_h[cut] = logits @ w
                grad_w += logits.t() @ h[cut]
                if grad_b is not None:
                    grad_b += column_sums(logits)
        ctx.save_for_backward(*grads)
        nll, smooth = losses.sum(0).unbind()
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll + smoothing * smooth, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 5
