"""Number types, threads, seeds and gradients for calls of the C++ library in training."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from transduce.kernels.library import instruction_set, load_library

_threads = 0


@cache
def precisions() -> tuple[torch.dtype, ...]:
    """The dtypes of the library's matrix products in training on this CPU."""
    library = load_library()
    return (torch.float32, torch.bfloat16)[: 0 if isinstance(library, str) else library.transduce_can_train()]


def instructions(precision: torch.dtype) -> str:
    """The CPU instructions of the library's products: amx, avx512_bf16, avx512, avx2, or torch if it has none."""
    if precision not in precisions():
        return "torch"
    name = instruction_set()
    if precision == torch.float32:
        return "avx2" if name in ("avx2", "avx_vnni") else "avx512"
    return "amx" if name == "amx" else "avx512_bf16"


def products_dtype() -> torch.dtype | None:
    """The dtype of the library's products now: autocast's, or float32 with gradients; None if PyTorch computes."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    elif torch.is_grad_enabled():
        dtype = torch.float32
    else:
        return None
    return dtype if dtype in precisions() and not torch.compiler.is_compiling() else None


def n_threads() -> int:
    return _threads or torch.get_num_threads()


@contextmanager
def all_threads_for_library() -> Iterator[None]:
    """Context in which PyTorch uses one thread, and the library uses all of PyTorch's threads.

    Idle threads of two pools, which spin, would compete for the cores.
    """
    global _threads
    n, before = torch.get_num_threads(), _threads
    torch.set_num_threads(1)
    _threads = n
    try:
        yield
    finally:
        _threads = before
        torch.set_num_threads(n)


def new_seed() -> int:
    """Draw a seed for dropout from PyTorch's generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


def pointers(*tensors: Tensor | None) -> array[int]:
    """The addresses of tensors; 0 for None."""
    return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of a tensor; 0 for an axis along which it is broadcast."""
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


# --- gradients that are written past PyTorch's engine -----------------------------------------------------------------


_writes = ContextVar("writes", default=False)


@contextmanager
def writing_gradients(parameters: Iterable[Any] = ()) -> Iterator[None]:
    """Context in which backward passes add gradients of weights to `grad` themselves; PyTorch's engine would copy them.

    Each forward pass may have one backward pass. The context has no effect if one of the `parameters` has a hook,
    because only the engine calls hooks.
    """
    token = _writes.set(not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters))
    try:
        yield
    finally:
        _writes.reset(token)


def writes_gradients() -> bool:
    """Whether backward passes add gradients of weights to `grad` themselves."""
    return _writes.get()


def gradient_place(parameter: Tensor, memory: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor to which a backward pass writes a gradient itself, and whether to add to its values.

    The tensor is the parameter's `grad`, which is set to `memory` if it is None.
    """
    if not parameter.requires_grad:
        return memory, False
    if parameter.grad is not None:
        return parameter.grad, True
    parameter.grad = memory
    return memory, False
