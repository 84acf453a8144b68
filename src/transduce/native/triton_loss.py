"""The loss of a large vocabulary on a GPU: a Triton kernel that turns logits into their gradient, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from transduce.native.operators import LinearCrossEntropy
from transduce.native.triton_linear import column_sums

_CHUNK = 1 << 28  # logits in memory at a time: 512 MiB in bfloat16


@triton.jit(do_not_specialize=["pad"])
def _of_logits(  # type: ignore[no-untyped-def]
    logits, bias, gold, losses, step, pad, smoothing,
    VOCABULARY: tl.constexpr, BIASED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """-log p(gold) and -mean_v log p(v) of one row, and p - (1 - s) onehot - s/V in place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(gold + row)
    own = logits + row * step
    counts = target != pad
    of_gold = tl.load(own + target).to(tl.float32)  # before other threads may replace it
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


class GpuLinearCrossEntropy(LinearCrossEntropy):
    """`LinearCrossEntropy` on a GPU, with logits of some rows at a time. Padded rows have no loss and no gradient."""

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
