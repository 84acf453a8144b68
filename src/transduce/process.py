"""Child processes and signals: kill child processes and remove temporary folders on exit."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_PARENT = "TRANSDUCE_PARENT"


class _Signalled(BaseException):
    """A signal asked us to exit. No `Exception`, so that no handler on the way swallows it."""


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP unwind the stack like an exception, so that `finally` blocks clean up.

    By default Python exits at once, without running them. The exit code is the shell's, 143 or 129. Further signals
    are ignored during the clean-up, which is short. An ignored SIGHUP (nohup) stays ignored. In threads other than the
    main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise _Signalled

    numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {n: signal.signal(n, handle) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    except _Signalled:
        name = signal.Signals(received[0]).name
        print(f"transduce: stopped by {name}; child processes and temporary folders are removed", file=sys.stderr)
        sys.exit(128 + received[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def child_environment() -> dict[str, str]:
    """Our environment, for a child process that calls `exit_with_parent`."""
    return {**os.environ, _PARENT: str(os.getpid())}


def exit_with_parent() -> None:
    """Get killed when the process that started us exits, even by SIGKILL, if it set `child_environment` (Linux)."""
    parent = os.environ.pop(_PARENT, None)  # not for our own children
    if parent is None or sys.platform != "linux":
        return
    send_at_parent_exit(signal.SIGKILL)
    if str(os.getppid()) != parent:  # it has exited already
        sys.exit(1)


def send_at_parent_exit(number: signal.Signals) -> None:
    """Ask the system to send us this signal when our parent process exits (Linux)."""
    prctl = c_function("prctl") if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, int(number))  # PR_SET_PDEATHSIG


def c_function(name: str) -> Callable[..., Any] | None:
    """A function of the C library; None where there is none of this name, or no way to look it up (Windows)."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the system.

    Otherwise large tensors are mapped and unmapped in every update, which takes a fifth of the time of a small model.
    Peak memory does not change. Does nothing if the C library has no mallopt.
    """
    mallopt = c_function("mallopt")
    if mallopt is not None:
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 26)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
            mallopt(option, value)


def limit_kernel_cache() -> None:
    """Limit the number of compiled kernels that oneDNN keeps, by default 1,024: one for each shape of a product.

    Training needs few shapes (`nn.linear.rounded_rows`), but validation and translation need many, and each kernel
    takes memory. Call this before the first matrix product of the process. An environment variable has precedence.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")


def release_memory() -> None:
    """Return freed memory in all of malloc's arenas to the system.

    Call this after a validation: its threads and shapes differ from those of updates, so that memory kept by
    `keep_freed_memory` would fragment. Does nothing if the C library has no malloc_trim.
    """
    trim = c_function("malloc_trim")
    if trim is not None:
        trim(0)
