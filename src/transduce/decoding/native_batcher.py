"""Continuous batching by the native library for a `DecodingQueue`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from transduce.config.decoding import DecodingOptions
from transduce.decoding.engine import Batcher, DecodingInput, Deliver
from transduce.decoding.native_decoder import NativeCaller, NativeDecoder, native_options


class NativeBatcher:
    """Admits inputs at every decoding step. The library wakes the event loop, without a thread between them."""

    def __init__(
        self,
        decoder: NativeDecoder,
        deliver: Deliver,
        *,
        takes: Callable[[DecodingInput, DecodingOptions], bool],
        other: Batcher,
    ) -> None:
        """`takes`: whether the library can decode an input. `other`: takes calls with inputs that it cannot decode."""
        self._decoder, self._deliver, self._takes, self._other = decoder, deliver, takes, other
        self._native_options = lru_cache(native_options)
        decoder.start_threads()
        self._caller = NativeCaller(decoder)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._caller.fileno(), self._read)

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
        if not all(self._takes(one, options) for one in inputs):
            self._other.submit(first_ticket, inputs, options, deadline=deadline, stream=stream)
            return
        self._caller.submit(
            inputs,
            self._native_options(options, stream=stream),
            first_ticket=first_ticket,
            seconds=deadline - time.monotonic(),
            seed=options.seed,
        )

    def cancel(self, ticket: int) -> None:
        """See `Batcher.cancel`."""
        self._caller.cancel(ticket)
        self._other.cancel(ticket)

    def workload(self) -> dict[str, int]:
        """See `Batcher.workload`."""
        total = Counter(self._decoder.workload())
        total.update(self._other.workload())
        return dict(total)

    async def close(self) -> None:
        """See `Batcher.close`."""
        self._caller.close()
        self._loop.remove_reader(self._caller.fileno())
        self._read()
        await self._other.close()

    def _read(self) -> None:
        for event in self._caller.collect(0):
            self._deliver(event)
