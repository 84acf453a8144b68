"""When a run has had enough (early stopping), and how signals stop it (Ctrl-C, SIGTERM, a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any


def score_of(scores: Mapping[str, float], by: str) -> tuple[float, float]:
    """What a validation is judged by, higher is better: the score `by`, and the loss among equals; or the loss.

    Where there is no such score (nothing was translated, say) the loss decides.
    """
    return (scores[by] if by != "loss" and by in scores else -scores["loss"], -scores["loss"])


@dataclass(slots=True)
class Stopper:
    """The best validation so far, and how many have followed it without a better one."""

    by: str
    patience: int
    best: tuple[float, float] | None = None
    best_update: int = 0
    since: int = 0

    def see(self, update: int, scores: Mapping[str, float]) -> bool:
        """Take note of a validation; whether it is the best so far."""
        score = score_of(scores, self.by)
        better = self.best is None or score > self.best
        if better:
            self.best, self.best_update, self.since = score, update, 0
        else:
            self.since += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether patience (in validations; 0: endless) has run out."""
        return 0 < self.patience <= self.since

    def state(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"best": self.best, "best_update": self.best_update, "since": self.since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.best = None if state["best"] is None else (float(state["best"][0]), float(state["best"][1]))
        self.best_update, self.since = int(state["best_update"]), int(state["since"])


class StopRequest:
    """Whether a signal has asked the run to stop, and which."""

    def __init__(self) -> None:
        self.name, self.number = "", 0
        self.make_error: Callable[[StopRequest], Exception] | None = None

    def __bool__(self) -> bool:
        return bool(self.name)

    @contextlib.contextmanager
    def interrupting(self, make_error: Callable[[StopRequest], Exception]) -> Iterator[None]:
        """Inside, a signal raises the error that `make_error` returns at once, in the main thread.

        For work that changes nothing, such as a validation: nothing after it is done, so nothing before it may be lost.
        """
        self.make_error = make_error
        try:
            yield
        finally:
            self.make_error = None


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP only sets the request that is yielded; the second ends the process.

    A terminal that closes may send more than one SIGHUP, so that a later one changes nothing; and where SIGHUP is
    ignored (nohup) it stays so. Signals belong to the main thread; in any other the request just stays unset.
    """
    request = StopRequest()
    hang_up: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request and number == hang_up:
            return
        if request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.number, request.name = number, signal.Signals(number).name
        if request.make_error is not None:
            raise request.make_error(request)
        with contextlib.suppress(RuntimeError):  # the signal may have come in the middle of another line
            say(f"{request.name}: finishing the current update and saving; another one stops at once, without saving")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
        numbers.append(hang_up)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
