"""A sub-layer of a Transformer's block, with its residual connection and norm, as one operator of PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native.attention import empty_gradients, strides_of_bias
from transduce.native.deferred import dense, gradient, run, written
from transduce.native.kernels import dtype_in_use, new_seed
from transduce.native.operators import ACTIVATIONS, norm_arguments, rounded, with_rounded

Memory = tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S V"]] | tuple[None, None]
_Tensors = Sequence[Tensor | None]


class _Layer(ctypes.Structure):
    """`transduce_layer` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "grad_weight", "grad_bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs")),
    ]


class _SublayerCall(ctypes.Structure):
    """`transduce_sublayer_call`."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("positions", "width", "is_bf16", "read_is_bf16", "pre_norm", "rms")),
        *((name, ctypes.c_float) for name in ("epsilon", "p", "inner_p")),
        *((name, ctypes.c_uint64) for name in ("seed", "inner_seed")),
        *((name, ctypes.c_void_p) for name in ("gain", "shift", "grad_gain", "grad_shift")),
        *((name, _Layer) for name in ("first", "second")),
        *((name, ctypes.c_int32) for name in ("activation", "heads", "kv_heads", "keys")),
        *((name, ctypes.c_int32) for name in ("key_width", "value_width", "causal")),
        *((name, ctypes.c_void_p) for name in ("key", "value")),
        *((name, ctypes.c_int64 * 3) for name in ("key_strides", "value_strides")),
        ("bias", ctypes.c_void_p),
        ("bias_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_void_p) for name in ("x", "read", "output", "sum", "rounded", "normed", "statistics")),
        *((name, ctypes.c_void_p) for name in ("hidden", "slope", "inner", "grad_output", "grad_rounded", "grad_x")),
        *((name, ctypes.c_void_p) for name in ("grad_read", "grad_key", "grad_value")),
        *((name, ctypes.c_int64 * 3) for name in ("grad_key_strides", "grad_value_strides")),
    ]


@dataclass(frozen=True, slots=True)
class Inner:
    """What is between the two linear layers: an activation, or attention of `heads` heads. `p`: dropout in it."""

    p: float
    activation: str = ""
    heads: int = 0
    kv_heads: int = 0
    widths: tuple[int, int] = (0, 0)
    """Of a head's keys and values."""
    causal: bool = False
    bias: Float[Tensor, "#B #H #T S"] | None = None
    memory: Memory = (None, None)
    """Keys and values of other positions than the queries'."""


def sublayer(
    x: Float[Tensor, "B T D"],
    layers: tuple[nn.Linear, nn.Linear],
    inner: Inner,
    norm: nn.Module,
    *,
    pre_norm: bool,
    p: float,
) -> Float[Tensor, "B T D"]:
    """norm(x + dropout(f(x))), or with `pre_norm` x + dropout(f(norm(x))), where f are the layers and what is between.

    What is dropped follows from two numbers of PyTorch's generator and the place of each element.
    """
    first, second = layers
    gain, shift, epsilon, is_rms = norm_arguments(norm)
    batch, length, width = x.shape
    options = {"positions": length, "width": width, "pre_norm": pre_norm, "rms": is_rms, "epsilon": epsilon, "p": p}
    options["inner_seed"] = new_seed() if inner.p else 0
    options["seed"] = new_seed() if p else 0
    if inner.heads:
        options |= {"heads": inner.heads, "kv_heads": inner.kv_heads, "causal": inner.causal, "keys": length}
        options["key_width"], options["value_width"] = inner.widths
    else:
        options["activation"] = ACTIVATIONS.index(inner.activation)
    call = _SublayerCall(batch=batch, inner_p=inner.p, **options)
    tensors = first.weight, first.bias, second.weight, second.bias, gain, shift
    read = None if pre_norm else rounded(x)
    found = _Sublayer.apply(call, dtype_in_use(), inner.bias, x, read, *inner.memory, *tensors)
    return with_rounded(*found)


