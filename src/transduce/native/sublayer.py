"""A sub-layer of a Transformer's block, with its residual connection and norm, as one operator of PyTorch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.native.attention import empty_gradients, strides_of_bias
from transduce.native.deferred import dense, gradient, run, save, written
from transduce.native.kernels import dtype_in_use, new_seed
from transduce.native.operators import ACTIVATIONS, floats, norm_arguments, rounded, with_rounded

Layers = tuple[Any, Any]  # linear ones


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
    """The part between the two linear layers: an activation, or attention of `heads` heads. `p`: dropout in it."""

    p: float
    activation: str = ""
    heads: int = 0
    kv_heads: int = 0
    widths: tuple[int, int] = (0, 0)
    """Of a head's keys and values."""
    causal: bool = False
    bias: Float[Tensor, "#B #H #T S"] | None = None
    memory: tuple[Float[Tensor, "B G S _"], ...] = ()
    """Keys and values of other positions than the queries', or nothing."""


def sublayer(
    x: Float[Tensor, "B T D"],
    layers: Layers,
    inner: Inner,
    norm: nn.Module,
    *,
    pre_norm: bool,
    p: float,
) -> Float[Tensor, "B T D"]:
    """norm(x + dropout(f(x))), or with `pre_norm` x + dropout(f(norm(x))); f is both layers with `inner` between them.

    What is dropped follows from two numbers of PyTorch's generator and the place of each element.
    """
    gain, shift, epsilon, is_rms = norm_arguments(norm)
    first, second = layers
    batch, length, width = x.shape
    call = _SublayerCall(
        batch=batch,
        positions=length,
        width=width,
        pre_norm=pre_norm,
        rms=is_rms,
        epsilon=epsilon,
        p=p,
        inner_p=inner.p,
        inner_seed=new_seed() if inner.p else 0,
        seed=new_seed() if p else 0,
        activation=ACTIVATIONS.index(inner.activation) if inner.activation else -1,
        heads=inner.heads,
        kv_heads=inner.kv_heads,
        keys=length,
        key_width=inner.widths[0],
        value_width=inner.widths[1],
        causal=inner.causal,
    )
    read = rounded(x)
    given = inner.bias, x, None if pre_norm or read is x else read, *(inner.memory or (None, None))
    tensors = first.weight, first.bias, second.weight, second.bias, gain, shift
    found = _Sublayer.apply(call, dtype_in_use(), *given, *tensors)
    return with_rounded(*found)


def _set(call: ctypes.Structure, **tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Give the call the addresses of tensors, and return these."""
    for name, tensor in tensors.items():
        setattr(call, name, None if tensor is None else tensor.data_ptr())
    return tuple(tensors.values())


class _Given(NamedTuple):
    """`read`: x as the first layer reads it, if that is not x."""

    bias: Tensor | None
    x: Tensor
    read: Tensor | None
    key: Tensor | None
    value: Tensor | None


class _Weights(NamedTuple):
    first: Tensor
    first_bias: Tensor | None
    second: Tensor
    second_bias: Tensor | None
    gain: Tensor
    shift: Tensor | None


class _Kept(NamedTuple):
    """For the backward pass."""

    sum: Tensor | None
    normed: Tensor | None
    statistics: Tensor
    hidden: Tensor
    slope: Tensor | None
    inner: Tensor | None


def _set_shared(call: _SublayerCall, given: _Given, weights: _Weights, kept: _Kept) -> None:
    """Set what both passes use. What hooks unpack in the backward pass may have other strides."""
    if given.key is not None and given.value is not None:
        call.keys = given.key.shape[2]
        call.key_strides, call.value_strides = given.key.stride()[:3], given.value.stride()[:3]
    if given.bias is not None:
        call.bias_strides = strides_of_bias(given.bias)
    _set(call, **given._asdict(), **kept._asdict(), gain=weights.gain, shift=weights.shift)
    _set(call.first, weight=weights.first, bias=weights.first_bias)
    _set(call.second, weight=weights.second, bias=weights.second_bias)


class _Sublayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, dtype, bias, x, read, key, value, *weights):  # type: ignore[no-untyped-def]
        """Return the result and, unless there is none, its rounded copy."""
        weights = _Weights(*weights)
        x, read = dense(x), None if read is None else dense(read)
        rows, is_bf16, post = x.shape[:-1], dtype == torch.bfloat16, not call.pre_norm
        call.is_bf16, call.read_is_bf16 = is_bf16, read is not None and read.dtype == torch.bfloat16
        for layer, weight in ((call.first, weights.first), (call.second, weights.second)):
            layer.outputs, layer.inputs = weight.shape
        kept = _Kept(
            sum=floats(x.shape) if post else None,
            normed=None if post else torch.empty(x.shape, dtype=dtype),
            statistics=floats(*rows, 2),
            hidden=torch.empty(*rows, call.first.outputs, dtype=dtype),
            slope=torch.empty(*rows, call.first.outputs, dtype=dtype) if call.activation > 0 else None,
            inner=torch.empty(*rows, call.second.inputs, dtype=dtype) if call.heads else None,
        )
        output, copy = floats(x.shape), torch.empty(x.shape, dtype=dtype) if post and is_bf16 else None
        given = _Given(bias, x, read, key, value)
        _set_shared(call, given, weights, kept)
        run("sublayer", call, *given, *weights, *kept, *_set(call, output=output, rounded=copy))
        ctx.set_materialize_grads(False)
        ctx.call = call
        save(ctx, *given, *weights, *kept)
        return written(output), None if copy is None else written(copy)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_rounded):  # type: ignore[no-untyped-def]
        found = ctx.saved_tensors
        if grad is grad_rounded is None:
            return None, None, *[None] * len(_Given._fields + _Weights._fields)
        given, weights, kept = _Given(*found[:5]), _Weights(*found[5:11]), _Kept(*found[11:])
        _, x, read, key, value = given
        call = _SublayerCall.from_buffer_copy(ctx.call)  # there may be another backward pass
        _set_shared(call, given, weights, kept)
        grad, grad_rounded = (None if one is None else dense(one) for one in (grad, grad_rounded))
        of_outputs = _set(call, grad_output=grad, grad_rounded=grad_rounded)
        w1, b1, w2, b2, gain, shift = of_weights = [None if one is None else floats(one.shape) for one in weights]
        _set(call.first, grad_weight=w1, grad_bias=b1)
        _set(call.second, grad_weight=w2, grad_bias=b2)
        _set(call, grad_gain=gain, grad_shift=shift)
        grad_key = grad_value = None
        if key is not None and value is not None:
            grad_key, grad_value = empty_gradients(key, value)
            call.grad_key_strides, call.grad_value_strides = grad_key.stride()[:3], grad_value.stride()[:3]
        grad_read = None if read is None else torch.empty(read.shape, dtype=read.dtype)
        grads = _set(call, grad_x=floats(x.shape), grad_read=grad_read, grad_key=grad_key, grad_value=grad_value)
        run("sublayer_backward", call, *given, *weights, *kept, *of_outputs, *grads, *of_weights)
        return None, None, None, *(gradient(None, one) for one in grads), *map(gradient, weights, of_weights)
