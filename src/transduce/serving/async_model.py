"""Decode from asyncio: the sources of all callers of a model share one `TranslationQueue`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from transduce.decoding.engine import Engine, Event, Hypothesis, Source
from transduce.decoding.options import TranslationOptions
from transduce.decoding.queue import TranslationQueue
from transduce.errors import TransduceError
from transduce.serving.limits import Admission, ExpiredError

MAX_OPEN = 100_000
EXPIRED = "the deadline has passed; send less text, or try again later"


class AsyncModel:
    """What `AsyncTranslator` and others share: a model for one event loop. New sources join those that are being
    decoded, at every decoding step.

    A caller that is cancelled frees the rows of its sources at the next step.
    """

    def __init__(self, engine: Engine, *, admission: Admission | None = None) -> None:
        """Start a queue for the engine; call this inside a running event loop.

        `admission`: refuses work when too much is waiting; several models may share it.
        """
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[_Call, int]] = {}  # by ticket
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue = TranslationQueue(engine, self._handle, max_open=MAX_OPEN, loop=self._loop)

    def _admitted(self, n_tokens: int, *, counted: bool = True, refuse: bool = True) -> AbstractContextManager[None]:
        """Count tokens as work until the block ends, if `counted`: see `Admission.tokens`."""
        if self._admission is None or not counted:
            return nullcontext()
        return self._admission.tokens(n_tokens, refuse=refuse)

    async def _decode(
        self, sources: Sequence[Source], options: TranslationOptions, *, seconds: float = math.inf
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each source. Raises `ExpiredError`: `seconds` have passed."""
        call = _Call(self._loop, len(sources))
        with self._open(call, sources, options, seconds):
            return await call.future

    async def _stream(
        self, source: Source, options: TranslationOptions, *, seconds: float = math.inf
    ) -> AsyncGenerator[tuple[int, ...] | list[Hypothesis]]:
        """Tokens of the best hypothesis as they become certain, then the hypotheses."""
        call = _Call(self._loop, 1)
        call.tokens = asyncio.Queue()
        call.future.add_done_callback(lambda _: call.stop_stream())
        with self._open(call, [source], options, seconds):
            while (tokens := await call.tokens.get()) is not None:
                yield tokens
            (hypotheses,) = await call.future
            yield hypotheses

    @contextmanager
    def _open(
        self, call: _Call, sources: Sequence[Source], options: TranslationOptions, seconds: float
    ) -> Iterator[None]:
        """Submit the sources of a call; at the end, cancel those that have not ended."""
        tickets: list[int] = []
        self._idle.clear()
        try:
            for place, source in enumerate(sources):
                ticket = self._queue.submit(source, options, seconds=seconds, stream=call.tokens is not None)
                self._calls[ticket] = call, place
                tickets.append(ticket)
            yield
        finally:
            call.future.cancel()  # of a stream that is left early
            for ticket in tickets:
                if self._calls.pop(ticket, None) is not None:
                    self._queue.cancel(ticket)
            if not self._calls:
                self._idle.set()

    def _handle(self, event: Event) -> None:
        if event.outcome == "tokens":
            call, _ = self._calls.get(event.ticket, (None, 0))
            if call is not None and call.tokens is not None:
                call.tokens.put_nowait(event.tokens)
            return
        call, place = self._calls.pop(event.ticket, (None, 0))
        if call is not None:
            call.end(place, event)

    def workload(self) -> dict[str, int]:
        """What the engine's queue has to do: see `TranslationQueue.workload`."""
        return self._queue.workload()

    async def drained(self) -> None:
        """Wait until nothing is open."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what is open, and end the queue's threads."""
        await asyncio.to_thread(self._queue.close)


class _Call:
    """The sources of one caller, and the future of their hypotheses."""

    def __init__(self, loop: asyncio.AbstractEventLoop, n_sources: int) -> None:
        self.found: list[list[Hypothesis]] = [[]] * n_sources
        self.future: asyncio.Future[list[list[Hypothesis]]] = loop.create_future()
        self.tokens: asyncio.Queue[tuple[int, ...] | None] | None = None
        self._n_open = n_sources
        if not n_sources:
            self.future.set_result(self.found)

    def end(self, place: int, event: Event) -> None:
        """Take the end of one source."""
        if self.future.done():
            return
        if event.outcome == "done":
            self.found[place] = event.hypotheses
            self._n_open -= 1
            if not self._n_open:
                self.future.set_result(self.found)
        elif event.outcome == "expired":
            self.future.set_exception(ExpiredError(EXPIRED))
        else:
            self.future.set_exception(TransduceError(event.reason or f"the work was {event.outcome}"))

    def stop_stream(self) -> None:
        """End the stream of tokens."""
        if self.tokens is not None:
            self.tokens.put_nowait(None)
