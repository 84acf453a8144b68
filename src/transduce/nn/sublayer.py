"""Sub-layers of a Transformer's blocks with their residual connections, by one call of our kernels if possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from transduce.native import kernels
from transduce.native.sublayer import Inner, Memory, sublayer
from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.bias import Bias, CausalBias
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import FeedForward
from transduce.nn.linear import Linear
from transduce.nn.positions import Rotate, unchanged
from transduce.nn.projections import FullProjection
from transduce.nn.residual import KNOWN_NORMS, PostNorm, PreNorm

_KNOWN = (  # exactly these: a subclass may compute something else
    PostNorm, PreNorm, *KNOWN_NORMS, SelfAttention, CrossAttention, FullProjection, FeedForward, Linear, Dropout,
)  # fmt: skip
_HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def connected(
    x: Float[Tensor, "B T D"],
    residual: PostNorm,
    module: nn.Module,
    compute: Callable[[Tensor], Tensor],
    *,
    bias: Bias = None,
    rotate: Rotate = unchanged,
    memory: Memory = (None, None),
) -> Float[Tensor, "B T D"]:
    """residual(x, compute), by one call of our kernels in training on a CPU.

    `compute` calls the module; `bias`, `rotate` and `memory` (keys and values of cross-attention) are what it gives it.
    """
    inner = None
    if (
        x.device.type == "cpu"
        and rotate is unchanged
        and kernels.computes(residual.norm, x)
        and _is_plain(module)
        and _is_plain(residual)
        and not any(_HOOKS_OF_ALL)
    ):
        inner = _inner(x, module, bias, memory)
    if inner is None:
        return residual(x, compute)
    return sublayer(x, _layers(module), inner, residual.norm, pre_norm=residual.final_norm, p=residual.dropout.rate)


def _is_plain(module: nn.Module) -> bool:
    """Whether modules compute as their classes do, nothing watches them, and kernels read their weights."""
    return (
        type(module) in _KNOWN
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and "attend" not in module.__dict__  # of a recorder
        and "forward" not in module.__dict__
        and all(_is_read(p) for p in module._parameters.values() if p is not None)
        and all(_is_plain(one) for one in module._modules.values() if one is not None)
    )


def _is_read(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _layers(module: Any) -> tuple[nn.Linear, nn.Linear]:
    names = {FeedForward: ("expand", "contract"), SelfAttention: ("query_key_value", "output")}
    first, second = names.get(type(module), ("query", "output"))
    return getattr(module, first), getattr(module, second)


def _inner(x: Tensor, module: Any, bias: Bias, memory: Memory) -> Inner | None:
    """What is between the layers; None if kernels do not compute that."""
    p = module.dropout.rate
    if isinstance(module, FeedForward):
        return Inner(p=p, activation=module.activation)
    causal, matrix = isinstance(bias, CausalBias), bias if isinstance(bias, Tensor) else None
    n_keys = x.shape[1] if memory[0] is None else memory[0].shape[2]
    if not (bias is matrix or causal) or not kernels.attends_to(n_keys, memory, matrix):
        return None
    heads = {"heads": module.n_heads, "kv_heads": module.n_kv_heads, "widths": (module.d_key, module.d_head)}
    return Inner(p=p, causal=causal, bias=matrix, memory=memory, **heads)
