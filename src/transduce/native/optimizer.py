"""Adam, Muon and the norm of gradients by the C++ library, in all threads."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from transduce.native.kernels import kernels_in_use, n_threads
from transduce.native.library import address, loaded_library


def reaches(tensors: Sequence[Tensor]) -> bool:
    """Whether the library can read and change these tensors where they are."""
    return kernels_in_use(torch.float32) != "torch" and all(
        type(x) in (Tensor, torch.nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.is_contiguous()
        for x in tensors
    )


def will_change(tensors: Sequence[Tensor]) -> None:
    """Count a change in the version of each tensor, as PyTorch's own changes in place do."""
    torch.autograd.graph.increment_version(tensors)


def adam(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float,
) -> None:
    """Update in place; each tuple: weights, gradient, its two moments, and the number of updates.

    `scale`: factor of the gradients.
    """
    numbers = _addresses(tensors)
    loaded_library().transduce_adam(address(numbers), len(tensors), lr, *betas, eps, weight_decay, scale, n_threads())


class Matrix(ctypes.Structure):
    """`transduce_muon_matrix`: the addresses of weights, gradient and its running mean, and what their update takes."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "grad", "mean")),
        *((name, ctypes.c_int32) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("rate", "weight_kept", "momentum")),
    ]


def muon(matrices: Sequence[Matrix], *, scale: float, coefficients: Sequence[float], steps: int) -> None:
    """Update in place: Nesterov's momentum, `steps` Newton-Schulz steps, `rate` and `weight_kept` of each matrix.

    X / |X| becomes a X + (b G + c G G) X with G = X X^T. `scale`: factor of the gradients.
    """
    all_matrices = (Matrix * len(matrices))(*matrices)
    factors = array("f", coefficients)
    loaded_library().transduce_muon(
        ctypes.byref(all_matrices), len(matrices), scale, address(factors), steps, n_threads()
    )


def _addresses(tensors: Sequence[tuple[Tensor, ...]]) -> array[int]:
    """The addresses of the numbers of each tuple, and their count. The first tensor will be changed."""
    will_change([group[0] for group in tensors])
    found = array("q")
    for group in tensors:
        found.extend(x.data_ptr() for x in group)
        found.append(group[0].numel())
    return found


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all numbers."""
    pointers, sizes = array("q", (x.data_ptr() for x in tensors)), array("q", (x.numel() for x in tensors))
    found = ctypes.c_double()
    loaded_library().transduce_norm(address(pointers), address(sizes), len(tensors), n_threads(), ctypes.byref(found))
    return torch.tensor(found.value, dtype=torch.float32)
