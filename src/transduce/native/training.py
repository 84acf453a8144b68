"""Kernels of training in the C++ library, for products in bfloat16 on CPUs that have AVX-512's."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.native.library import check, load_library

Kernels = Literal["auto", "torch"]

_chosen: Kernels = "auto"


class _LossCall(ctypes.Structure):
    """`transduce_loss_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "gold")),
        *((name, ctypes.c_int64) for name in ("rows", "pad")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary")),
        ("smoothing", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("grad_hidden", "grad_weight", "grad_bias")),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library()
    return None if isinstance(library, str) or not library.transduce_can_train() else library


def choose_kernels(kernels: Kernels) -> None:
    """Use the native kernels where there are any (auto), or PyTorch's only, from now on in this process."""
    global _chosen
    _chosen = kernels


def kernels_in_use() -> str:
    """What computes bfloat16 products of training on a CPU: avx512_bf16 or torch."""
    return "torch" if _chosen == "torch" or _library() is None else "avx512_bf16"


class LinearCrossEntropy(torch.autograd.Function):
    """The sums of `label_smoothed_loss` without padded rows, with their gradient made in the forward pass.

    Logits exist in tiles only. The products round to bfloat16 and add in float32; everything else is in float32. The
    result does not depend on the number of threads.
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
        library = _library()
        assert library is not None
        given = [None if x is None else x.contiguous() for x in (hidden, weight, bias, gold)]
        grads = [torch.empty_like(x) if wanted and x is not None else None for x in given[:3]]
        loss, nll = ctypes.c_double(), ctypes.c_double()
        inputs, outputs = ([None if x is None else x.data_ptr() for x in part] for part in (given, grads))
        call = _LossCall(*inputs, len(hidden), pad, hidden.shape[1], len(weight), smoothing, *outputs)
        n_threads = torch.get_num_threads()
        check(library, library.transduce_loss(ctypes.byref(call), n_threads, ctypes.byref(loss), ctypes.byref(nll)))
        ctx.save_for_backward(*grads)
        sums = torch.tensor(loss.value), torch.tensor(nll.value)
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        return *(None if grad is None else grad * grad_loss for grad in ctx.saved_tensors), None, None, None, None
