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
    """Return the dtypes in which the library can compute matrix products in training on this CPU; may be empty."""
    library = load_library()
    return (torch.float32, torch.bfloat16)[: 0 if isinstance(library, str) else library.transduce_can_train()]


def instructions(precision: torch.dtype) -> str:
    """Return the CPU instructions of the library's products, such as "avx2", or "torch" if it cannot compute them."""
    if precision not in precisions():
        return "torch"
    name = instruction_set()
    if precision == torch.float32:
        return "avx2" if name in ("avx2", "avx_vnni") else "avx512"
    return "amx" if name == "amx" else "avx512_bf16"


def products_dtype() -> torch.dtype | None:
    """Return the dtype of the library's products: autocast's, else float32 with gradients; None if PyTorch computes."""
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
    """Context manager that gives all of PyTorch's threads to the library, and leaves one thread to PyTorch.

    Otherwise, the idle threads of two thread pools, which spin, would compete for the cores.
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
    """Return the memory addresses of tensors, with 0 for None."""
    return array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with 0 for each axis of size 1, along which it is broadcast."""
    return tuple(0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True))


# --- gradients that are written past PyTorch's engine -----------------------------------------------------------------


_writes = ContextVar("writes", default=False)


@contextmanager
def writing_gradients(parameters: Iterable[Any] = ()) -> Iterator[None]:
    """Context manager in which the library's backward passes add weight gradients to `grad` directly.

    This avoids the copies of PyTorch's autograd engine. Each forward pass may have only one backward pass. The context
    has no effect if one of the `parameters` has a hook, because only the engine calls hooks.
    """
    token = _writes.set(not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters))
    try:
        yield
    finally:
        _writes.reset(token)


def writes_gradients() -> bool:
    """Whether backward passes add weight gradients to `grad` directly: inside `writing_gradients`."""
    return _writes.get()


def gradient_place(parameter: Tensor, memory: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor into which the library writes a parameter's gradient, and whether to add to its values.

    The tensor is the parameter's `grad`, which is set to `memory` if it is None. For a frozen parameter it is `memory`.
    """
    if not parameter.requires_grad:
        return memory, False
    if parameter.grad is not None:
        return parameter.grad, True
    parameter.grad = memory
    return memory, False
