"""Attention of training in the C++ library as an operator of PyTorch, with its gradients."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native.deferred import dense, flush, run, save, strided, written
from transduce.native.kernels import dtype_in_use, new_seed
from transduce.native.operators import LinearProduct, rounded


class _HeadsCall(ctypes.Structure):
    """`transduce_heads_call`."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "queries", "keys", "width", "value_width")),
        *((name, ctypes.c_int32) for name in ("causal", "is_bf16")),
        *((name, ctypes.c_float) for name in ("scale", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value")),
        ("bias", ctypes.c_void_p),
        ("bias_strides", ctypes.c_int64 * 3),
        ("output", ctypes.c_void_p),
        ("grad_output", ctypes.c_void_p),
        ("grad_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_void_p) for name in ("grad_query", "grad_key", "grad_value")),
        *((f"grad_{name}_strides", ctypes.c_int64 * 3) for name in ("query", "key", "value")),
    ]


_Options = tuple[bool, float, int]  # causal, dropout, and its seed


def _heads_call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, options: _Options) -> _HeadsCall:
    batch, n_heads, n_queries, width = query.shape
    causal, p, seed = options
    sizes = batch, n_heads, key.shape[1], n_queries, key.shape[2], width, value.shape[3]
    given = query, key, value
    call = _HeadsCall(
        *(*sizes, causal, query.dtype == torch.bfloat16, width**-0.5, p, seed),
        *(x.data_ptr() for x in given),
        *(x.stride()[:3] for x in given),
    )
    if bias is not None:
        call.bias, call.bias_strides = bias.data_ptr(), strides_of_bias(bias)
    return call


def strides_of_bias(bias: Float[Tensor, "#B #H #T S"]) -> tuple[int, ...]:
    """0 for an axis along which it is the same."""
    return tuple(0 if n == 1 else step for n, step in zip(bias.shape[:3], bias.stride()[:3], strict=True))


def dense_heads(x: Tensor) -> Tensor:
    """With the numbers of a head at one position side by side."""
    return x if x.stride(3) == 1 else dense(x)


def empty_heads(like: Tensor, width: int) -> Tensor:
    """[B, H, T, width] in the order [B, T, H, width], in which heads are merged without a copy."""
    batch, heads, length = like.shape[:3]
    return torch.empty(batch, length, heads, width, dtype=like.dtype).transpose(1, 2)


def empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Memory for gradients: of tensors that together are all of a packed projection, in one place and its order."""
    found: list[Tensor] = []
    memory: dict[int, Tensor] = {}  # by the address of the projection
    for x in tensors:
        storage = x.untyped_storage()
        address, n = storage.data_ptr(), storage.nbytes() // x.element_size()
        if sum(one.numel() for one in tensors if one.untyped_storage().data_ptr() == address) == n:
            whole = memory.setdefault(address, torch.empty(n, dtype=x.dtype))
            found.append(whole.as_strided(x.shape, x.stride(), x.storage_offset()))
        else:
            found.append(empty_heads(x, x.shape[3]))
    return found


def projected_heads(
    x: Float[Tensor, "*B T D"], layer: nn.Linear, heads: Sequence[int], widths: Sequence[int]
) -> tuple[Tensor, ...]:
    """Several projections of x in one product, x W^T + b; of each a view [B, H_i, T, K_i]."""
    rows = [n * width for n, width in zip(heads, widths, strict=True)]
    return _ProjectedHeads.apply(rounded(x), layer.weight, layer.bias, dtype_in_use(), rows, heads)


class _ProjectedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype, rows, heads):  # type: ignore[no-untyped-def]
        whole = LinearProduct.forward(ctx, x, weight, bias, dtype, -1, 0.0, 0)
        ctx.shape, ctx.places = whole.shape, _places_of_heads(whole.shape, rows, heads)
        return tuple(written(strided(whole, *place)) for place in ctx.places)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        return *LinearProduct.backward(ctx, _merged(ctx, grads))[:3], None, None, None


def _merged(ctx: Any, grads: Sequence[Tensor]) -> Float[Tensor, "B T D"]:
    """The gradients of all heads side by side, without a copy if they are in their places."""
    storage, n = grads[0].untyped_storage(), math.prod(ctx.shape)
    if storage.nbytes() == n * grads[0].element_size():  # perhaps of `empty_gradients`
        same = all(grad.untyped_storage().data_ptr() == storage.data_ptr() for grad in grads)
        if same and [(grad.shape, grad.stride(), grad.storage_offset()) for grad in grads] == ctx.places:
            return strided(grads[0], ctx.shape, (math.prod(ctx.shape[1:]), ctx.shape[2], 1), 0)
    flush()
    whole = torch.empty(ctx.shape, dtype=grads[0].dtype)
    for place, grad in zip(ctx.places, grads, strict=True):
        whole.as_strided(*place).copy_(grad)
    return whole


def _places_of_heads(
    shape: torch.Size, rows: Sequence[int], heads: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Shape, strides and offset in a contiguous [B, T, D] of what `heads_of` returns: one call of PyTorch each."""
    batch, length, width = shape
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    offset = 0
    for n, part in zip(heads, rows, strict=True):
        found.append(((batch, n, length, part // n), (length * width, part // n, width, 1), offset))
        offset += part
    return found


def heads_of(x: Float[Tensor, "B T D"], rows: Sequence[int], heads: Sequence[int]) -> tuple[Tensor, ...]:
    """A view [B, H_i, T, K_i] of each part of `rows` numbers."""
    parts = zip(heads, x.split(rows, dim=-1), strict=True)
    return tuple(part.unflatten(-1, (n, -1)).transpose(1, 2) for n, part in parts)


def attend(
    query: Float[Tensor, "B H T K"],
    key: Float[Tensor, "B G S K"],
    value: Float[Tensor, "B G S V"],
    *,
    bias: Float[Tensor, "#B #H #T S"] | None = None,
    causal: bool = False,
    p: float = 0.0,
) -> Float[Tensor, "B H T V"]:
    """dropout(softmax(Q K^T / sqrt(d_k) + bias)) V of all heads, in their type, with sums in float32 (paper 3.2.1).

    What is dropped follows from one number of PyTorch's generator and the place of each weight.
    """
    if query.is_cuda:
        from transduce.native import triton_attention

        return triton_attention.attend(query, key, value, bias=bias, causal=causal, p=p)
    return _HeadsAttention.apply(query, key, value, bias, (causal, p, new_seed() if p else 0))


class _HeadsAttention(torch.autograd.Function):
    """The weights are computed again for the gradients."""

    @staticmethod
    def forward(ctx, query, key, value, bias, options):  # type: ignore[no-untyped-def]
        query, key, value = map(dense_heads, (query, key, value))
        call, output = _heads_call(query, key, value, bias, options), empty_heads(query, value.shape[3])
        call.output = output.data_ptr()
        run("attend", call, query, key, value, bias, output)
        ctx.options = options
        save(ctx, query, key, value, bias)
        return written(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        query, key, value, bias = ctx.saved_tensors
        call, grad = _heads_call(query, key, value, bias, ctx.options), dense_heads(grad)
        grads = empty_gradients(query, key, value)
        call.grad_output, call.grad_strides = grad.data_ptr(), grad.stride()[:3]
        for name, x in zip(("query", "key", "value"), grads, strict=True):
            setattr(call, f"grad_{name}", x.data_ptr())
            setattr(call, f"grad_{name}_strides", x.stride()[:3])
        run("attend_backward", call, query, key, value, bias, grad, *grads)
        return *map(written, grads), None, None
