"""Work in an event loop: in parts, with a deadline, or in another thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from transduce.decoding.queue import BURST, EXPIRED, ExpiredError

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


async def in_parts(
    work: Callable[[Callable[[PartT], object]], Awaitable[ResultT]],
) -> AsyncGenerator[PartT | ResultT]:
    """Yield the values that `work` passes to its function, as they come, then its result. Leaving it cancels `work`."""
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


def remaining(end: float) -> float:
    """Seconds until `end`, a time of the event loop."""
    return max(end - asyncio.get_running_loop().time(), 0.0)


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
