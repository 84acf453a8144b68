"""Sub-layers of a Transformer's blocks with their residual connections, by one call of our kernels if possible."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from transduce.native import kernels
from transduce.native.sublayer import sublayer
from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import FeedForward
from transduce.nn.linear import Linear
from transduce.nn.projections import FullProjection
from transduce.nn.residual import KNOWN_NORMS, PostNorm, PreNorm

_KNOWN = (  # have `as_sublayer`, or are parts of these; no subclass, which may compute something else
    PostNorm, PreNorm, *KNOWN_NORMS, SelfAttention, CrossAttention, FullProjection, FeedForward, Linear, Dropout,
)  # fmt: skip
_MOST_POSITIONS = 1 << 16  # of a call
_HOOKS_OF_ALL = (
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
)


def connected(x: Float[Tensor, "B T D"], residual: PostNorm, module: Any, **arguments: Any) -> Float[Tensor, "B T D"]:
    """residual(x, partial(module, **arguments)), by one call in training on a CPU if our kernels compute all parts."""
    one = None
    if (
        x.device.type == "cpu"
        and x.shape[1] <= _MOST_POSITIONS
        and kernels.computes(residual.norm, x)
        and _is_plain(module)
        and _is_plain(residual)
        and not any(_HOOKS_OF_ALL)
    ):
        one = module.as_sublayer(x, **arguments)
    if one is None:
        return residual(x, partial(module, **arguments))
    layers, inner = one
    return sublayer(x, layers, inner, residual.norm, pre_norm=residual.final_norm, p=residual.dropout.rate)


def _is_plain(module: nn.Module) -> bool:
    """Whether modules compute as their classes do, nothing watches them, and kernels read their weights."""
    return (
        type(module) in _KNOWN
        and not kernels.has_hooks(module)
        and "attend" not in module.__dict__  # of a recorder
        and "forward" not in module.__dict__
        and all(_is_read(p) for p in module._parameters.values() if p is not None)
        and all(_is_plain(one) for one in module._modules.values() if one is not None)
    )


def _is_read(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.dtype == torch.float32 and parameter.is_contiguous()
