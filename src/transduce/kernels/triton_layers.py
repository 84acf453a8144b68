"""Triton kernels for a GPU: attention for short sequences, and residual connections with dropout and norm.

FlashAttention and similar kernels use tiles that sentences do not fill, and some make a new plan for each shape. Here
one program holds the attention weights of one head of one sentence as a single tile in registers. The backward kernel
recomputes the weights and computes all gradients in one pass; it reads each input once and writes each gradient once.

A residual connection, dropout and the norm are one kernel, for which PyTorch starts four. Dropout is a function of a
seed in GPU memory and of each element's position.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels.calls import broadcast_strides

_PROGRAMS = 1024  # maximum number of programs of a backward pass: about eight for each multiprocessor of a large GPU


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, int64 [1], from PyTorch's generator of this GPU.

    The seed stays on the GPU, as reading it on the CPU would synchronize the two.
    """
    return torch.randint(1 << 31, (1,), device=device)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """Hash x (uint32) with MurmurHash3's finalizer: each bit of x changes every result bit with probability 1/2."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def keep_factors(seed, part, places, p):  # type: ignore[no-untyped-def]
    """Draw dropout's factors: 1 / (1 - p) with probability 1 - p, otherwise 0, in the shape of `places`.

    They depend on the seed, on `part` (such as a row's number) and on `places` (int32 positions within the part).
    """
    start = _hash(tl.load(seed).to(tl.uint32) + part.to(tl.uint32) * 0x9E3779B1)
    draw = _hash(places.to(tl.uint32) * 0x9E3779B1 + start) >> 8
    return tl.where(draw.to(tl.float32) >= p * (1 << 24), 1 / (1 - p), 0.0)


@triton.jit(do_not_specialize=["p"])
def _residual(  # type: ignore[no-untyped-def]
    x, update, gain, shift, seed, total, output, statistics, epsilon, p,
    UPDATED: tl.constexpr, NORMED: tl.constexpr, RMS: tl.constexpr, SHIFTED: tl.constexpr, DROPS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kernel that computes one row of x + dropout(update) and of its norm."""
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
    """Kernel that computes gradients of every n-th row, and their sums over these rows for gain and shift."""
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
    """Return gain, shift and epsilon of a norm, and whether it is an RMSNorm."""
    if norm is None:
        return None, None, 0.0, False
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


def add_and_norm(x: Float[Tensor, "*B D"], update: Tensor, norm: nn.Module | None, p: float) -> Float[Tensor, "*B D"]:
    """Compute x + dropout(update) and, if a norm is given, its LayerNorm or RMSNorm, in the dtype of `update`.

    Dropout has probability p; it is a function of one random seed and of each element's position.
    """
    return _Residual.apply(x, update, *_norm_arguments(norm), p, new_seed(x.device) if p else None)


def normed(x: Float[Tensor, "*B D"], norm: nn.LayerNorm | nn.RMSNorm) -> Float[Tensor, "*B D"]:
    """Compute the LayerNorm or RMSNorm of x."""
    return _Residual.apply(x, None, *_norm_arguments(norm), 0.0, None)


class _Residual(torch.autograd.Function):
    """Autograd function of `add_and_norm`: computes in float32, stores in the dtype of the update, else of x."""

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
    """Replace None by another tensor of the list: a valid pointer, which the kernel does not read."""
    first = next(x for x in tensors if x is not None)
    return [first if x is None else x for x in tensors]


def _n_warps(width: int) -> int:
    return min(8, max(1, width // 512))


_LONGEST, _WIDEST = 64, 128  # sequences and heads whose tiles fit into the registers of a GPU's multiprocessor
_HALF = (torch.bfloat16, torch.float16)  # in float32, Triton would take ten seconds to compile a product
_VARYING = ["n_queries", "n_keys", "causal", "p", "m_b", "m_h", "m_t", "m_s"]
"""Arguments of attention kernels whose new values must not make Triton compile the kernels again."""


@triton.jit
def _weights(query, key, bias, rows, columns, n_keys, row_step, column_step, scale, causal):  # type: ignore[no-untyped-def]
    """Compute the attention weights of one head, softmax(Q K^T * scale + bias), in float32."""
    inside = columns[None, :] < n_keys
    added = tl.load(bias + rows[:, None] * row_step + columns[None, :] * column_step, mask=inside, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale + added
    inside = inside & ((columns[None, :] <= rows[:, None]) | (causal == 0))
    scores = tl.where(inside, scores, -float("inf"))
    exponentials = tl.exp(scores - tl.max(scores, 1)[:, None])
    return exponentials / tl.sum(exponentials, 1)[:, None]


@triton.jit(do_not_specialize=_VARYING)
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, bias, seed, output,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, m_b, m_h, m_t, m_s, o_b, o_h, o_t,
    n_queries, n_keys, causal, scale, p,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    DROPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Kernel that computes the output of attention; a program for each head of each sentence."""
    program = tl.program_id(0).to(tl.int64)
    sentence, head = program // HEADS, program % HEADS
    rows, columns, width, values = tl.arange(0, N), tl.arange(0, N), tl.arange(0, K), tl.arange(0, V)
    q_mask = (rows[:, None] < n_queries) & (width[None, :] < WIDTH)
    k_mask = (columns[:, None] < n_keys) & (width[None, :] < WIDTH)
    v_mask = (columns[:, None] < n_keys) & (values[None, :] < VALUES)
    q = tl.load(query + sentence * q_b + head * q_h + rows[:, None] * q_t + width[None, :], mask=q_mask, other=0.0)
    group = head // GROUP
    k = tl.load(key + sentence * k_b + group * k_h + columns[:, None] * k_t + width[None, :], mask=k_mask, other=0.0)
    v = tl.load(value + sentence * v_b + group * v_h + columns[:, None] * v_t + values[None, :], mask=v_mask, other=0.0)
    own_bias = bias + sentence * m_b + head * m_h
    known = tl.minimum(rows, n_queries - 1)
    weights = _weights(q, k, own_bias, known, columns, n_keys, m_t, m_s, scale, causal)
    if DROPS:
        weights *= keep_factors(seed, program, rows[:, None] * N + columns[None, :], p)
    heads = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    o_mask = (rows[:, None] < n_queries) & (values[None, :] < VALUES)
    out = output + sentence * o_b + head * o_h + rows[:, None] * o_t + values[None, :]
    tl.store(out, heads.to(output.dtype.element_ty), mask=o_mask)


@triton.jit(do_not_specialize=_VARYING)
def _attend_backward(  # type: ignore[no-untyped-def]
    query, key, value, bias, seed, grad, grad_query, grad_key, grad_value,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, m_b, m_h, m_t, m_s, g_b, g_h, g_t,
    n_queries, n_keys, causal, scale, p,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    DROPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Kernel that computes all gradients of attention, [B, T, H, K] each; a program per key head of each sentence."""
    program = tl.program_id(0).to(tl.int64)
    sentence, group = program // (HEADS // GROUP), program % (HEADS // GROUP)
    rows, columns, width, values = tl.arange(0, N), tl.arange(0, N), tl.arange(0, K), tl.arange(0, V)
    q_mask = (rows[:, None] < n_queries) & (width[None, :] < WIDTH)
    k_mask = (columns[:, None] < n_keys) & (width[None, :] < WIDTH)
    v_mask = (columns[:, None] < n_keys) & (values[None, :] < VALUES)
    g_mask = (rows[:, None] < n_queries) & (values[None, :] < VALUES)
    k = tl.load(key + sentence * k_b + group * k_h + columns[:, None] * k_t + width[None, :], mask=k_mask, other=0.0)
    v = tl.load(value + sentence * v_b + group * v_h + columns[:, None] * v_t + values[None, :], mask=v_mask, other=0.0)
    of_key, of_value = tl.zeros([N, K], tl.float32), tl.zeros([N, V], tl.float32)
    known = tl.minimum(rows, n_queries - 1)
    for member in tl.static_range(GROUP):
        head = group * GROUP + member
        q = tl.load(query + sentence * q_b + head * q_h + rows[:, None] * q_t + width[None, :], mask=q_mask, other=0.0)
        g = tl.load(grad + sentence * g_b + head * g_h + rows[:, None] * g_t + values[None, :], mask=g_mask, other=0.0)
        own_bias = bias + sentence * m_b + head * m_h
        weights = _weights(q, k, own_bias, known, columns, n_keys, m_t, m_s, scale, causal)
        of_weights = tl.dot(g, tl.trans(v), input_precision="ieee")
        used = weights
        if DROPS:
            kept = keep_factors(seed, sentence * HEADS + head, rows[:, None] * N + columns[None, :], p)
            used = weights * kept
            of_weights *= kept
        of_value += tl.dot(tl.trans(used.to(g.dtype)), g, input_precision="ieee")
        of_scores = weights * (of_weights - tl.sum(weights * of_weights, 1)[:, None])
        of_scores = (of_scores * scale).to(q.dtype)
        of_query = tl.dot(of_scores, k, input_precision="ieee")
        of_key += tl.dot(tl.trans(of_scores), q, input_precision="ieee")
        at = grad_query + ((sentence * n_queries + rows[:, None]) * HEADS + head) * WIDTH + width[None, :]
        tl.store(at, of_query.to(grad_query.dtype.element_ty), mask=q_mask)
    at = (sentence * n_keys + columns[:, None]) * (HEADS // GROUP) + group
    tl.store(grad_key + at * WIDTH + width[None, :], of_key.to(grad_key.dtype.element_ty), mask=k_mask)
    tl.store(grad_value + at * VALUES + values[None, :], of_value.to(grad_value.dtype.element_ty), mask=v_mask)


def _tile(n: int) -> int:
    """Round n up to a power of two of at least 16, a valid size of a tile in Triton's matrix products."""
    return max(16, 1 << (n - 1).bit_length())


def attends(query: Float[Tensor, "*B T K"], key: Float[Tensor, "*b S K"], value: Tensor, bias: object) -> bool:
    """Whether `attend` supports these inputs: short sequences in half precision on a GPU, with a fixed bias or none."""
    if query.dim() != 4 or not query.is_cuda or query.dtype not in _HALF or key.dtype != query.dtype:
        return False
    scores = (*query.shape[:3], key.shape[2])
    fits = 0 < max(scores[2:]) <= _LONGEST and min(scores) > 0 and max(query.shape[3], value.shape[3]) <= _WIDEST
    same_batch = len(query) == len(key) and key.shape[:3] == value.shape[:3] and key.shape[3] == query.shape[3]
    is_plain = bias is None or (
        isinstance(bias, Tensor)
        and bias.dim() == 4
        and all(n in (1, of_scores) for n, of_scores in zip(bias.shape, scores, strict=True))
        and bias.dtype == torch.float32
        and not bias.requires_grad
    )
    return fits and same_batch and is_plain


def _dense_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
    """Return x, or a copy if the numbers of its last axis are not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _empty_heads(like: Float[Tensor, "B H T _"], width: int) -> Float[Tensor, "B H T K"]:
    """Allocate a tensor [B, H, T, width], stored as [B, T, H, width] so that heads are merged without a copy."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def attend(
    query: Float[Tensor, "B H T K"],
    key: Float[Tensor, "B G S K"],
    value: Float[Tensor, "B G S V"],
    *,
    bias: Float[Tensor, "#B #H #T S"] | None = None,
    causal: bool = False,
    p: float = 0.0,
) -> Float[Tensor, "B H T V"]:
    """Compute attention, dropout(softmax(Q K^T / sqrt(d_k) + bias)) V, with float32 sums (paper 3.2.1).

    Query head h uses key head h // (H / G). T and S are at most 64, K and V at most 128 (see `attends`). Dropout has
    probability p; it is a function of one random seed and of each weight's position.
    """
    return _HeadsAttention.apply(query, key, value, bias, new_seed(query.device) if p else None, causal, p)


class _HeadsAttention(torch.autograd.Function):
    """Autograd function of `attend`, which recomputes the attention weights in the backward pass."""

    @staticmethod
    def forward(ctx, query, key, value, bias, seed, causal, p):  # type: ignore[no-untyped-def]
        query, key, value = map(_dense_heads, (query, key, value))
        output = _empty_heads(query, value.shape[3])
        n_programs, tensors = len(query) * query.shape[1], [query, key, value, bias, seed, output]
        _launch(_attend, n_programs, tensors, [query, key, value, output], causal, p)
        ctx.options = causal, p
        ctx.save_for_backward(query, key, value, bias, seed)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, key, value, bias, seed = ctx.saved_tensors
        grad, grads = _dense_heads(grad), [_empty_heads(x, x.shape[3]) for x in (query, key, value)]
        n_programs, tensors = len(key) * key.shape[1], [query, key, value, bias, seed, grad, *grads]
        _launch(_attend_backward, n_programs, tensors, [query, key, value, grad], *ctx.options)
        return *grads, *[None] * 4


def _launch(kernel: Any, n_programs: int, tensors: list[Tensor | None], strided: list[Tensor], *options: Any) -> None:
    """Start an attention kernel. `strided`: query, key, value, and the output or its gradient. `options`: causal, p."""
    query, key, value, other = strided
    bias, seed = tensors[3:5]
    if bias is None:
        tensors[3], steps = query.new_zeros(1, dtype=torch.float32), [0] * 4
    else:
        steps = [*broadcast_strides(bias)]
    strides = [step for x in strided[:3] for step in x.stride()[:3]] + steps + [*other.stride()[:3]]
    heads, n_queries, width = query.shape[1:]
    n_keys, values = key.shape[2], value.shape[3]
    causal, p = options
    tile = _tile(max(n_queries, n_keys))  # square, so that there are few kernels to compile
    kernel[(n_programs,)](
        *(query if x is None else x for x in tensors), *strides, n_queries, n_keys, int(causal), width**-0.5, p,
        heads, heads // key.shape[1], width, values, seed is not None, tile, _tile(width), _tile(values),
        num_warps=1 if tile == 16 else 4,
    )  # fmt: skip
