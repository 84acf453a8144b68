"""Decode for one event loop: inputs that are submitted, cancelled and given deadlines while others are decoded."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import DecodingInput, Engine, Event, Hypothesis
from transduce.errors import TransduceError

BURST = 200
"""Inputs that are processed in one step of the event loop: some milliseconds."""
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
"""Upper bounds of the durations that are counted together."""
EXPIRED = "the deadline has passed; send less text, or try again later"
_CLOSED = "shutting down; the queue takes no more work"

OnTokens = Callable[[int, tuple[int, ...]], bool]
"""Called in the event loop with the place of an input and tokens of its best hypothesis; True: no more are needed."""


class ExpiredError(TransduceError):
    """A deadline passed before the result was ready."""


class QueueClosedError(TransduceError):
    """The queue was closed before the result was ready."""


class DecodingQueue:
    """A queue in front of an engine. New inputs join those that are being decoded.

    Urgent inputs come first: by deadline (without one: a minute after they were submitted), then the longest.
    Hypotheses are those of `Engine.translate`, bit for bit.

    >>> queue = DecodingQueue(engine)                                              # doctest: +SKIP
    >>> [[best, *others]] = await queue.decode([one], options, seconds=10)         # doctest: +SKIP

    Attributes:
        n_calls: Numbers of calls by the time to the last result, up to each of `SECONDS` and beyond.
        call_seconds: The sum of these times.
    """

    def __init__(self, engine: Engine) -> None:
        """Open a queue. Call this, and use it, inside a running event loop."""
        self.n_calls, self.call_seconds = [0] * (len(SECONDS) + 1), 0.0
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[_Call, int]] = {}  # by the tickets of inputs that have not ended
        self._next_ticket, self._closed = 0, False
        self._batcher = engine.open_batcher(self._handle)

    async def decode(
        self,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        seconds: float = math.inf,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each input; none of one that `on_tokens` has ended.

        A caller that is cancelled frees its places at the next decoding step; PyTorch's engine completes the batch.

        Args:
            inputs: Any number.
            options: How to decode them.
            seconds: Time after which the call ends with `ExpiredError`.
            on_tokens: Sees tokens as soon as they are certain, where the engine can.

        Raises:
            ExpiredError: `seconds` have passed.
            QueueClosedError: The queue is, or was, closed.
            SettingsError: The engine cannot take an input.
        """
        call, start = _Call(self._loop, len(inputs), on_tokens), time.perf_counter()
        deadline = time.monotonic() + seconds
        first, self._next_ticket = self._next_ticket, self._next_ticket + len(inputs)
        try:
            for begin in range(0, len(inputs), BURST):
                if begin:
                    await asyncio.sleep(0)
                if self._closed:
                    raise QueueClosedError(_CLOSED)
                part, ticket = inputs[begin : begin + BURST], first + begin
                self._batcher.submit(ticket, part, options, deadline=deadline, stream=on_tokens is not None)
                self._calls.update((ticket + i, (call, begin + i)) for i in range(len(part)))
            found = await call.future
            self._count(time.perf_counter() - start)  # uvloop counts milliseconds
            return found
        finally:
            for ticket in range(first, first + len(inputs)):
                if self._calls.pop(ticket, None) is not None:
                    self._batcher.cancel(ticket)

    def _count(self, seconds: float) -> None:
        self.n_calls[bisect_left(SECONDS, seconds)] += 1
        self.call_seconds += seconds

    def _handle(self, event: Event) -> None:
        call, place = self._calls.get(event.ticket, (None, 0))
        if call is None or not call.receive(place, event):
            return
        del self._calls[event.ticket]
        if event.outcome == "tokens":  # the caller needs no more
            self._batcher.cancel(event.ticket)

    def workload(self) -> dict[str, int]:
        """`n_open` inputs that have not ended, `n_waiting` of these not begun; perhaps `n_steps`, `n_rows`, ..."""
        return {**self._batcher.workload(), "n_open": len(self._calls)}

    async def close(self) -> None:
        """Cancel what is open. Nothing may be submitted after it."""
        self._closed = True
        await self._batcher.close()


class _Call:
    """The inputs of one caller, and the future of their hypotheses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, n_inputs: int, on_tokens: OnTokens | None) -> None:
        self.future: asyncio.Future[list[list[Hypothesis]]] = loop.create_future()
        self._on_tokens = on_tokens
        self._found: list[list[Hypothesis]] = [[]] * n_inputs
        self._n_open = n_inputs
        if not n_inputs:
            self.future.set_result(self._found)

    def receive(self, place: int, event: Event) -> bool:
        """Take news of the input at this place; returns whether it has ended."""
        if event.outcome == "tokens":
            return self._has_enough(place, event.tokens)
        if event.outcome == "done":
            self._end(place, event.hypotheses)
        elif event.outcome == "expired":
            self._fail(ExpiredError(EXPIRED))
        elif event.outcome == "cancelled":
            self._fail(QueueClosedError(_CLOSED))
        else:
            self._fail(TransduceError(event.reason or "decoding failed"))
        return True

    def _has_enough(self, place: int, tokens: tuple[int, ...]) -> bool:
        try:
            if self._on_tokens is None or not self._on_tokens(place, tokens):
                return False
            self._end(place, [])
        except Exception as error:  # of the caller's function: other callers must still get their events
            self._fail(error)
        return True

    def _end(self, place: int, hypotheses: list[Hypothesis]) -> None:
        self._found[place] = hypotheses
        self._n_open -= 1
        if not self._n_open and not self.future.done():
            self.future.set_result(self._found)

    def _fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
