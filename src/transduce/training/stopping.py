"""Stopping by signals (Ctrl-C, SIGTERM, a closed terminal)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from transduce.process import handle_signals


class StopRequest:
    """True once a signal has asked the run to stop; `number` is that of the signal, or 0."""

    def __init__(self) -> None:
        self.number = 0
        self.make_error: Callable[[int], Exception] | None = None

    def __bool__(self) -> bool:
        return self.number != 0

    @contextlib.contextmanager
    def interrupting(self, make_error: Callable[[int], Exception]) -> Iterator[None]:
        """Inside the context, a signal raises what `make_error` returns for its number, in the main thread.

        A signal that came before is raised at once. For work that can be repeated after a resume, such as a validation.
        """
        self.make_error = make_error
        try:
            if self:
                raise make_error(self.number)
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
        request.number = int(number)
        if request.make_error is not None:
            raise request.make_error(request.number)
        with contextlib.suppress(RuntimeError):  # if the signal came while a line was written
            say(f"{number.name}: finishing the current update and saving; a second signal stops without saving")

    with handle_signals(ask, "SIGHUP", always=("SIGINT", "SIGTERM")):
        yield request
