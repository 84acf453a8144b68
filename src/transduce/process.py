"""Commands that try something out end cleanly: nothing that they began outlives them, no folder of theirs stays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_PARENT = "TRANSDUCE_ENDS_WITH"


class _Asked(BaseException):
    """A signal asked us to end; no error, so that nothing on the way handles it."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the process as an exception does, so that all that is to be cleaned up is.

    Python ends at once by default, without a `finally`. The exit code is the shell's, 143 or 129, after a line. Further
    signals change nothing: cleaning up is short. An ignored SIGHUP (nohup) stays so. In other threads nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if len(asked) == 1:
            raise _Asked

    numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {n: signal.signal(n, ask) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    except _Asked:
        print(f"transduce: {signal.Signals(asked[0]).name}: ended, nothing is left behind", file=sys.stderr)
        sys.exit(128 + asked[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def bound_to_us() -> dict[str, str]:
    """What to add to the environment of a child that calls `heed_parent`."""
    return {_PARENT: str(os.getpid())}


def heed_parent() -> None:
    """End at once when the process that has begun us dies, even by SIGKILL, if it asked for that (on Linux)."""
    parent = os.environ.pop(_PARENT, None)  # not for children of ours
    if parent is None:
        return
    at_parents_death(signal.Signals["SIGKILL"] if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    if sys.platform == "linux" and str(os.getppid()) != parent:  # it was faster
        sys.exit(1)


def at_parents_death(number: signal.Signals) -> None:
    """Have the system send us this signal when our parent dies (on Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, int(number))  # PR_SET_PDEATHSIG
