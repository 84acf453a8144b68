"""Process-wide settings: signals, exit with the parent process, memory, garbage collection."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from transduce.errors import Interrupted

_PARENT = "TRANSDUCE_PARENT"
_MOST_FILES = 4096
_keeps_memory = False
_HUGE = 3 << 29  # bytes; below malloc's threshold for returning memory


class _Signalled(BaseException):
    """A signal asked the process to exit. It is no `Exception`, so that no `except Exception` catches it."""


@contextlib.contextmanager
def handle_signals(
    handle: Callable[[signal.Signals], object], *names: str, always: Sequence[str] = ()
) -> Iterator[None]:
    """Context manager in which `handle` is called for the signals in `names` and `always`, if the platform has them.

    Signals that the process ignores (nohup, background jobs of a script) stay ignored, except signals in `always`. Only
    the main thread receives signals; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.Signals[name] for name in (*always, *names) if hasattr(signal, name)]
    numbers = [n for n in numbers if n.name in always or signal.getsignal(n) is not signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: handle(signal.Signals(number))) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_file_limit() -> None:
    """Let this process open 4,096 files and connections at a time, or as many as the system allows."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS has no hard limit, but refuses 10,241 files
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))


@contextlib.contextmanager
def interrupted_by(*names: str, then: str) -> Iterator[Callable[[], None]]:
    """Context manager in which the first of these signals unwinds the stack, so that `finally` blocks clean up.

    The signal raises `Interrupted`, whose message ends with `then`. Further signals are ignored during the clean-up. By
    default Python exits at once on such signals, without running `finally` blocks.

    Yields a function to call regularly. It raises the exception again, since Python drops an exception that a signal
    handler raises in a destructor.
    """
    received: list[signal.Signals] = []

    def check() -> None:
        if received:
            raise _Signalled

    def stop(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1:
            raise _Signalled

    try:
        with handle_signals(stop, *names):
            yield check
    except _Signalled:
        raise Interrupted(f"stopped by {received[0].name}; {then}", signal=received[0]) from None


def exit_on_signals() -> contextlib.AbstractContextManager[object]:
    """Context manager in which SIGTERM and SIGHUP stop a command that has nothing to save."""
    return interrupted_by("SIGTERM", "SIGHUP", then="child processes and temporary folders are removed")


def n_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_threads_to_use() -> int:
    """Return the number of threads for computations outside PyTorch: OMP_NUM_THREADS if it is set, or all cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), 1024) if asked.isdecimal() and int(asked) else n_cores()


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment variable with which `python -m` imports nothing from the current folder, such as a user's `random.py`."""


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that calls `exit_with_parent`."""
    return {**os.environ, **SAFE_PATH, _PARENT: str(os.getpid())}


def exit_with_parent() -> None:
    """Make Linux kill this process when its parent exits, if the parent started it with `child_environment`."""
    parent = os.environ.pop(_PARENT, None)  # child processes must not inherit it
    if parent is None or sys.platform != "linux":
        return
    send_at_parent_exit(signal.SIGKILL)
    if str(os.getppid()) != parent:  # it has exited already
        sys.exit(1)


def send_at_parent_exit(number: signal.Signals) -> None:
    """Make Linux send the signal `number` to this process when its parent process exits."""
    if sys.platform == "linux":
        call_c("prctl", 1, int(number))  # PR_SET_PDEATHSIG


def call_c(name: str, *arguments: int) -> int:
    """Call a function of the C library whose arguments are numbers or addresses.

    Does nothing and returns 0 if the library lacks the function or cannot be loaded (Windows).
    """
    function = getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
    if function is None:
        return 0
    function.restype = ctypes.c_ssize_t
    return int(function(*map(ctypes.c_ssize_t, arguments)))


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the system.

    By default, large tensors are mapped and unmapped in every update, which takes a fifth of the training time of a
    small model. Peak memory does not change.
    """
    global _keeps_memory
    _keeps_memory = True
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 26)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        call_c("mallopt", option, value)
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Make the next 1.5 GiB of malloc's memory huge pages, if Linux allows it.

    With small pages, translating the virtual addresses of activations takes a twentieth of an update's time.
    """
    if sys.platform == "linux" and (start := call_c("malloc", _HUGE)):
        page = 1 << 21
        call_c("madvise", -(-start // page) * page, _HUGE - page, 14)  # MADV_HUGEPAGE
        call_c("free", start)


def limit_kernel_cache() -> None:
    """Limit the number of compiled kernels that oneDNN keeps, one for each shape of a product (its default: 1,024).

    Training needs few shapes (`kernels.products.rounded_rows`), but validation and translation need many, and each
    kernel takes memory. Call this before the first matrix product of the process. If the user has set the environment
    variable, its value is kept.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")


def limit_spinning() -> None:
    """Shorten the time for which idle threads of PyTorch's OpenMP (libgomp) spin before they give up the core.

    By default they spin for milliseconds. If other processes use the cores, two threads then train many times more
    slowly than one. Call this before PyTorch is imported, in a process that owns these settings. Environment variables
    that the user has set are kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # docs/parallel.md has measurements


def collect_garbage_rarely() -> None:
    """Let Python's garbage collector run after 20,000 new objects instead of its default, 700 or 2,000.

    With chunks of ten thousand sentence pairs in memory, garbage collection took a quarter of the time of reading and
    cleaning. Call this in a process that owns its settings.
    """
    gc.set_threshold(20_000)


def release_memory() -> None:
    """Return freed memory in all of malloc's arenas to the system.

    Call this after a validation: its threads and shapes differ from those of updates, so that memory kept by
    `keep_freed_memory` would fragment.
    """
    call_c("malloc_trim", 0)
    if _keeps_memory:
        _use_huge_pages()
