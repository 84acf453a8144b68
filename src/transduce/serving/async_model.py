"""Decode from asyncio: the sources of all callers of a model share one `TranslationQueue`."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from transduce.decoding.engine import Engine, Event, Hypothesis, Source
from transduce.decoding.options import TranslationOptions
from transduce.decoding.queue import TranslationQueue
from transduce.errors import TransduceError
from transduce.serving.limits import Admission, DrainingError, ExpiredError

MAX_OPEN = 100_000
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
"""Upper bounds of the durations that are counted together."""
BURST = 200
"""Sentences that are processed in one step of the event loop: some milliseconds."""
EXPIRED = "the deadline has passed; send less text, or try again later"


PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")
OnTokens = Callable[[int, tuple[int, ...]], bool]
"""Called in the event loop with the place of a source and tokens of its best hypothesis; True: no more are needed."""


class AsyncModel:
    """What `AsyncTranslator` and others share: a model for one event loop. New sources join those that are being
    decoded, at every decoding step.

    A caller that is cancelled frees the rows of its sources at the next step; an engine that decodes whole batches
    completes the batch.

    Attributes:
        n_new: Tokens of all results so far.
        n_calls: Numbers of calls by the time from the queue to the last result, up to each of `SECONDS` and beyond.
        call_seconds: The sum of these times.
    """

    def __init__(self, engine: Engine, *, admission: Admission | None = None) -> None:
        """Start a queue for the engine; call this inside a running event loop.

        `admission`: refuses work when too much is waiting; several models may share it.
        """
        self.n_new, self.n_calls, self.call_seconds = 0, [0] * (len(SECONDS) + 1), 0.0
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[_Call, int]] = {}  # by ticket
        self._queue = TranslationQueue(engine, self._handle, max_open=MAX_OPEN, loop=self._loop)

    def _admitted(self, n_tokens: int, *, refuse: bool = True) -> AbstractContextManager[None]:
        """Count tokens as work until the block ends: see `Admission.tokens`."""
        return nullcontext() if self._admission is None else self._admission.tokens(n_tokens, refuse=refuse)

    async def _decode(
        self,
        sources: Sequence[Source],
        options: TranslationOptions,
        *,
        seconds: float = math.inf,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each source. Raises `ExpiredError`: `seconds` have passed."""
        call, start = _Call(self._loop, len(sources), on_tokens), time.perf_counter()
        tickets: list[int] = []
        try:
            for place, source in enumerate(sources):
                ticket = self._queue.submit(source, options, seconds=seconds, stream=on_tokens is not None)
                self._calls[ticket] = call, place
                tickets.append(ticket)
                if len(tickets) % BURST == 0:
                    await asyncio.sleep(0)
            found = await call.future
            self._count(time.perf_counter() - start)  # uvloop counts milliseconds
            return found
        finally:
            for ticket in tickets:
                if self._calls.pop(ticket, None) is not None:
                    self._queue.cancel(ticket)

    def _count(self, seconds: float) -> None:
        self.n_calls[bisect_left(SECONDS, seconds)] += 1
        self.call_seconds += seconds

    def _handle(self, event: Event) -> None:
        call, place = self._calls.get(event.ticket, (None, 0))
        if call is None:
            return
        if event.outcome != "tokens":
            call.end(place, event)
        elif call.on_tokens is None or not call.on_tokens(place, event.tokens):
            return
        else:  # it needs no more
            self._queue.cancel(event.ticket)
            call.take(place, [])
        del self._calls[event.ticket]

    def workload(self) -> dict[str, int]:
        """What the engine's queue has to do: see `TranslationQueue.workload`."""
        return self._queue.workload()

    async def close(self) -> None:
        """Cancel what is open, and end the queue's threads."""
        await asyncio.to_thread(self._queue.close)


class _Call:
    """The sources of one caller, and the future of their hypotheses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, n_sources: int, on_tokens: OnTokens | None) -> None:
        self.future: asyncio.Future[list[list[Hypothesis]]] = loop.create_future()
        self.on_tokens = on_tokens
        self._found: list[list[Hypothesis]] = [[]] * n_sources
        self._n_open = n_sources
        if not n_sources:
            self.future.set_result(self._found)

    def end(self, place: int, event: Event) -> None:
        """Take the end of one source."""
        if event.outcome == "done":
            self.take(place, event.hypotheses)
        elif self.future.done():
            return
        elif event.outcome == "expired":
            self.future.set_exception(ExpiredError(EXPIRED))
        elif event.outcome == "cancelled":
            self.future.set_exception(DrainingError("the service is shutting down"))
        else:
            self.future.set_exception(TransduceError(event.reason or f"the work was {event.outcome}"))

    def take(self, place: int, hypotheses: list[Hypothesis]) -> None:
        """Take the hypotheses of one source."""
        self._found[place] = hypotheses
        self._n_open -= 1
        if not self._n_open and not self.future.done():
            self.future.set_result(self._found)


async def in_parts(
    work: Callable[[Callable[[PartT], object]], Awaitable[ResultT]],
) -> AsyncGenerator[PartT | ResultT]:
    """What `work` passes to the function that it is given, as it comes, then its result. Leaving it cancels `work`."""
    parts: asyncio.Queue[PartT | None] = asyncio.Queue()
    running = asyncio.ensure_future(work(parts.put_nowait))
    running.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        while (part := await parts.get()) is not None:
            yield part
        yield await running
    finally:
        running.cancel()
        await asyncio.wait([running])  # its tokens are no longer counted when this ends


async def offload(n_sentences: int, work: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Call `work`; in another thread if it is for many sentences, so that other requests proceed."""
    if n_sentences <= BURST:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


@asynccontextmanager
async def expiring(end: float) -> AsyncIterator[None]:
    """Cancel the block at `end`, a time of the event loop, and raise `ExpiredError`."""
    try:
        async with asyncio.timeout_at(None if end == math.inf else end):
            yield
    except TimeoutError:
        raise ExpiredError(EXPIRED) from None
