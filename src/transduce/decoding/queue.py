"""An asyncio queue in front of an engine: inputs arrive, expire and are cancelled while others are decoded."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import DecodingInput, Engine, Event, Hypothesis, cost_of
from transduce.errors import TransduceError

BURST = 200
"""Maximum number of inputs submitted in one step of the event loop; the step takes some milliseconds."""
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
"""Upper bounds of the bins in which the durations of calls are counted."""
EXPIRED = "the deadline has passed; send less text, or try again later"
_CLOSED = "shutting down; the queue takes no more work"

CALLER: ContextVar[str] = ContextVar("caller", default="")
"""The client of the current task. All clients get equal shares of a queue's work."""

OnTokens = Callable[[int, tuple[int, ...]], bool]
"""Called in the event loop with an input's index and new tokens of its best hypothesis; returns True to end it."""


class ExpiredError(TransduceError):
    """A deadline passed before the result was ready."""


class QueueClosedError(TransduceError):
    """The queue was closed before the result was ready."""


@asynccontextmanager
async def expiring(end: float) -> AsyncIterator[None]:
    """Cancel the `async with` block at the event loop's time `end`, and raise `ExpiredError`."""
    try:
        async with asyncio.timeout_at(None if end == math.inf else end):
            yield
    except TimeoutError:
        raise ExpiredError(EXPIRED) from None


class DecodingQueue:
    """A queue in front of an engine. New inputs join the inputs that are being decoded.

    Callers get equal shares of the work, by cost (see `CALLER`, `cost_of`), and so do the calls of one caller: calls
    are served in the order in which they would end if all were decoded in parallel (fair queueing; Demers, Keshav and
    Shenker 1989). Deadlines do not change the order. Hypotheses equal those of `Engine.translate`, bit for bit.

    >>> queue = DecodingQueue(engine)                                              # doctest: +SKIP
    >>> [[best, *others]] = await queue.decode([one], options, seconds=10)         # doctest: +SKIP

    Attributes:
        n_calls: Number of calls by duration: one bin up to each of `SECONDS`, and one above.
        call_seconds: Sum of the durations.
    """

    def __init__(self, engine: Engine) -> None:
        """Open a queue. Call this, and use it, inside a running event loop."""
        self.n_calls, self.call_seconds = [0] * (len(SECONDS) + 1), 0.0
        self._loop = asyncio.get_running_loop()
        self._n_open = Counter[str]()  # open calls of each caller
        self._share = 0.0  # virtual time of fair queueing: cost of each caller's fair share so far
        self._calls: dict[int, tuple[_Call, int]] = {}  # open inputs by ticket
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
        """Decode inputs; return the hypotheses of each, an empty list for an input that `on_tokens` has ended.

        The inputs of a call that is cancelled or expires end at the next decoding step. PyTorch's engine ends a batch
        when nobody waits for any of its inputs. `on_tokens` gets tokens as soon as they are final, if the engine can
        stream.

        Raises:
            ExpiredError: `seconds` have passed.
            QueueClosedError: The queue is, or was, closed.
            SettingsError: The engine cannot take an input.
        """
        call, start = _Call(self._loop, len(inputs), on_tokens), time.perf_counter()
        caller = CALLER.get()
        self._n_open[caller] += 1
        cost = cost_of(inputs, options)
        order = self._share + cost * self._n_open[caller]
        first, self._next_ticket = self._next_ticket, self._next_ticket + len(inputs)
        try:
            async with expiring(self._loop.time() + seconds):
                for begin in range(0, len(inputs), BURST):
                    if begin:
                        await asyncio.sleep(0)
                    if self._closed:
                        raise QueueClosedError(_CLOSED)
                    part, ticket = inputs[begin : begin + BURST], first + begin
                    self._batcher.submit(ticket, part, options, order=order, stream=on_tokens is not None)
                    self._calls.update((ticket + i, (call, begin + i)) for i in range(len(part)))
                hypotheses = await call.future
            self._share += cost / len(self._n_open)
            elapsed = time.perf_counter() - start  # uvloop's clock has only milliseconds
            self.n_calls[bisect_left(SECONDS, elapsed)] += 1
            self.call_seconds += elapsed
            return hypotheses
        finally:
            self._n_open -= Counter([caller])  # drops callers without open calls
            for ticket in range(first, first + len(inputs)):
                if self._calls.pop(ticket, None) is not None:
                    self._batcher.cancel(ticket)

    def _handle(self, event: Event) -> None:
        call, index = self._calls.get(event.ticket, (None, 0))
        if call is None or not call.receive(index, event):
            return
        del self._calls[event.ticket]
        if event.outcome == "tokens":  # the caller has enough tokens
            self._batcher.cancel(event.ticket)

    def workload(self) -> dict[str, int]:
        """`n_open`: open inputs; `n_waiting`: inputs not yet started; further values depend on the engine."""
        return {**self._batcher.workload(), "n_open": len(self._calls)}

    async def close(self) -> None:
        """Cancel all inputs. Nothing may be submitted afterwards."""
        self._closed = True
        await self._batcher.close()


class _Call:
    """One call of `DecodingQueue.decode`: its inputs, and the future of their hypotheses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, n_inputs: int, on_tokens: OnTokens | None) -> None:
        self.future: asyncio.Future[list[list[Hypothesis]]] = loop.create_future()
        self._on_tokens = on_tokens
        self._hypotheses: list[list[Hypothesis]] = [[]] * n_inputs
        self._n_open = n_inputs
        if not n_inputs:
            self.future.set_result(self._hypotheses)

    def receive(self, index: int, event: Event) -> bool:
        """Handle an event of the input with this index; return whether the input has ended."""
        if event.outcome == "tokens":
            return self._has_enough(index, event.tokens)
        if event.outcome == "done":
            self._end(index, event.hypotheses)
        elif event.outcome == "cancelled":
            self._fail(QueueClosedError(_CLOSED))
        else:
            self._fail(TransduceError(event.reason or "decoding failed"))
        return True

    def _has_enough(self, index: int, tokens: tuple[int, ...]) -> bool:
        try:
            if self._on_tokens is None or not self._on_tokens(index, tokens):
                return False
            self._end(index, [])
        except Exception as error:  # raised by `on_tokens`: other callers still need their events
            self._fail(error)
        return True

    def _end(self, index: int, hypotheses: list[Hypothesis]) -> None:
        self._hypotheses[index] = hypotheses
        self._n_open -= 1
        if not self._n_open and not self.future.done():
            self.future.set_result(self._hypotheses)

    def _fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
