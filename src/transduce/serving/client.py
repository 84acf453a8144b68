"""Clients that leave before their response is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Message, Receive, Send

_WATCH_AFTER = 0.05  # seconds until a client that leaves is noticed; most responses are ready before


class Client:
    """The client of a request: notices when it leaves before the response is complete, and then cancels the work."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_complete = False
        self._left = asyncio.Event()

    @property
    def has_left(self) -> bool:
        """Whether the client left before the response was complete."""
        return self._left.is_set()

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True  # before it is sent: then the server reports the end of the request
        await self._send(message)

    async def receive(self) -> Message:
        """Wait until the client has left."""
        await self._left.wait()
        return {"type": "http.disconnect"}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the current task is cancelled when the client leaves."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        watching: asyncio.Task[None] | None = None

        def watch() -> None:
            nonlocal watching
            watching = loop.create_task(self._cancel_when_left(task))

        later = loop.call_later(_WATCH_AFTER, watch)
        try:
            yield
        finally:
            later.cancel()
            if watching is not None:
                watching.cancel()

    async def _cancel_when_left(self, work: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete:
            self._left.set()
            work.cancel()
