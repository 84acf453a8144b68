"""Translate from asyncio: the sentences of all callers share one `TranslationQueue`."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence

from transduce.decoding.alignment import Link
from transduce.decoding.engine import Event, Source
from transduce.decoding.options import TranslationOptions
from transduce.decoding.queue import TranslationQueue
from transduce.decoding.results import Translation
from transduce.decoding.translator import Translator
from transduce.errors import TransduceError
from transduce.serving.limits import Admission, ExpiredError

MAX_OPEN = 100_000
EXPIRED = "the deadline has passed; send less text, or try again later"
_DEFAULT = TranslationOptions()


class AsyncTranslator:
    """A translator for one event loop. New sentences join those that are being decoded, at every decoding step.

    A caller that is cancelled frees the rows of its sentences at the next step.

    >>> translator = AsyncTranslator(Translator.load("runs/x"))      # doctest: +SKIP
    >>> await translator.translate(["A dog."])                       # doctest: +SKIP
    """

    def __init__(self, translator: Translator, *, admission: Admission | None = None) -> None:
        """Start the translator's queue; call this inside a running event loop.

        Args:
            translator: The model.
            admission: Refuses sentences when too much is waiting; several translators may share it.
        """
        self.translator = translator
        self._admission = admission
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, tuple[_Call, int]] = {}  # by ticket
        self._events: deque[Event] = deque()
        self._lock, self._is_scheduled = threading.Lock(), False
        self._idle = asyncio.Event()
        self._idle.set()
        self._queue = TranslationQueue(translator.engine, self._deliver, max_open=MAX_OPEN)

    async def translate(
        self,
        texts: Sequence[str],
        options: TranslationOptions = _DEFAULT,
        *,
        seconds: float = math.inf,
        prefixes: Sequence[str] = (),
        counted: bool = True,
    ) -> list[Translation]:
        """Translate sentences; the results are those of `Translator.translate`, bit for bit.

        `counted` False: never refused, however much is waiting.

        Raises:
            ExpiredError: `seconds` have passed.
            OverloadedError: Too much is waiting.
        """
        call = _Call(self._loop, list(self.translator.encode(texts, options, prefixes=prefixes)))
        return await self._run(call, options, seconds, counted=counted)

    async def align(self, srcs: Sequence[str], tgts: Sequence[str], *, end: float = math.inf) -> list[list[Link]]:
        """Align sentences in another thread, one after another: see `Translator.align`.

        Raises `ExpiredError`: they are not done at `end`, a time of the event loop.
        """
        found: list[list[Link]] = []
        for src, tgt in zip(srcs, tgts, strict=True):
            if self._loop.time() > end:
                raise ExpiredError(EXPIRED)
            found += await asyncio.to_thread(self.translator.align, [src], [tgt])
        return found

    async def stream(
        self,
        text: str,
        options: TranslationOptions = _DEFAULT,
        *,
        seconds: float = math.inf,
        prefix: str = "",
    ) -> AsyncIterator[str | Translation]:
        """Translate one sentence: yields the beginning of the output as it grows, then the translation.

        With beams, the beginning is what all live hypotheses share.
        """
        call = _Call(self._loop, list(self.translator.encode([text], options, prefixes=[prefix])))
        call.tokens = asyncio.Queue()
        running = asyncio.ensure_future(self._run(call, options, seconds))
        running.add_done_callback(lambda _: call.stop_stream())
        known: list[int] = []
        try:
            while (tokens := await call.tokens.get()) is not None:
                known.extend(tokens)
                yield self.translator.tokenizers.tgt.decode(known)
            (translation,) = await running
            yield translation
        finally:
            running.cancel()

    async def _run(
        self, call: _Call, options: TranslationOptions, seconds: float, *, counted: bool = True
    ) -> list[Translation]:
        if not call.sources:
            return call.results
        if self._admission is None or not counted:
            return await self._submit(call, options, seconds)
        n_beams = max(options.beam or self.translator.settings.beam, options.n_best)
        with self._admission.tokens(n_beams * sum(len(source.ids) for source in call.sources.values())):
            return await self._submit(call, options, seconds)

    async def _submit(self, call: _Call, options: TranslationOptions, seconds: float) -> list[Translation]:
        tickets: list[int] = []
        self._idle.clear()
        try:
            for place, source in call.sources.items():
                ticket = self._queue.submit(source, options, seconds=seconds, stream=call.tokens is not None)
                self._calls[ticket] = call, place
                tickets.append(ticket)
            return await call.future
        finally:
            for ticket in tickets:
                if self._calls.pop(ticket, None) is not None:
                    self._queue.cancel(ticket)
            if not self._calls:
                self._idle.set()

    def _deliver(self, event: Event) -> None:
        """Collect events of the queue's threads; the event loop is woken once for all that wait."""
        self._events.append(event)
        with self._lock:
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._handle_events)

    def _handle_events(self) -> None:
        with self._lock:
            self._is_scheduled = False
        while self._events:
            event = self._events.popleft()
            if event.outcome == "tokens":
                call, _ = self._calls.get(event.ticket, (None, 0))
                if call is not None and call.tokens is not None:
                    call.tokens.put_nowait(event.tokens)
                continue
            call, place = self._calls.pop(event.ticket, (None, 0))
            if call is not None:
                call.end(place, event, self.translator)

    def workload(self) -> dict[str, int]:
        """What the engine's queue has to do: see `TranslationQueue.load`."""
        return self._queue.workload()

    async def drained(self) -> None:
        """Wait until no sentence is open."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancel what is open, and end the queue's threads."""
        await asyncio.to_thread(self._queue.close)


class _Call:
    """The sentences of one caller, and the future of their translations."""

    def __init__(self, loop: asyncio.AbstractEventLoop, encoded: list[Source | Translation]) -> None:
        self.sources = {place: one for place, one in enumerate(encoded) if isinstance(one, Source)}
        self.results: list[Translation] = encoded  # type: ignore[assignment]  # sources are replaced when they end
        self.future: asyncio.Future[list[Translation]] = loop.create_future()
        self.tokens: asyncio.Queue[Sequence[int] | None] | None = None
        self._n_open = len(self.sources)

    def end(self, place: int, event: Event, translator: Translator) -> None:
        """Take the end of one sentence."""
        if self.future.done():
            return
        if event.outcome == "done":
            try:
                self.results[place] = translator.decode(self.sources[place], event.hypotheses)
            except TransduceError as error:
                self.future.set_exception(error)
                return
            self._n_open -= 1
            if not self._n_open:
                self.future.set_result(self.results)
        elif event.outcome == "expired":
            self.future.set_exception(ExpiredError(EXPIRED))
        else:
            self.future.set_exception(TransduceError(event.reason or f"the translation was {event.outcome}"))

    def stop_stream(self) -> None:
        """End the stream of tokens."""
        if self.tokens is not None:
            self.tokens.put_nowait(None)
