"""Dynamic batching for a `DecodingQueue`: batches of what waits, for engines that decode whole batches only."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import PATIENCE, DecodingInput, Deliver, Event, Hypothesis

_GATHER = 0.002  # seconds that a batch waits for more inputs
MAX_ROWS = 320  # hypotheses per batch: enough for wide matrix products, few enough for a CPU's caches


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """An input that waits. `deadline`: a time of `time.monotonic`; infinite: none."""

    ticket: int
    input: DecodingInput
    options: DecodingOptions
    deadline: float
    submitted: float

    @property
    def urgency(self) -> tuple[float, int, int]:
        """Sorts by deadline, then the longest first, then by arrival."""
        due = self.submitted + PATIENCE if self.deadline == math.inf else self.deadline
        return due, -len(self.input.ids), self.ticket


class DynamicBatcher:
    """One thread takes what waits, at most 2 ms after the first came. It does not stream."""

    def __init__(
        self,
        translate: Callable[[Sequence[DecodingInput], DecodingOptions], list[list[Hypothesis]]],
        deliver: Deliver,
    ) -> None:
        self._translate, self._deliver = translate, deliver
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(
        self,
        first_ticket: int,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        deadline: float,
        stream: bool,
    ) -> None:
        """See `Batcher.submit`."""
        now = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="translate", daemon=True)
            self._thread.start()
        with self._changed:
            for ticket, one in enumerate(inputs, first_ticket):
                self._waiting[ticket] = _Waiting(ticket, one, options, deadline, now)
            self._changed.notify()

    def cancel(self, ticket: int) -> None:
        """See `Batcher.cancel`. A batch that has begun is decoded to its end."""
        with self._changed:
            found = self._waiting.pop(ticket, None)
        if found is not None:
            self._deliver(Event(ticket, "cancelled"))

    def workload(self) -> dict[str, int]:
        """See `Batcher.workload`."""
        return {"n_waiting": len(self._waiting)}

    async def close(self) -> None:
        """See `Batcher.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for ticket in list(self._waiting):
            self.cancel(ticket)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while batch := self._next_batch():
            self._report(self._decode(batch))

    def _next_batch(self) -> list[_Waiting]:
        """The most urgent input and others with the same options; empty when the batcher is closed."""
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._changed.wait_for(lambda: self._closed, timeout=_GATHER)
                waiting = sorted(self._waiting.values(), key=lambda one: one.urgency)
                late = [one for one in waiting if one.deadline <= time.monotonic()]
                ready = [one for one in waiting if one not in late]
                alike = [one for one in ready if one.options == ready[0].options]
                rows = 1 if not alike else alike[0].options.beam
                batch = alike[: max(1, MAX_ROWS // rows)]
                for one in (*late, *batch):
                    del self._waiting[one.ticket]
                self._report([Event(one.ticket, "expired") for one in late])
                if batch:
                    return batch
        return []

    def _decode(self, batch: Sequence[_Waiting]) -> list[Event]:
        try:
            found = self._translate([one.input for one in batch], batch[0].options)
        except Exception as error:
            reason = str(error) or type(error).__name__
            return [Event(one.ticket, "failed", reason=reason) for one in batch]
        now = time.monotonic()
        return [
            Event(one.ticket, "expired") if one.deadline <= now else Event(one.ticket, "done", hypotheses)
            for one, hypotheses in zip(batch, found, strict=True)
        ]

    def _report(self, events: Sequence[Event]) -> None:
        """Deliver in the event loop."""
        if events:
            self._loop.call_soon_threadsafe(self._deliver_all, events)

    def _deliver_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self._deliver(event)
