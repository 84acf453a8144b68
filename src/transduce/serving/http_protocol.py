"""uvicorn's HTTP protocol, with time limits, refusals under overload, and responses in one packet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from transduce.serving.http import BODY_HAS_ARRIVED, CLIENT_LEFT, ON_DISCONNECT


class _JoinedWrites:
    """A transport that sends at once what is written in one step of the event loop.

    uvicorn writes the head of a response and its body, each of which would be a packet that wakes the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """`seconds`: time in which the client must have read the rest when the connection is closed."""
        self._transport, self._loop, self._seconds = transport, loop, seconds
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(self._seconds, self._transport.abort)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():  # the client may have left in between
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(HttpToolsProtocol):
    _refusal: Callable[[bytes, bytes], bytes | None]
    _seconds: float
    _running: RequestResponseCycle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_offer = False

    def data_received(self, data: bytes) -> None:
        """Answer a request that offers another protocol as if it did not (RFC 9110, 7.8).

        The parser takes what follows the headers of such a request for the other protocol; a new one reads them again.
        """
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("Invalid HTTP request received.")
                return

    def _head_without_offer(self) -> bytes:
        fields = b"".join(b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, fields)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoinedWrites(transport, self.loop, self._seconds))  # type: ignore[arg-type]
        self._late = self.loop.call_later(self._seconds, self.transport.close)

    def on_message_begin(self) -> None:
        self._late.cancel()
        self._late = self.loop.call_later(self._seconds, self.transport.close)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_offer:
            return
        response, is_free = None, self.cycle is None or self.cycle.response_complete
        if is_free and not self.flow.write_paused:  # else responses wait for those before, or for the client
            response = self._refusal(self.parser.get_method(), self.url)
        self._is_refused = response is not None
        if response is None:
            self._late.cancel()
            super().on_headers_complete()
            return
        self._is_last = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
        if self._is_last:
            response = response.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        self.transport.write(response)

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:  # else it is dropped, if it arrives in time
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        if not self._is_refused:
            self.cycle.scope["state"][BODY_HAS_ARRIVED] = True
            super().on_message_complete()
            return
        self._late.cancel()
        self.on_response_complete()
        if self._is_last:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self._seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        if self._unread is not None:
            self._unread.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True  # uvicorn notifies the last of several pipelined requests only
            self._running.message_event.set()
            state = self._running.scope["state"]
            state[CLIENT_LEFT] = True
            if (leave := state.get(ON_DISCONNECT)) is not None:
                leave()
        super().connection_lost(exc)


def http_protocol(refusal: Callable[[bytes, bytes], bytes | None], seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which also refuses requests under overload and closes connections that make no progress.

    Args:
        refusal: From a request's method and URL, the response that refuses it; None: it is taken.
        seconds: Time in which headers must have arrived, and a client must have read what was sent.
    """
    return type("Protocol", (_Protocol,), {"_refusal": staticmethod(refusal), "_seconds": seconds})
