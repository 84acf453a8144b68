"""Sentences of a `TranslationQueue` for the native library, and how its events come back."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from functools import lru_cache, partial

from transduce.config import DecodingSettings
from transduce.decoding.engine import Deliver, Order, Source
from transduce.decoding.native_queue import NativeClient, NativeQueue, native_options
from transduce.decoding.options import TranslationOptions


class NativeBackend:
    """A backend of `TranslationQueue` that admits sentences at every decoding step."""

    def __init__(
        self,
        queue: NativeQueue,
        settings: DecodingSettings,
        takes: Callable[[Source, TranslationOptions], bool],
        deliver: Deliver,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self._takes, self._queue, self._deliver, self._loop = takes, queue, deliver, loop
        self._native_options = lru_cache(partial(native_options, settings=settings))
        queue.start_threads()
        self._client = NativeClient(queue)
        self._thread: threading.Thread | None = None
        if loop is not None:
            loop.add_reader(self._client.fileno(), self._read)
            return
        self._thread = threading.Thread(target=_deliver_all, args=(self._client, deliver), name="deliver", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Deliver in the event loop."""
        for event in self._client.collect(0):
            self._deliver(event)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._client.fileno())
        self._read()

    def takes(self, source: Source, options: TranslationOptions) -> bool:
        """See `Backend.takes`."""
        return self._takes(source, options)

    def submit(self, order: Order) -> None:
        """See `Backend.submit`."""
        options = self._native_options(order.options, stream=order.stream)
        seconds, seed = order.deadline - order.submitted, order.options.seed
        self._client.submit([order.source], options, first_ticket=order.ticket, seconds=seconds, seed=seed)

    def cancel(self, ticket: int) -> None:
        """See `Backend.cancel`."""
        self._client.cancel(ticket)

    def workload(self) -> dict[str, int]:
        """See `Backend.workload`."""
        return {name: n for name, n in self._queue.workload().items() if name != "n_open"}

    def close(self) -> None:
        """See `Backend.close`."""
        self._client.close()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, self._loop)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _deliver_all(client: NativeClient, deliver: Deliver) -> None:
    while True:
        closed = client.closed  # looked at first: what `close` reports is still delivered
        events = client.collect(math.inf)
        for event in events:
            deliver(event)
        if closed and not events:
            return
