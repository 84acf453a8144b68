"""Asynchronous calls of the C++ library.

After each call, the numbers of a training step have pushed Python and PyTorch out of the CPU's caches: the next ten
lines of Python take four times as long as they would otherwise. So inside `deferred` calls are queued, and a thread of
the library makes them in order while Python prepares the next ones; when Python is far enough ahead, it helps. Results
are `Pending` tensors: any use other than by a call waits for them.
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

_CALLS_PER_RUN = 2  # given to the library together
_MAX_UNFINISHED = 4  # when Python goes on: they keep the memory of what they read


class _Queue(threading.local):
    """The unfinished calls of a thread, and the gradients that are taken."""

    is_open = False
    gradients: dict[int, tuple[nn.Parameter, Tensor]] | None = None
    """Those of parameters, by `id`, if they are taken."""

    def __init__(self) -> None:
        self.steps = array("q")  # of calls that the library has not got: the address of the function, and of its call
        self.kept: list[object] = []  # unfinished calls in their order, and the tensors that they read and write


_queue = _Queue()
_in_use = threading.Lock()  # calls of two threads would not know which of them are made


@contextmanager
def deferred() -> Iterator[None]:
    """Make calls asynchronously; all are finished at the end. Not if another thread is inside.

    Do not change in place what an unfinished call reads.
    """
    if _queue.is_open or not _in_use.acquire(blocking=False):
        yield
        flush()
        return
    try:
        _queue.is_open = True
        yield
        flush()
    finally:
        try:
            with suppress(Exception):
                flush()  # after an error: unfinished calls need what is kept
        finally:
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
    _queue.kept.append((call, tensors))  # first, because Ctrl-C may come between the two
    _queue.steps.extend((_place(name), ctypes.addressof(call)))
    if len(_queue.steps) == 2 * _CALLS_PER_RUN:
        _submit(_MAX_UNFINISHED)


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
    if not of.requires_grad:
        return None
    if _queue.gradients is None or of._backward_hooks or of._post_accumulate_grad_hooks:
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
        _submit(0)


def _submit(most: int) -> None:
    """Give the library its calls. If more than `most` are unfinished then, help until at most half as many are."""
    steps, left = _queue.steps, ctypes.c_int64(len(_queue.kept))
    _queue.steps = array("q")
    try:
        loaded_library().transduce_run(address(steps), len(steps) // 2, n_threads(), most, ctypes.byref(left))
    finally:
        _queue.kept = _queue.kept[len(_queue.kept) - left.value :]


class Pending(Tensor):
    """A tensor that an unfinished call may still have to write."""

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
