"""Our kernels as operators of PyTorch, with their gradients: on CPUs the C++ library's, on GPUs those of triton_*.py.

Products are of float32 or of bfloat16 numbers, and add in float32. Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native.deferred import dense, flush, gradient, run, save, taken, takes_gradients, written
from transduce.native.kernels import dtype_in_use, new_seed

floats = partial(torch.empty, dtype=torch.float32)  # whatever PyTorch's default type is


class _LossCall(ctypes.Structure):
    """`transduce_loss_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "gold")),
        *((name, ctypes.c_int64) for name in ("rows", "pad")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary", "is_bf16")),
        ("smoothing", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("grad_hidden", "grad_weight", "grad_bias", "loss", "nll")),
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
        dtype: torch.dtype,
        wanted: bool,
    ):
        given = [None if x is None else dense(x) for x in (hidden, weight, bias, gold)]
        grads = [_empty(x) if wanted and x is not None else None for x in given[:3]]
        loss, nll = floats(()), floats(())
        sizes = len(hidden), pad, hidden.shape[1], weight.shape[0]
        options = *sizes, dtype == torch.bfloat16, smoothing
        written_to = *grads, loss, nll
        run("loss", _LossCall(*_pointers(*given), *options, *_pointers(*written_to)), *given, *written_to)
        save(ctx, *grads, weight, bias)
        loss, nll = written(loss), written(nll)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        *grads, weight, bias = ctx.saved_tensors
        if grad_loss != 1 or not takes_gradients():  # otherwise this is the only backward pass
            flush()  # the gradients are plain tensors, which the call may still have to write
            grads = [None if grad is None else grad * grad_loss for grad in grads]
        return gradient(None, grads[0]), gradient(weight, grads[1]), gradient(bias, grads[2]), *[None] * 5


class _ResidualCall(ctypes.Structure):
    """`transduce_residual_call`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "rms", "is_bf16")),
        *((name, ctypes.c_float) for name in ("epsilon", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("x", "update", "gain", "shift", "sum", "output", "statistics")),
        *((name, ctypes.c_void_p) for name in ("rounded", "grad_output", "normed", "grad_rounded")),
        *((name, ctypes.c_void_p) for name in ("grad_kept", "grad_x", "grad_update", "grad_gain", "grad_shift")),
    ]


def with_rounded(x: Tensor, copy: Tensor | None) -> Tensor:
    """x, which keeps a rounded copy for linear layers, unless changes of x are not counted.

    The gradients of both are added where the norm's is computed, and not by PyTorch's engine in a separate pass.
    """
    if copy is not None and not x.is_inference():
        vars(x)["_rounded"] = copy, x._version
    return x


def rounded(x: Tensor) -> Tensor:
    """The copy of x in the type of the products in use, if it has one and has not been changed since; otherwise x."""
    copy, version = vars(x).get("_rounded", (None, 0))
    return copy if copy is not None and copy.dtype == dtype_in_use() and version == x._version else x


def _empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, of the same shape; never a `Pending`."""
    return torch.empty(like.shape, dtype=dtype or like.dtype)


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in tensors]


def add_and_norm(x: Float[Tensor, "*B D"], update: Tensor, norm: nn.Module | None, p: float) -> Float[Tensor, "*B D"]:
    """x + dropout(update), and the LayerNorm or RMSNorm of that, if there is one.

    What is dropped follows from one number of PyTorch's generator and the place of each element.
    """
    if x.is_cuda:
        from transduce.native import triton_residual

        return triton_residual.add_and_norm(x, update, norm, p)
    seed = new_seed() if p else 0
    return with_rounded(*_Residual.apply(x, update, *norm_arguments(norm), (p, seed), _copied_as())[:2])


def dropped(x: Float[Tensor, "*B D"], p: float) -> Float[Tensor, "*B D"]:
    """dropout(x) of float32 numbers on a CPU."""
    return _Residual.apply(None, x, *norm_arguments(None), (p, new_seed()), None)[0]


def normed(x: Float[Tensor, "*B D"], norm: nn.LayerNorm | nn.RMSNorm) -> Float[Tensor, "*B D"]:
    """LayerNorm or RMSNorm of x."""
    return normed_beside(x, norm)[1]


def normed_beside(
    x: Float[Tensor, "*B D"], norm: nn.LayerNorm | nn.RMSNorm
) -> tuple[Float[Tensor, "*B D"], Float[Tensor, "*B D"]]:
    """x, and its LayerNorm or RMSNorm.

    On a CPU, the gradients of the returned x and of the norm are added where the norm's is computed.
    """
    if x.is_cuda:
        from transduce.native import triton_residual

        return x, triton_residual.normed(x, norm)
    output, copy, kept = _Residual.apply(x, None, *norm_arguments(norm), (0.0, 0), _copied_as())
    return kept, with_rounded(output, copy)


def _copied_as() -> torch.dtype | None:
    """The type of the copy of a norm that the next linear layers read; None: they read the norm."""
    dtype = dtype_in_use() if torch.is_grad_enabled() else None
    return None if dtype == torch.float32 else dtype


def norm_arguments(norm: nn.Module | None) -> tuple[object, ...]:
    """Gain, shift, epsilon, and whether it is an RMSNorm."""
    if norm is None:
        return None, None, 0.0, False
    return norm.weight, getattr(norm, "bias", None), norm.eps, isinstance(norm, nn.RMSNorm)


class _Residual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, update, gain, shift, epsilon, is_rms, dropout, dtype):  # type: ignore[no-untyped-def]
        """Return the sum, or its norm and, unless `dtype` is None, a copy of the norm in this type.

        Without an update, x is returned too. `dropout`: the rate of that of the update, and its seed.
        """
        x, update = (None if one is None else dense(one) for one in (x, update))
        like = update if x is None else x
        rows, total = like.numel() // like.shape[-1], x if update is None else _empty(like, torch.float32)
        output = statistics = copy = None
        if gain is not None:
            output, statistics = _empty(like, torch.float32), floats(rows, 2)
            copy = None if dtype is None else _empty(like, dtype)
        is_bf16 = (dtype if update is None else update.dtype) == torch.bfloat16
        ctx.updates, ctx.options = update is not None, (rows, like.shape[-1], is_rms, is_bf16, epsilon, *dropout)
        ctx.set_materialize_grads(False)
        tensors = x, update, gain, shift, None if update is None else total, output, statistics, copy
        run("residual", _ResidualCall(*ctx.options, *_pointers(*tensors)), *tensors)
        save(ctx, total if gain is not None else None, gain, shift, statistics)
        copy = None if copy is None else written(copy)
        return written(total if output is None else output), copy, x if update is None else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_rounded, grad_kept):  # type: ignore[no-untyped-def]
        normed, gain, shift, statistics = ctx.saved_tensors
        if grad is grad_rounded is None:  # the norm is not used
            return grad_kept, *[None] * 7
        given = (None if one is None else dense(one) for one in (grad, grad_rounded, grad_kept))
        grad, grad_rounded, grad_kept = given
        dtype = torch.bfloat16 if ctx.options[3] else torch.float32
        grad_update = _empty(grad_rounded if grad is None else grad, dtype) if ctx.updates else None
        grad_x, grad_gain, grad_shift = (None if like is None else _empty(like) for like in (normed, gain, shift))
        read = None, None, gain, shift, None, None, statistics, None, grad, normed, grad_rounded, grad_kept
        tensors = *read, grad_x, grad_update, grad_gain, grad_shift
        run("residual_backward", _ResidualCall(*ctx.options, *_pointers(*tensors)), *tensors)
        of_x = (grad if ctx.needs_input_grad[0] else None) if normed is None else gradient(None, grad_x)
        found = of_x, gradient(None, grad_update), gradient(gain, grad_gain), gradient(shift, grad_shift)
        return *found, None, None, None, None


class _EmbeddingCall(ctypes.Structure):
    """`transduce_embedding_call`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "length")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary")),
        *((name, ctypes.c_void_p) for name in ("ids", "table", "positions")),
        *((name, ctypes.c_float) for name in ("scale", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("output", "grad_output", "grad_table", "grad_positions")),
        ("adds", ctypes.c_int32),
    ]


def embedding(
    ids: Int[Tensor, "B T"], table: Float[Tensor, "V D"], positions: Float[Tensor, "T D"] | None, scale: float, p: float
) -> Float[Tensor, "B T D"]:
    """dropout(table[ids] * scale + positions)."""
    return _Embedding.apply(ids, table, positions, scale, p, new_seed() if p else 0)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, table, positions, scale, p, seed):  # type: ignore[no-untyped-def]
        ids, table = ids.contiguous(), table.contiguous()
        positions = None if positions is None else positions.contiguous()
        output = floats(*ids.shape, table.shape[1])
        save(ctx, ids, table, positions)
        ctx.options = scale, p, seed
        tensors = ids, table, positions, output
        run("embedding", _embedding_call(ctx.options, *tensors), *tensors)
        return written(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        read, grad = ctx.saved_tensors, grad.contiguous()
        known = taken(read[1])  # of a tied table, which an output layer has written: only a few rows change
        wanted = zip(read[1:], ctx.needs_input_grad[1:], strict=False)
        grads = [_empty(x) if is_wanted else None for x, is_wanted in wanted]
        if known is not None:
            grads[0] = known
        tensors = *read, None, grad, *grads
        call = _embedding_call(ctx.options, *tensors)
        call.adds = known is not None
        run("embedding_backward", call, *tensors)
        of_table = gradient(read[1], grads[0]) if known is None else None
        return None, of_table, gradient(read[2], grads[1]), None, None, None


def _embedding_call(
    options: tuple[float, float, int], ids: Tensor, table: Tensor, *others: Tensor | None
) -> _EmbeddingCall:
    """`others`: positions, output and so on, as the structure has them."""
    sizes = ids.numel(), ids.shape[1], table.shape[1], table.shape[0]
    return _EmbeddingCall(*sizes, *_pointers(ids, table, others[0]), *options, *_pointers(*others[1:]))


class _LinearCall(ctypes.Structure):
    """`transduce_linear_call`."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "is_bf16", "x_is_bf16", "grad_is_bf16")),
        ("x", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("p", ctypes.c_float),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "output", "slope")),
        *((name, ctypes.c_void_p) for name in ("grad_output", "grad_x", "grad_weight", "grad_bias")),
        ("adds", ctypes.c_int32),
    ]


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # by their numbers in transduce_linear_call


def linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> Tensor:
    """x W^T + b, of the type of the products in use."""
    return LinearProduct.apply(rounded(x), weight, bias, dtype_in_use(), -1, 0.0, 0)


def activated_linear(x: Float[Tensor, "*B I"], layer: nn.Linear, activation: str, p: float) -> Float[Tensor, "*B O"]:
    """dropout(activation(x W^T + b)), of the type of the products in use."""
    options = ACTIVATIONS.index(activation), p, new_seed() if p else 0
    return LinearProduct.apply(rounded(x), layer.weight, layer.bias, dtype_in_use(), *options)


class LinearProduct(torch.autograd.Function):
    """From x in bfloat16 or float32, with float32 weights and gradients of them."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype, activation, p, seed):  # type: ignore[no-untyped-def]
        x, weight = dense(x), dense(weight)
        output = torch.empty(*x.shape[:-1], weight.shape[0], dtype=dtype)
        slope = _empty(output) if activation > 0 else None
        ctx.options = (dtype, activation, p, seed)
        tensors = x, weight, bias, output, slope
        run("linear", _linear_call(ctx.options, False, *tensors), *tensors)
        save(ctx, x, weight, bias, output if activation == 0 else None, slope)
        return written(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, bias, output, slope = ctx.saved_tensors
        grad = dense(grad)
        grads = [_empty(x) if ctx.needs_input_grad[0] else None, _empty(weight), None if bias is None else _empty(bias)]
        tensors = x, weight, None, output, slope, grad, *grads
        run("linear_backward", _linear_call(ctx.options, grad.dtype == torch.bfloat16, *tensors), *tensors)
        return *map(gradient, (None, weight, bias), grads), None, None, None, None


def _linear_call(
    options: tuple[torch.dtype, int, float, int], grad_is_bf16: bool, x: Tensor, weight: Tensor, *others: Tensor | None
) -> _LinearCall:
    """`others`: bias, output and so on, as the structure has them."""
    dtype, activation, p, seed = options
    sizes = x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]
    rounded = dtype == torch.bfloat16, x.dtype == torch.bfloat16, grad_is_bf16
    return _LinearCall(*sizes, *rounded, x.data_ptr(), activation, p, seed, *_pointers(weight, *others))
