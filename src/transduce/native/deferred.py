"""Calls of the C++ library that are made while Python goes on.

After each call, the numbers of a training step have pushed Python and PyTorch out of the CPU's caches: the next ten
lines of Python take four times as long as they would otherwise. So inside `deferred` calls are collected, and one of
the library's threads makes them, one after another, while Python prepares the next ones; when Python is far enough
ahead, it helps. Their results are tensors whose numbers are perhaps not there yet (`Pending`): whoever uses them in
another way than by a call waits for the numbers first.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from transduce.native.kernels import n_threads
from transduce.native.library import address, loaded_library

_AT_ONCE = 2  # calls that are given to the library together
_MOST = 4  # calls that are left to make when Python goes on: they keep the memory of what they read


class _Queue(threading.local):
    """The calls of a thread that wait, and what is to be done with gradients."""

    is_open = False
    gradients: dict[int, tuple[nn.Parameter, Tensor]] | None = None
    """Those of parameters, by `id`, if they are taken."""

    def __init__(self) -> None:
        self.steps = array("q")  # of calls that the library has not got: the address of the function, and of its call
        self.kept: list[object] = []  # calls that are perhaps not made, and the tensors that they read and write


_queue = _Queue()
_in_use = threading.Lock()  # calls of two threads would not know which of them are made


@contextmanager
def deferred() -> Iterator[None]:
    """Inside, calls are perhaps made later, and all before the end; not if another thread is inside.

    Until then, what they read must not be changed in place.
    """
    if _queue.is_open or not _in_use.acquire(blocking=False):
        yield
        flush()
        return
    _queue.is_open = True
    try:
        yield
        flush()
    finally:
        with suppress(Exception):
            flush()  # after an error: calls that are not made need what is kept
        _queue.is_open = False
        _in_use.release()


@contextmanager
def taking_gradients() -> Iterator[None]:
    """Inside, one backward pass; gradients of parameters bypass PyTorch's engine and are added to `grad` at the end."""
    before, found = _queue.gradients, dict[int, tuple[nn.Parameter, Tensor]]()
    _queue.gradients = found
    try:
        yield
        flush()
        for parameter, grad in found.values():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)
    finally:
        _queue.gradients = before


def takes_gradients() -> bool:
    """Whether gradients of parameters are taken now."""
    return _queue.gradients is not None


def run(name: str, call: ctypes.Structure, *tensors: Tensor | None) -> None:
    """Call a function of the library, now or later, with a structure that has the addresses of `tensors`."""
    if not _queue.is_open:
        getattr(loaded_library(), f"transduce_{name}")(ctypes.byref(call), n_threads())
        return
    _queue.steps.extend((_place(name), ctypes.addressof(call)))
    _queue.kept.append((call, tensors))
    if len(_queue.steps) == 2 * _AT_ONCE:
        _give(_MOST)


@cache
def _place(name: str) -> int:
    """The address of a function of the library."""
    place = ctypes.cast(getattr(loaded_library(), f"transduce_{name}"), ctypes.c_void_p).value
    assert place
    return place


def written(x: Tensor) -> Tensor:
    """A tensor that a call has written, or will write, for others than calls."""
    return Tensor._make_subclass(Pending, x) if _queue.kept else x


def dense(x: Tensor) -> Tensor:
    """`x.contiguous()`, with the numbers that calls will write."""
    if x.is_contiguous():
        return x
    flush()
    return x.contiguous()


def gradient(of: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The gradient that a call has written, or will write, for PyTorch's engine; None if it is taken."""
    if grad is None:
        return None
    if type(of) is not nn.Parameter:
        return written(grad)
    has_hooks = of._backward_hooks or of._post_accumulate_grad_hooks
    if _queue.gradients is None or has_hooks or not of.requires_grad:
        flush()  # what becomes its `grad` is a plain tensor
        return grad
    if (known := taken(of)) is None:
        _queue.gradients[id(of)] = of, grad
    else:
        flush()
        known += grad
    return None


def taken(of: Tensor) -> Tensor | None:
    """The gradient of this parameter that `gradient` has taken; later calls can add to it."""
    known = None if _queue.gradients is None else _queue.gradients.get(id(of))
    return None if known is None else known[1]


def strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """`x.as_strided` for calls."""
    with torch._C._DisableTorchDispatch():
        return x.as_strided(shape, strides, offset)


def flush() -> None:
    """Wait until all calls are made."""
    if _queue.kept:
        _give(0)


def _give(most: int) -> None:
    """Give the library the calls that it has not got. If more than `most` are left to make, wait for half of them."""
    steps, left = _queue.steps, ctypes.c_int64()
    _queue.steps = array("q")
    try:
        loaded_library().transduce_run(address(steps), len(steps) // 2, n_threads(), most, ctypes.byref(left))
    finally:
        _queue.kept = _queue.kept[len(_queue.kept) - left.value :]


class Pending(Tensor):
    """A tensor whose numbers a call will write that perhaps waits."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:  # a view reads nothing
            flush()
        with torch._C._DisableTorchDispatch():
            found = function(*args, **(kwargs or {}))
        if not function.is_view:
            return found
        return written(found) if isinstance(found, Tensor) else [written(x) for x in found]
