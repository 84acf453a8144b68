"""The kernels of training in the C++ library as operators of PyTorch, with their gradients.

Products round to bfloat16 and add in float32. Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.native.kernels import n_threads, training_library
from transduce.native.library import address, check


class _LossCall(ctypes.Structure):
    """`transduce_loss_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "gold")),
        *((name, ctypes.c_int64) for name in ("rows", "pad")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary")),
        ("smoothing", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("grad_hidden", "grad_weight", "grad_bias")),
    ]


class LinearCrossEntropy(torch.autograd.Function):
    """The sums of `label_smoothed_loss` without padded rows, with their gradient made in the forward pass.

    Logits exist in tiles only.
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
        wanted: bool,
    ):
        library = training_library()
        assert library is not None
        given = [None if x is None else x.contiguous() for x in (hidden, weight, bias, gold)]
        grads = [torch.empty_like(x) if wanted and x is not None else None for x in given[:3]]
        loss, nll = ctypes.c_double(), ctypes.c_double()
        inputs, outputs = ([None if x is None else x.data_ptr() for x in part] for part in (given, grads))
        call = _LossCall(*inputs, len(hidden), pad, hidden.shape[1], len(weight), smoothing, *outputs)
        check(library, library.transduce_loss(ctypes.byref(call), n_threads(), ctypes.byref(loss), ctypes.byref(nll)))
        ctx.save_for_backward(*grads)
        sums = torch.tensor(loss.value), torch.tensor(nll.value)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), None, None, None, None


class _HeadsCall(ctypes.Structure):
    """`transduce_heads_call`."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "queries", "keys", "width", "value_width")),
        ("scale", ctypes.c_float),
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


def _heads_call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> _HeadsCall:
    call = _HeadsCall(len(query), query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    call.width, call.value_width, call.scale = query.shape[3], value.shape[3], query.shape[3] ** -0.5
    for name, x in (("query", query), ("key", key), ("value", value)):
        setattr(call, name, x.data_ptr())
        setattr(call, f"{name}_strides", x.stride()[:3])
    if bias is not None:
        call.bias = bias.data_ptr()
        shape = zip(bias.shape[:3], bias.stride()[:3], strict=True)
        call.bias_strides = tuple(0 if n == 1 else step for n, step in shape)
    return call


def _dense_heads(x: Tensor) -> Tensor:
    """With the numbers of a head at one position side by side."""
    return x if x.stride(3) == 1 else x.contiguous()


def _empty_heads(like: Tensor, width: int) -> Tensor:
    """[B, H, T, width] in the order [B, T, H, width], in which heads are merged without a copy."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _place(x: Tensor) -> tuple[object, object]:
    return x.storage_offset(), x.stride()


def _empty_gradients(*tensors: Tensor) -> list[Tensor]:
    """Memory for gradients: of tensors that together are all of a packed projection, in one place and its order."""
    found: list[Tensor] = []
    memory: dict[int, Tensor] = {}  # by the address of the projection
    for x in tensors:
        storage = x.untyped_storage()
        address, n = storage.data_ptr(), storage.nbytes() // x.element_size()
        if sum(one.numel() for one in tensors if one.untyped_storage().data_ptr() == address) == n:
            whole = memory.setdefault(address, x.new_empty(n))
            found.append(whole.as_strided(x.shape, x.stride(), x.storage_offset()))
        else:
            found.append(_empty_heads(x, x.shape[3]))
    return found


class SplitHeads(torch.autograd.Function):
    """Views of the heads of several projections [B, T, sum of heads * width]: of each [B, H_i, T, K_i]."""

    @staticmethod
    def forward(ctx, x: Float[Tensor, "B T D"], heads: Sequence[int], widths: Sequence[int]):  # type: ignore[no-untyped-def]
        ctx.shape, ctx.heads = x.shape, heads
        ctx.rows = [n * width for n, width in zip(heads, widths, strict=True)]
        return _heads_of(x, ctx.rows, ctx.heads)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        storage, n = grads[0].untyped_storage(), math.prod(ctx.shape)
        if storage.nbytes() == n * grads[0].element_size():  # perhaps of `_empty_gradients`, already in their places
            whole = grads[0].as_strided((n,), (1,), 0).view(ctx.shape)
            parts = _heads_of(whole, ctx.rows, ctx.heads)
            same = (grad.untyped_storage().data_ptr() == storage.data_ptr() for grad in grads)
            if all(same) and list(map(_place, grads)) == list(map(_place, parts)):
                return whole, None, None
        whole = grads[0].new_empty(ctx.shape)
        for part, grad in zip(_heads_of(whole, ctx.rows, ctx.heads), grads, strict=True):
            part.copy_(grad)
        return whole, None, None


def _heads_of(x: Float[Tensor, "B T D"], rows: Sequence[int], heads: Sequence[int]) -> tuple[Tensor, ...]:
    """A view [B, H_i, T, K_i] of each part of `rows` numbers."""
    parts = zip(heads, x.split(rows, dim=-1), strict=True)
    return tuple(part.unflatten(-1, (n, -1)).transpose(1, 2) for n, part in parts)


class HeadsAttention(torch.autograd.Function):
    """softmax(Q K^T / sqrt(d_k) + bias) V of all heads, from bfloat16, with sums in float32 (paper 3.2.1, equation 1).

    The weights are computed again for the gradients.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        query: Float[Tensor, "B H T K"],
        key: Float[Tensor, "B G S K"],
        value: Float[Tensor, "B G S V"],
        bias: Float[Tensor, "#B #H #T S"] | None,
    ):
        library = training_library()
        assert library is not None
        query, key, value = map(_dense_heads, (query, key, value))
        call, output = _heads_call(query, key, value, bias), _empty_heads(query, value.shape[3])
        call.output = output.data_ptr()
        check(library, library.transduce_attend(ctypes.byref(call), n_threads()))
        ctx.save_for_backward(query, key, value, bias)
        return output

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        library = training_library()
        assert library is not None
        query, key, value, bias = ctx.saved_tensors
        call, grad = _heads_call(query, key, value, bias), _dense_heads(grad)
        grads = _empty_gradients(query, key, value)
        call.grad_output, call.grad_strides = grad.data_ptr(), grad.stride()[:3]
        for name, x in zip(("query", "key", "value"), grads, strict=True):
            setattr(call, f"grad_{name}", x.data_ptr())
            setattr(call, f"grad_{name}_strides", x.stride()[:3])
        check(library, library.transduce_attend_backward(ctypes.byref(call), n_threads()))
        return *grads, None


class _ResidualCall(ctypes.Structure):
    """`transduce_residual_call`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "rms")),
        *((name, ctypes.c_float) for name in ("epsilon", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("x", "update", "gain", "shift", "sum", "output", "statistics")),
        *(
            (name, ctypes.c_void_p)
            for name in ("grad_output", "normed", "grad_x", "grad_update", "grad_gain", "grad_shift")
        ),
    ]


def _pointers(**tensors: Tensor | None) -> dict[str, int | None]:
    return {name: None if x is None else x.data_ptr() for name, x in tensors.items()}


def add_and_norm(x: Float[Tensor, "*B D"], update: Tensor, norm: nn.Module | None, p: float) -> Float[Tensor, "*B D"]:
    """x + dropout(update), and the LayerNorm or RMSNorm of that, if there is one.

    What is dropped follows from one number of PyTorch's generator and the place of each element.
    """
    seed = _new_seed() if p else 0
    return _Residual.apply(x, update, *_norm_arguments(norm), p, seed)


def normed(x: Float[Tensor, "*B D"], norm: nn.LayerNorm | nn.RMSNorm) -> Float[Tensor, "*B D"]:
    """LayerNorm or RMSNorm of x."""
    return _Residual.apply(x, None, *_norm_arguments(norm), 0.0, 0)


def _norm_arguments(norm: nn.Module | None) -> tuple[object, ...]:
    """Gain, shift, epsilon, and whether it is an RMSNorm."""
    if norm is None:
        return None, None, 0.0, False
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, update, gain, shift, epsilon, is_rms, p, seed):  # type: ignore[no-untyped-def]
        library = training_library()
        assert library is not None
        x = x.contiguous()
        rows, total = x.numel() // x.shape[-1], x
        if update is not None:
            update, total = update.contiguous(), torch.empty_like(x)
        output = statistics = None
        if gain is not None:
            output, statistics = torch.empty_like(x), x.new_empty(rows, 2)
        call = _ResidualCall(rows, x.shape[-1], is_rms, epsilon, p, seed)
        given = _pointers(x=x, update=update, gain=gain, shift=shift, output=output, statistics=statistics)
        call.sum = None if update is None else total.data_ptr()
        for name, pointer in given.items():
            setattr(call, name, pointer)
        check(library, library.transduce_residual(ctypes.byref(call), n_threads()))
        ctx.options, ctx.has_update = (rows, x.shape[-1], is_rms, epsilon, p, seed), update is not None
        ctx.save_for_backward(total if gain is not None else None, gain, shift, statistics)
        return total if output is None else output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        library = training_library()
        assert library is not None
        normed, gain, shift, statistics = ctx.saved_tensors
        grad = grad.contiguous()
        grad_update = torch.empty_like(grad, dtype=torch.bfloat16) if ctx.has_update else None
        grads = [None if like is None else torch.empty_like(like) for like in (normed, gain, shift)]
        call = _ResidualCall(*ctx.options)
        written = dict(zip(("grad_x", "grad_gain", "grad_shift"), grads, strict=True))
        read = {"normed": normed, "gain": gain, "shift": shift, "statistics": statistics, "grad_output": grad}
        for name, pointer in _pointers(**read, **written, grad_update=grad_update).items():
            setattr(call, name, pointer)
        check(library, library.transduce_residual_backward(ctypes.byref(call), n_threads()))
        of_x = grad if normed is None else grads[0]
        return of_x, grad_update, grads[1], grads[2], None, None, None, None


class _LinearCall(ctypes.Structure):
    """`transduce_linear_call`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "x_is_bf16", "grad_is_bf16")),
        ("x", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("p", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "output", "before")),
        *((name, ctypes.c_void_p) for name in ("grad_output", "grad_x", "grad_weight", "grad_bias")),
    ]


_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # by their numbers in transduce_linear_call


def _new_seed() -> int:
    """A number of PyTorch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


def linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> Tensor:
    """x W^T + b in bfloat16."""
    return _Linear.apply(x, weight, bias, -1, 0.0, 0)


def activated_linear(x: Float[Tensor, "*B I"], layer: nn.Linear, activation: str, p: float) -> Float[Tensor, "*B O"]:
    """dropout(activation(x W^T + b)) in bfloat16."""
    return _Linear.apply(x, layer.weight, layer.bias, _ACTIVATIONS.index(activation), p, _new_seed() if p else 0)


class _Linear(torch.autograd.Function):
    """From x in bfloat16 or float32, with float32 weights and gradients of them."""

    @staticmethod
    def forward(ctx, x, weight, bias, activation, p, seed):  # type: ignore[no-untyped-def]
        library = training_library()
        assert library is not None
        x, weight = x.contiguous(), weight.contiguous()
        output = x.new_empty(*x.shape[:-1], len(weight), dtype=torch.bfloat16)
        before = torch.empty_like(output) if activation > 0 else None
        ctx.options = (activation, p, seed)
        call = _linear_call(ctx.options, x=x, weight=weight, bias=bias, output=output, before=before)
        check(library, library.transduce_linear(ctypes.byref(call), n_threads()))
        ctx.save_for_backward(x, weight, bias, output if activation == 0 else None, before)
        return output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        library = training_library()
        assert library is not None
        x, weight, bias, output, before = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.empty_like(x) if ctx.needs_input_grad[0] else None, torch.empty_like(weight)]
        grads.append(None if bias is None else torch.empty_like(bias))
        written = dict(zip(("grad_x", "grad_weight", "grad_bias"), grads, strict=True))
        call = _linear_call(ctx.options, x=x, weight=weight, output=output, before=before, grad_output=grad, **written)
        call.grad_is_bf16 = grad.dtype == torch.bfloat16
        check(library, library.transduce_linear_backward(ctypes.byref(call), n_threads()))
        return *grads, None, None, None


def _linear_call(options: tuple[int, float, int], *, x: Tensor, weight: Tensor, **others: Tensor | None) -> _LinearCall:
    activation, p, seed = options
    rows, is_bf16 = x.numel() // x.shape[-1], x.dtype == torch.bfloat16
    call = _LinearCall(rows, x.shape[-1], len(weight), is_bf16, activation=activation, p=p, seed=seed)
    for name, pointer in _pointers(x=x, weight=weight, **others).items():
        setattr(call, name, pointer)
    return call


def orthogonalize(matrices: Float[Tensor, "N R C"], coefficients: Sequence[float], steps: int) -> Tensor:
    """Newton-Schulz steps on float32 matrices, R <= C: X / |X| becomes a X + (b G + c G G) X with G = X X^T."""
    library = training_library()
    assert library is not None
    x = matrices.float().contiguous()
    x = x.clone() if x.data_ptr() == matrices.data_ptr() else x
    factors = array("f", coefficients)
    check(library, library.transduce_orthogonalize(x.data_ptr(), *x.shape, address(factors), steps, n_threads()))
    return x
