"""Early stopping, and stopping by signals (Ctrl-C, SIGTERM, a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transduce.process import handle_signals


def score_of(scores: Mapping[str, float], by: str) -> tuple[float, float]:
    """The key to compare validations by; higher is better. It is the score `by`, then the negative loss.

    If there is no such score, for example because nothing was translated, the loss decides alone.
    """
    return (scores[by] if by != "loss" and by in scores else -scores["loss"], -scores["loss"])


@dataclass(slots=True)
class Stopper:
    """The best validation so far, and the number of validations since."""

    by: str
    patience: int
    best: tuple[float, float] | None = None
    best_update: int = 0
    since: int = 0

    def see(self, update: int, scores: Mapping[str, float]) -> bool:
        """Count a validation; return whether it is the best so far."""
        score = score_of(scores, self.by)
        better = self.best is None or score > self.best
        if better:
            self.best, self.best_update, self.since = score, update, 0
        else:
            self.since += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether there were `patience` validations without a better one. A patience of 0 is endless."""
        return 0 < self.patience <= self.since

    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"best": self.best, "best_update": self.best_update, "since": self.since}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.best = None if state["best"] is None else (float(state["best"][0]), float(state["best"][1]))
        self.best_update, self.since = int(state["best_update"]), int(state["since"])


class StopRequest:
    """True once a signal has asked the run to stop; `name` and `number` are those of the signal."""

    def __init__(self) -> None:
        self.name, self.number = "", 0
        self.make_error: Callable[[StopRequest], Exception] | None = None

    def __bool__(self) -> bool:
        return bool(self.name)

    @contextlib.contextmanager
    def interrupting(self, make_error: Callable[[StopRequest], Exception]) -> Iterator[None]:
        """Inside the context, a signal raises the error that `make_error` returns, in the main thread.

        For work that can be repeated after a resume, such as a validation.
        """
        self.make_error = make_error
        try:
            yield
        finally:
            self.make_error = None


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the context, the first SIGINT, SIGTERM or SIGHUP sets the yielded request; the second ends the process.

    A closing terminal may send several SIGHUPs, so later ones have no effect.
    """
    request = StopRequest()

    def ask(number: signal.Signals) -> None:
        if request and number.name == "SIGHUP":
            return
        if request:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        request.number, request.name = int(number), number.name
        if request.make_error is not None:
            raise request.make_error(request)
        with contextlib.suppress(RuntimeError):  # if the signal came while a line was written
            say(f"{request.name}: finishing the current update and saving; a second signal stops without saving")

    with handle_signals(ask, "SIGHUP", always=("SIGINT", "SIGTERM")):
        yield request
