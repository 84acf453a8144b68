"""Asynchronous calls of the C++ library.

After each call, the numbers of a training step have pushed Python and PyTorch out of the CPU's caches: the next ten
lines of Python take four times as long as they would otherwise. So inside `deferred` calls are queued, and a thread of
the library makes them in order while Python prepares the next ones; when Python is far enough ahead, its thread helps.
Results are `Pending` tensors: any use other than by a call waits for them.
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
_MAX_UNFINISHED = 4  # while Python continues: they keep the memory that they read


class _Calls:
    """Unfinished calls of this process: only one thread at a time queues any, but all can wait for them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.steps = array("q")  # of calls that the library has not got: the address of the function, and of its call
        self.kept: list[object] = []  # unfinished calls in their order, and the tensors that they read and write


class _OfThread(threading.local):
    """Whether a thread queues its calls, and the gradients that it takes."""

    is_open = False
    gradients: dict[int, tuple[nn.Parameter, Tensor]] | None = None
    """Those of parameters, by `id`, if they are taken."""


_calls, _of_thread = _Calls(), _OfThread()
_in_use = threading.Lock()  # by the thread that queues its calls


@contextmanager
def deferred() -> Iterator[None]:
    """Make calls asynchronously; all are finished at the end. Not if another thread is inside.

    Do not change in place what an unfinished call reads.
    """
    if _of_thread.is_open or not _in_use.acquire(blocking=False):
        yield
        flush()
        return
    try:
        _of_thread.is_open = True
        yield
        flush()
    finally:
        try:
            with suppress(Exception):
                flush()  # after an error: unfinished calls need what is kept
        finally:
            _of_thread.is_open = False
            _in_use.release()


@contextmanager
def taking_gradients() -> Iterator[None]:
    """Inside, one backward pass; gradients of parameters bypass PyTorch's engine and are added to `grad` at the end."""
    before, found = _of_thread.gradients, dict[int, tuple[nn.Parameter, Tensor]]()
    try:
        _of_thread.gradients = found
        yield
        flush()
        for parameter, grad in found.values():
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)
    finally:
        _of_thread.gradients = before


def takes_gradients() -> bool:
    """Whether gradients of parameters are taken now."""
    return _of_thread.gradients is not None


def run(name: str, call: ctypes.Structure, *tensors: Tensor | None) -> None:
    """Call a function of the library, now or later, with a structure that has the addresses of `tensors`."""
    if not _of_thread.is_open:
        if any(type(x) is Pending for x in tensors):  # of another thread
            flush()
        getattr(loaded_library(), f"transduce_{name}")(ctypes.byref(call), n_threads())
        return
    with _calls.lock:
        _calls.kept.append((call, tensors))  # first, because Ctrl-C may come between the two
        _calls.steps.extend((_place(name), ctypes.addressof(call)))
        if len(_calls.steps) == 2 * _CALLS_PER_RUN:
            _submit(_MAX_UNFINISHED)


@cache
def _place(name: str) -> int:
    """The address of a function of the library."""
    place = ctypes.cast(getattr(loaded_library(), f"transduce_{name}"), ctypes.c_void_p).value
    assert place
    return place


def written(x: Tensor) -> Tensor:
    """A tensor that a call has written, or will write, for others than calls."""
    return _pending(x) if _of_thread.is_open else x


def _pending(x: Tensor) -> Tensor:
    return Tensor._make_subclass(Pending, x) if _calls.kept else x


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
    if of is None:
        return written(grad)
    if not of.requires_grad:
        return None
    has_hooks = of._backward_hooks or getattr(of, "_post_accumulate_grad_hooks", None)
    if type(of) is not nn.Parameter or _of_thread.gradients is None or has_hooks:
        flush()  # what becomes its `grad` is a plain tensor
        return grad
    if (known := taken(of)) is None:
        _of_thread.gradients[id(of)] = of, grad
    else:
        flush()
        known += grad
    return None


def taken(of: Tensor) -> Tensor | None:
    """The gradient of this parameter that `gradient` has taken; later calls can add to it."""
    known = None if _of_thread.gradients is None else _of_thread.gradients.get(id(of))
    return None if known is None else known[1]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, with the numbers that calls will write if a hook reads them."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        flush()
    ctx.save_for_backward(*tensors)


def strided(x: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """`x.as_strided` for calls."""
    with torch._C._DisableTorchDispatch():
        return x.as_strided(shape, strides, offset)


def flush() -> None:
    """Wait until all calls are made."""
    if _calls.kept:
        with _calls.lock:
            _submit(0)


def _submit(most: int) -> None:
    """Give the library its calls. If more than `most` are unfinished then, help until at most half as many are."""
    steps, left = _calls.steps, ctypes.c_int64(len(_calls.kept))
    _calls.steps = array("q")
    try:
        loaded_library().transduce_run(address(steps), len(steps) // 2, n_threads(), most, ctypes.byref(left))
    finally:
        _calls.kept = _calls.kept[len(_calls.kept) - left.value :]


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
        return _pending(found) if isinstance(found, Tensor) else [_pending(x) for x in found]


def _of_plain_tensors(name: str) -> Any:
    """A method that waits, and is that of a plain tensor with the same memory: PyTorch does not dispatch it."""

    def method(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        flush()
        return getattr(Tensor._make_subclass(Tensor, x, x.requires_grad), name)(*args, **kwargs)

    return method


for _name in ("numpy", "tolist", "share_memory_", "__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__"):
    setattr(Pending, _name, _of_plain_tensors(_name))
