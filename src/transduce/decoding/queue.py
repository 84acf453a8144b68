"""Translate sentences that are submitted, cancelled and given deadlines while others are decoded, as a service does.

`TranslationQueue` is the same for every engine. The native library admits a sentence at every decoding step;
`BatchingBackend` makes batches of what waits, for engines that cannot.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from transduce.config.section import MAX_TOKENS
from transduce.decoding.engine import Backend, Deliver, Engine, Event, Hypothesis, Order, Source
from transduce.decoding.options import TranslationOptions
from transduce.errors import SettingsError, TransduceError

_GATHER = 0.002  # seconds that a batch waits for more sentences
MAX_ROWS = 320  # hypotheses per batch: enough for wide matrix products, few enough for a CPU's caches
_CLOSED = "the queue is closed"


class QueueFullError(TransduceError):
    """As many sentences as the queue may hold have not ended; try again later."""


class TranslationQueue:
    """A queue in front of an engine. Safe to use from several threads.

    Urgent sentences come first: by deadline (without one: a minute after they were submitted), then the longest.
    Results come in the order of completion and are those of `Engine.translate`, bit for bit.

    >>> queue = TranslationQueue(engine, lambda event: loop.call_soon_threadsafe(handle, event))   # doctest: +SKIP
    >>> ticket = queue.submit(source, options, seconds=10)                                         # doctest: +SKIP
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        *,
        max_open: int = 100_000,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Open a queue.

        Args:
            engine: What translates.
            deliver: Called for every event, by threads of the queue or by `loop`. It should return at once.
            max_open: Sentences that have not ended at one time, at most.
            loop: An event loop that is running.
        """
        self._max_open, self._tickets = max_open, itertools.count(1)
        self._open = _OpenTickets(deliver)
        self._backends = tuple(engine.backends(self._open.deliver, loop))
        self._finalizer = weakref.finalize(self, _close_all, self._backends)

    def submit(
        self, source: Source, options: TranslationOptions, *, seconds: float = math.inf, stream: bool = False
    ) -> int:
        """Add a sentence; the events that come of it have the ticket that this returns.

        Args:
            source: The sentence.
            options: How to translate it.
            seconds: Time after which it ends as `expired`, decoded or not.
            stream: Deliver `tokens` on the way, where the backend can.

        Raises:
            QueueFullError: `max_open` sentences have not ended.
            SettingsError: The source or the options are not possible.
            TransduceError: The queue is closed.
        """
        if not self._finalizer.alive:
            raise TransduceError(_CLOSED)
        if not 0 < source.limit <= MAX_TOKENS:
            raise SettingsError(f"limit = {source.limit}: must be from 1 to {MAX_TOKENS:,} tokens")
        now, ticket = time.monotonic(), next(self._tickets)
        backend = next(backend for backend in self._backends if backend.takes(source, options))
        if not self._open.add(ticket, backend, self._max_open):
            raise QueueFullError(f"{self._max_open} sentences wait or are being translated; try again later")
        try:
            backend.submit(Order(ticket, source, options, now + seconds, stream, now))
        except BaseException:
            self._open.drop(ticket)
            raise
        return ticket

    def cancel(self, ticket: int) -> None:
        """End a sentence at the next step of its search; no effect if it has ended."""
        backend = self._open.backend(ticket)
        if backend is not None:
            backend.cancel(ticket)

    @property
    def n_open(self) -> int:
        """Sentences that have not ended."""
        return len(self._open)

    def workload(self) -> dict[str, int]:
        """Sums over the backends: `n_open` and `n_waiting` sentences; of some, decoding steps `n_steps`, `n_rows`..."""
        total = Counter({"n_open": self.n_open})
        for backend in self._backends:
            total.update(backend.workload())
        return dict(total)

    def close(self) -> None:
        """Cancel all sentences, deliver their ends and end the threads."""
        self._finalizer()

    def __enter__(self) -> TranslationQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OpenTickets:
    """The sentences that have not ended, and where events go. Threads of backends refer to this, not to the queue."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver, self._lock = deliver, threading.Lock()
        self._backends: dict[int, Backend] = {}

    def __len__(self) -> int:
        return len(self._backends)

    def add(self, ticket: int, backend: Backend, most: int) -> bool:
        with self._lock:
            if len(self._backends) >= most:
                return False
            self._backends[ticket] = backend
            return True

    def drop(self, ticket: int) -> None:
        with self._lock:
            self._backends.pop(ticket, None)

    def backend(self, ticket: int) -> Backend | None:
        return self._backends.get(ticket)

    def deliver(self, event: Event) -> None:
        if event.outcome != "tokens":
            self.drop(event.ticket)
        try:
            self._deliver(event)
        except Exception:  # of the caller's function: other events must still come
            args = (*sys.exc_info(), threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(args))


def _close_all(backends: Sequence[Backend]) -> None:
    for backend in backends:
        backend.close()


class BatchingBackend:
    """For engines that translate batches only: one thread takes what waits, at most 2 ms after the first came."""

    def __init__(
        self,
        translate: Callable[[Sequence[Source], TranslationOptions], list[list[Hypothesis]]],
        deliver: Deliver,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._translate = translate
        self._deliver = deliver if loop is None else lambda event: loop.call_soon_threadsafe(deliver, event)
        self._changed = threading.Condition()
        self._waiting: dict[int, Order] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def takes(self, source: Source, options: TranslationOptions) -> bool:
        """See `Backend.takes`."""
        return True

    def submit(self, order: Order) -> None:
        """See `Backend.submit`."""
        with self._changed:
            if self._closed:
                raise TransduceError(_CLOSED)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="translate", daemon=True)
                self._thread.start()
            self._waiting[order.ticket] = order
            self._changed.notify()

    def cancel(self, ticket: int) -> None:
        """See `Backend.cancel`. A batch that has begun is decoded to its end."""
        with self._changed:
            found = self._waiting.pop(ticket, None)
        if found is not None:
            self._deliver(Event(ticket, "cancelled"))

    def workload(self) -> dict[str, int]:
        """See `Backend.workload`."""
        return {"n_waiting": len(self._waiting)}

    def close(self) -> None:
        """See `Backend.close`."""
        with self._changed:
            self._closed = True  # first: what `submit` adds after the end would wait for ever
            self._changed.notify()
        for ticket in list(self._waiting):
            self.cancel(ticket)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._decode(batch)

    def _next_batch(self) -> list[Order]:
        """The most urgent sentence and others with the same options; empty when the queue is closed."""
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._changed.wait_for(lambda: self._closed, timeout=_GATHER)
                orders = sorted(self._waiting.values(), key=lambda order: order.urgency)
                late = [order for order in orders if order.deadline <= time.monotonic()]
                alike = [order for order in orders if order not in late and order.options == orders[len(late)].options]
                rows = 1 if not alike else max(alike[0].options.beam or 1, alike[0].options.n_best)
                batch = alike[: max(1, MAX_ROWS // rows)]
                for order in (*late, *batch):
                    del self._waiting[order.ticket]
                for order in late:
                    self._deliver(Event(order.ticket, "expired"))
                if batch:
                    return batch
        return []

    def _decode(self, batch: Sequence[Order]) -> None:
        try:
            found = self._translate([order.source for order in batch], batch[0].options)
        except Exception as error:
            for order in batch:
                self._deliver(Event(order.ticket, "failed", reason=str(error) or type(error).__name__))
            return
        for order, hypotheses in zip(batch, found, strict=True):
            expired = order.deadline <= time.monotonic()
            self._deliver(Event(order.ticket, "expired") if expired else Event(order.ticket, "done", hypotheses))
