"""Residual connections, dropout and norms on a GPU: one Triton kernel where PyTorch starts four.

Dropout is a function of a seed in GPU memory and the position of each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_PROGRAMS = 1024  # maximum number of programs of a backward pass: about eight for each multiprocessor of a large GPU


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, int64 [1], from PyTorch's generator of this GPU.

    It stays on the GPU: reading it would synchronize.
    """
    return torch.randint(1 << 31, (1,), device=device)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """The finalizer of MurmurHash3: each bit of x changes every bit of the result with probability 1/2."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def keep_factors(seed, part, places, p):  # type: ignore[no-untyped-def]
    """1 / (1 - p) with probability 1 - p, otherwise 0, in the shape of `places` (int32 positions within `part`)."""
    start = _hash(tl.load(seed).to(tl.uint32) + part.to(tl.uint32) * 0x9E3779B1)
    draw = _hash(places.to(tl.uint32) * 0x9E3779B1 + start) >> 8
    return tl.where(draw.to(tl.float32) >= p * (1 << 24), 1 / (1 - p), 0.0)


@triton.jit(do_not_specialize=["p"])
def _residual(  # type: ignore[no-untyped-def]
    x, update, gain, shift, seed, total, output, statistics, epsilon, p,
    UPDATED: tl.constexpr, NORMED: tl.constexpr, RMS: tl.constexpr, SHIFTED: tl.constexpr, DROPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of the sum and of its norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sums = tl.load(x + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if UPDATED:
        added = tl.load(update + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            added *= keep_factors(seed, row, columns, p)
        sums += added
        tl.store(total + row * WIDTH + columns, sums.to(total.dtype.element_ty), mask=inside)
    if NORMED:
        mean = 0.0
        if not RMS:
            mean = tl.sum(sums) / WIDTH
        centred = tl.where(inside, sums - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred) / WIDTH + epsilon)
        normalized = centred * scale * tl.load(gain + columns, mask=inside, other=0.0)
        if SHIFTED:
            normalized += tl.load(shift + columns, mask=inside, other=0.0)
        tl.store(output + row * WIDTH + columns, normalized.to(output.dtype.element_ty), mask=inside)
        tl.store(statistics + 2 * row, mean)
        tl.store(statistics + 2 * row + 1, scale)


@triton.jit(do_not_specialize=["n_rows", "p"])
def _residual_backward(  # type: ignore[no-untyped-def]
    grad, total, gain, seed, statistics, grad_x, grad_update, grad_gain, grad_shift, n_rows, p,
    UPDATED: tl.constexpr, NORMED: tl.constexpr, RMS: tl.constexpr, SHIFTED: tl.constexpr, DROPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of every n-th row, and the sums over these rows of the gradients of gain and shift."""
    first, step = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    of_gain, of_shift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for number in range(first, n_rows, step):
        row = tl.cast(number, tl.int64)
        g = tl.load(grad + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            mean, scale = tl.load(statistics + 2 * row), tl.load(statistics + 2 * row + 1)
            sums = tl.load(total + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
            unit = tl.where(inside, (sums - mean) * scale, 0.0)
            of_gain += g * unit
            of_shift += g
            g *= tl.load(gain + columns, mask=inside, other=0.0)
            along = tl.sum(g * unit) / WIDTH
            common = 0.0
            if not RMS:
                common = tl.sum(g) / WIDTH
            g = (g - common - unit * along) * scale
            tl.store(grad_x + row * WIDTH + columns, g.to(grad_x.dtype.element_ty), mask=inside)
        if UPDATED:
            if DROPS:
                g *= keep_factors(seed, row, columns, p)
            tl.store(grad_update + row * WIDTH + columns, g.to(grad_update.dtype.element_ty), mask=inside)
    if NORMED:
        tl.store(grad_gain + first * WIDTH + columns, of_gain, mask=inside)
        if SHIFTED:
            tl.store(grad_shift + first * WIDTH + columns, of_shift, mask=inside)


def _norm_arguments(norm: nn.Module | None) -> tuple[object, ...]:
    """Gain, shift and epsilon of a norm, and whether it is an RMSNorm."""
    if norm is None:
        return None, None, 0.0, False
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


def add_and_norm(x: Float[Tensor, "*B D"], update: Tensor, norm: nn.Module | None, p: float) -> Float[Tensor, "*B D"]:
    """x + dropout(update), and the LayerNorm or RMSNorm of this sum if a norm is given, in the dtype of the update.

    Dropout is a function of one random seed and the position of each element.
    """
    return _Residual.apply(x, update, *_norm_arguments(norm), p, new_seed(x.device) if p else None)


def normed(x: Float[Tensor, "*B D"], norm: nn.LayerNorm | nn.RMSNorm) -> Float[Tensor, "*B D"]:
    """LayerNorm or RMSNorm of x."""
    return _Residual.apply(x, None, *_norm_arguments(norm), 0.0, None)


class _Residual(torch.autograd.Function):
    """Compute sums and norms in float32; store them in the dtype of the update, or of x without one."""

    @staticmethod
    def forward(ctx, x, update, gain, shift, epsilon, is_rms, p, seed):  # type: ignore[no-untyped-def]
        x, width = x.contiguous(), x.shape[-1]
        update = None if update is None else update.contiguous()
        total = x if update is None else torch.empty_like(update)
        output = statistics = None
        if gain is not None:
            output, statistics = torch.empty_like(total), x.new_empty(x.numel() // width, 2, dtype=torch.float32)
        ctx.p, ctx.dtypes = p, (x.dtype, None if update is None else update.dtype)
        ctx.options = update is not None, gain is not None, is_rms, shift is not None, seed is not None
        ctx.options += width, triton.next_power_of_2(width)
        tensors = x, update, gain, shift, seed, total, output, statistics
        _residual[(x.numel() // width,)](*_given(tensors), epsilon, p, *ctx.options, num_warps=_n_warps(width))
        ctx.save_for_backward(None if gain is None else total, gain, seed, statistics)
        return total if output is None else output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        total, gain, seed, statistics = ctx.saved_tensors
        grad, width = grad.contiguous(), grad.shape[-1]
        n_rows = grad.numel() // width
        n_programs = min(n_rows, _PROGRAMS)
        own, others = ctx.dtypes
        of_x = grad if gain is None else torch.empty_like(grad, dtype=own)
        of_update = None if others is None else torch.empty_like(grad, dtype=others)
        sums = None if gain is None else grad.new_empty(2, n_programs, width, dtype=torch.float32)
        of_gain, of_shift = (None, None) if sums is None else sums.unbind()
        tensors = grad, total, gain, seed, statistics, of_x, of_update, of_gain, of_shift
        _residual_backward[(n_programs,)](*_given(tensors), n_rows, ctx.p, *ctx.options, num_warps=_n_warps(width))
        if sums is not None:
            of_gain, of_shift = sums.sum(1).unbind()
        return of_x.to(own), of_update, of_gain, of_shift if ctx.options[3] else None, *[None] * 4


def _given(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Replace None by any valid pointer, which the kernel does not read."""
    first = next(x for x in tensors if x is not None)
    return [first if x is None else x for x in tensors]


def _n_warps(width: int) -> int:
    return min(8, max(1, width // 512))