def _set(call: ctypes.Structure, **tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Give the call the addresses of tensors, and return these."""
    for name, tensor in tensors.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
    return tuple(tensors.values())


_KEPT = ("sum", "normed", "statistics", "hidden", "slope", "inner")  # for the backward pass


def _set_shared(call: _SublayerCall, given: _Tensors, weights: _Tensors, kept: _Tensors) -> None:
    """Set what both passes use. `given`: bias, x, what the first layer reads, keys and values."""
    bias, x, read, key, value = given
    _set(call, bias=bias, x=x, read=read, key=key, value=value, gain=weights[4], shift=weights[5])
    _set(call.first, weight=weights[0], bias=weights[1])
    _set(call.second, weight=weights[2], bias=weights[3])
    _set(call, **dict(zip(_KEPT, kept, strict=True)))


class _Sublayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, dtype, bias, x, read, key, value, *weights):  # type: ignore[no-untyped-def]
        """Return the result and, unless there is none, its rounded copy."""
        x, read = dense(x), None if read is None else dense(read)
        rows, is_bf16, post = x.shape[:-1], dtype == torch.bfloat16, not call.pre_norm
        call.is_bf16, call.read_is_bf16 = is_bf16, read is not None and read.dtype == torch.bfloat16
        for layer, weight in ((call.first, weights[0]), (call.second, weights[2])):
            layer.outputs, layer.inputs = weight.shape
        if key is not None:
            call.keys, call.key_strides, call.value_strides = key.shape[2], key.stride()[:3], value.stride()[:3]
        if bias is not None:
            call.bias_strides = strides_of_bias(bias)
        kept = (
            torch.empty(x.shape) if post else None,
            None if post else torch.empty(x.shape, dtype=dtype),
            torch.empty(*rows, 2),
            torch.empty(*rows, call.first.outputs, dtype=dtype),
            torch.empty(*rows, call.first.outputs, dtype=dtype) if not call.heads and call.activation else None,
            torch.empty(*rows, call.second.inputs, dtype=dtype) if call.heads else None,
        )
        output, copy = torch.empty(x.shape), torch.empty(x.shape, dtype=dtype) if post and is_bf16 else None
        given = bias, x, read, key, value
        _set_shared(call, given, weights, kept)
        run("sublayer", call, *given, *weights, *kept, *_set(call, output=output, rounded=copy))
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(*given, *weights, *kept)
        return written(output), None if copy is None else written(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_rounded):  # type: ignore[no-untyped-def]
        found = ctx.saved_tensors
        given, weights, kept = found[:5], found[5:11], found[11:]
        _, x, read, key, value = given
        if grad is grad_rounded is None:
            return (None,) * 13
        call = _SublayerCall.from_buffer_copy(ctx.call)  # there may be another backward pass
        _set_shared(call, given, weights, kept)
        grad, grad_rounded = (None if one is None else dense(one) for one in (grad, grad_rounded))
        of_outputs = _set(call, grad_output=grad, grad_rounded=grad_rounded)
        w1, b1, w2, b2, gain, shift = of_weights = [None if one is None else torch.empty(one.shape) for one in weights]
        _set(call.first, grad_weight=w1, grad_bias=b1)
        _set(call.second, grad_weight=w2, grad_bias=b2)
        _set(call, grad_gain=gain, grad_shift=shift)
        grad_key = grad_value = None
        if key is not None:
            grad_key, grad_value = empty_gradients(key, value)
            call.grad_key_strides, call.grad_value_strides = grad_key.stride()[:3], grad_value.stride()[:3]
        grad_read = None if read is None else torch.empty(read.shape, dtype=read.dtype)
        grads = _set(call, grad_x=torch.empty(x.shape), grad_read=grad_read, grad_key=grad_key, grad_value=grad_value)
        run("sublayer_backward", call, *given, *weights, *kept, *of_outputs, *grads, *of_weights)
        return None, None, None, *(gradient(None, one) for one in grads), *map(gradient, weights, of_weights)
