"""Adam, Muon and gradient norms, computed by the C++ library in all threads, and PyTorch operations on many tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from transduce.kernels.calls import n_threads, precisions
from transduce.kernels.library import address, loaded_library


def reaches(tensors: Sequence[Tensor]) -> bool:
    """Whether the library can read and update these tensors in place: dense float32 tensors in CPU memory."""
    return torch.float32 in precisions() and all(
        type(x) in (Tensor, torch.nn.Parameter) and x.dtype is torch.float32 and x.is_cpu and x.is_contiguous()
        for x in tensors
    )


def will_change(tensors: Sequence[Tensor]) -> None:
    """Increment the version counters of tensors, as PyTorch's in-place operations do."""
    torch.autograd.graph.increment_version(tensors)


def adam(
    tensors: Sequence[tuple[Tensor, ...]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float,
) -> None:
    """Update weights in place with Adam. Each tuple has weights, gradient, both moments, and the number of updates.

    `scale`: factor of the gradients.
    """
    will_change([weight for weight, *_ in tensors])
    entries = array("q", [n for group in tensors for n in (*[x.data_ptr() for x in group], group[0].numel())])
    loaded_library().transduce_adam(address(entries), len(tensors), lr, *betas, eps, weight_decay, scale, n_threads())


class Matrix(ctypes.Structure):
    """A matrix for `muon`: addresses of its weights, gradient and mean gradient, and parameters of its update."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "grad", "mean")),
        *((name, ctypes.c_int32) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("rate", "weight_kept", "momentum")),
    ]


def muon(matrices: Sequence[Matrix], *, scale: float, coefficients: Sequence[float], steps: int) -> None:
    """Update matrices in place with Muon: Nesterov momentum and `steps` Newton-Schulz steps.

    A step replaces the normalized X by a X + (b G + c G G) X with G = X X^T and `coefficients` a, b, c.
    `scale`: factor of the gradients.
    """
    all_matrices = (Matrix * len(matrices))(*matrices)
    factors = array("f", coefficients)
    loaded_library().transduce_muon(
        ctypes.byref(all_matrices), len(matrices), scale, address(factors), steps, n_threads()
    )


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all elements of all tensors together."""
    pointers, sizes = array("q", (x.data_ptr() for x in tensors)), array("q", (x.numel() for x in tensors))
    result = ctypes.c_double()
    loaded_library().transduce_norm(address(pointers), address(sizes), len(tensors), n_threads(), ctypes.byref(result))
    return torch.tensor(result.value, dtype=torch.float32)


def multiply(tensors: list[Tensor], factor: float) -> None:
    """Multiply all tensors by `factor` in place. On a GPU, this private function of PyTorch is one kernel for all."""
    torch._foreach_mul_(tensors, factor)


def interpolate(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move tensors towards `ends` in place, as `torch.lerp`: weight 0 leaves them unchanged, 1 makes them `ends`."""
    torch._foreach_lerp_(tensors, ends, weight)
