"""Our kernels as operators of PyTorch, with their gradients: on CPUs the C++ library's, on GPUs those of triton_*.py.

Products are of float32 or of bfloat16 numbers, and add in float32. Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native.kernels import dtype_in_use, n_threads, new_seed
from transduce.native.library import address, loaded_library


class _LossCall(ctypes.Structure):
    """`transduce_loss_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "gold")),
        *((name, ctypes.c_int64) for name in ("rows", "pad")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary", "is_bf16")),
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
        dtype: torch.dtype,
        wanted: bool,
    ):
        given = [None if x is None else x.contiguous() for x in (hidden, weight, bias, gold)]
        grads = [torch.empty_like(x) if wanted and x is not None else None for x in given[:3]]
        loss, nll = ctypes.c_double(), ctypes.c_double()
        sizes = len(hidden), pad, hidden.shape[1], len(weight)
        call = _LossCall(*_pointers(*given), *sizes, dtype == torch.bfloat16, smoothing, *_pointers(*grads))
        loaded_library().transduce_loss(ctypes.byref(call), n_threads(), ctypes.byref(loss), ctypes.byref(nll))
        ctx.save_for_backward(*grads)
        sums = torch.tensor(loss.value), torch.tensor(nll.value)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), *[None] * 5


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
    return _with_rounded(*_Residual.apply(x, update, *norm_arguments(norm), (p, seed), _copied_as())[:2])


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
    return kept, _with_rounded(output, copy)


def _copied_as() -> torch.dtype | None:
    """The type of the copy of a norm that the next linear layers read; None: they read the norm."""
    dtype = dtype_in_use() if torch.is_grad_enabled() else None
    return None if dtype == torch.float32 else dtype


def _with_rounded(x: Tensor, copy: Tensor | None) -> Tensor:
    """x, which keeps a rounded copy for linear layers.

    The gradients of both are added where the norm's is computed, and not by PyTorch's engine in a pass of its own.
    """
    if copy is not None:
        vars(x)["_rounded"] = copy, x._version
    return x


def rounded(x: Tensor) -> Tensor:
    """The copy of x in the type of the products in use, if it has one and has not been changed since; otherwise x."""
    copy, version = vars(x).get("_rounded", (x, 0))
    return copy if copy.dtype == dtype_in_use() and version == x._version else x


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
        x, update = (None if one is None else one.contiguous() for one in (x, update))
        like = update if x is None else x
        rows, total = like.numel() // like.shape[-1], x if update is None else torch.empty_like(like)
        output = statistics = copy = None
        if gain is not None:
            output, statistics = torch.empty_like(like), like.new_empty(rows, 2)
            copy = None if dtype is None else torch.empty_like(like, dtype=dtype)
        is_bf16 = (dtype if update is None else update.dtype) == torch.bfloat16
        ctx.updates, ctx.options = update is not None, (rows, like.shape[-1], is_rms, is_bf16, epsilon, *dropout)
        ctx.set_materialize_grads(False)
        written = None if update is None else total, output, statistics, copy
        call = _ResidualCall(*ctx.options, *_pointers(x, update, gain, shift, *written))
        loaded_library().transduce_residual(ctypes.byref(call), n_threads())
        ctx.save_for_backward(total if gain is not None else None, gain, shift, statistics)
        return (total if output is None else output), copy, x if update is None else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_rounded, grad_kept):  # type: ignore[no-untyped-def]
        normed, gain, shift, statistics = ctx.saved_tensors
        if grad is grad_rounded is None:  # the norm is not used
            return grad_kept, *[None] * 7
        given = (None if one is None else one.contiguous() for one in (grad, grad_rounded, grad_kept))
        grad, grad_rounded, grad_kept = given
        dtype = torch.bfloat16 if ctx.options[3] else torch.float32
        grad_update = torch.empty_like(grad_rounded if grad is None else grad, dtype=dtype) if ctx.updates else None
        grads = [None if like is None else torch.empty_like(like) for like in (normed, gain, shift)]
        read = None, None, gain, shift, None, None, statistics, None, grad, normed, grad_rounded, grad_kept
        call = _ResidualCall(*ctx.options, *_pointers(*read, grads[0], grad_update, *grads[1:]))
        loaded_library().transduce_residual_backward(ctypes.byref(call), n_threads())
        of_x = (grad if ctx.needs_input_grad[0] else None) if normed is None else grads[0]
        return of_x, grad_update, grads[1], grads[2], None, None, None, None


class _EmbeddingCall(ctypes.Structure):
    """`transduce_embedding_call`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "length")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary")),
        *((name, ctypes.c_void_p) for name in ("ids", "table", "positions")),
        *((name, ctypes.c_float) for name in ("scale", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("output", "grad_output", "grad_table", "grad_positions")),
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
        output = table.new_empty(*ids.shape, table.shape[1])
        ctx.save_for_backward(ids, table, positions)
        ctx.options = scale, p, seed
        call = _embedding_call(ctx.options, ids, table, positions, output)
        loaded_library().transduce_embedding(ctypes.byref(call), n_threads())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        read, grad = ctx.saved_tensors, grad.contiguous()
        wanted = zip(read[1:], ctx.needs_input_grad[1:], strict=False)
        grads = [torch.empty_like(x) if is_wanted else None for x, is_wanted in wanted]
        call = _embedding_call(ctx.options, *read, None, grad, *grads)
        loaded_library().transduce_embedding_backward(ctypes.byref(call), n_threads())
        return None, *grads, None, None, None


def _embedding_call(
    options: tuple[float, float, int], ids: Tensor, table: Tensor, *others: Tensor | None
) -> _EmbeddingCall:
    """`others`: positions, output and so on, as the structure has them."""
    sizes = ids.numel(), ids.shape[1], table.shape[1], len(table)
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
    ]


_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # by their numbers in transduce_linear_call


def linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Float[Tensor, " O"] | None) -> Tensor:
    """x W^T + b, of the type of the products in use."""
    return LinearProduct.apply(rounded(x), weight, bias, dtype_in_use(), -1, 0.0, 0)


def activated_linear(x: Float[Tensor, "*B I"], layer: nn.Linear, activation: str, p: float) -> Float[Tensor, "*B O"]:
    """dropout(activation(x W^T + b)), of the type of the products in use."""
    options = _ACTIVATIONS.index(activation), p, new_seed() if p else 0
    return LinearProduct.apply(rounded(x), layer.weight, layer.bias, dtype_in_use(), *options)


class LinearProduct(torch.autograd.Function):
    """From x in bfloat16 or float32, with float32 weights and gradients of them."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype, activation, p, seed):  # type: ignore[no-untyped-def]
        x, weight = x.contiguous(), weight.contiguous()
        output = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
        slope = torch.empty_like(output) if activation > 0 else None
        ctx.options = (dtype, activation, p, seed)
        call = _linear_call(ctx.options, False, x, weight, bias, output, slope)
        loaded_library().transduce_linear(ctypes.byref(call), n_threads())
        ctx.save_for_backward(x, weight, bias, output if activation == 0 else None, slope)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, bias, output, slope = ctx.saved_tensors
        grad = grad.contiguous()
        grads = [torch.empty_like(x) if ctx.needs_input_grad[0] else None, torch.empty_like(weight)]
        grads.append(None if bias is None else torch.empty_like(bias))
        call = _linear_call(ctx.options, grad.dtype == torch.bfloat16, x, weight, None, output, slope, grad, *grads)
        loaded_library().transduce_linear_backward(ctypes.byref(call), n_threads())
        return *grads, None, None, None, None


def _linear_call(
    options: tuple[torch.dtype, int, float, int], grad_is_bf16: bool, x: Tensor, weight: Tensor, *others: Tensor | None
) -> _LinearCall:
    """`others`: bias, output and so on, as the structure has them."""
    dtype, activation, p, seed = options
    sizes = x.numel() // x.shape[-1], x.shape[-1], len(weight)
    rounded = dtype == torch.bfloat16, x.dtype == torch.bfloat16, grad_is_bf16
    return _LinearCall(*sizes, *rounded, x.data_ptr(), activation, p, seed, *_pointers(weight, *others))


def orthogonalize(matrices: Float[Tensor, "N R C"], coefficients: Sequence[float], steps: int) -> Tensor:
    """Newton-Schulz steps on float32 matrices, R <= C: X / |X| becomes a X + (b G + c G G) X with G = X X^T."""
    x = matrices.float().contiguous()
    x = x.clone() if x.data_ptr() == matrices.data_ptr() else x
    factors = array("f", coefficients)
    loaded_library().transduce_orthogonalize(x.data_ptr(), *x.shape, address(factors), steps, n_threads())
    return x
