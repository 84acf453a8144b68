"""HTTP clients that load a server and cost little beside it."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a closed connection is reset
HANG = 60.0  # seconds without an answer
LATE = 0.01  # seconds
IDLE = 5.0  # seconds after which a connection is not used again, as the server may be closing it


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    status: int
    head: bytes
    body: bytes

    def json(self) -> Any:
        """The body, which is JSON."""
        return json.loads(self.body)


class LostError(Exception):
    """The connection ended without an answer. `partial`: within one."""

    def __init__(self, *, partial: bool) -> None:
        super().__init__(f"the connection ended {'within' if partial else 'before'} the answer")
        self.partial = partial


class Connection:
    """A connection that is kept open between requests; opened again where the server closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def ask(self, data: bytes) -> Answer:
        """Send a request and read its answer. Raises `LostError`; `OSError`: it could not be sent."""
        await self.send(data)
        return await self.receive()

    async def send(self, data: bytes) -> None:
        """Send; opens the connection if necessary."""
        now = time.monotonic()
        if self._streams is not None and (self._streams[0].at_eof() or now - self._used > IDLE):
            self.close()
        self._used = now
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self.port)
        self._streams[1].write(data)

    async def receive(self) -> Answer:
        """The next answer."""
        assert self._streams is not None
        reader = self._streams[0]
        head, is_last = b"", True
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = head.lower()
            is_last = b"\r\nconnection: close" in fields
            if b"\r\ntransfer-encoding: chunked" in fields:  # server-sent events
                body = await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                body = await reader.readexactly(int(fields.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]))
            return Answer(int(head.split(b" ", 2)[1]), head, body)
        except asyncio.IncompleteReadError as error:
            raise LostError(partial=bool(head or error.partial)) from None
        except OSError:
            raise LostError(partial=bool(head)) from None
        finally:
            if is_last:
                self.close()

    def close(self, *, reset: bool = False) -> None:
        """Close the connection; `reset` as a client does that crashes."""
        if self._streams is None:
            return
        writer, self._streams = self._streams[1], None
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        else:
            writer.close()


@dataclass(slots=True)
class Outcome:
    """The result of a request. status: 0: no answer. sent, seconds: `time.monotonic`, and until the answer."""

    number: int
    status: int
    sent: float
    seconds: float
    body: bytes = b""
    partial: bool = False


class Load:
    """Clients that share one thread: raw sockets and epoll, so that they leave the cores to the server.

    `make` gives the bytes of a request by its number; `outcomes` has the outcome of each that was sent.
    """

    def __init__(self, port: int, make: Callable[[int], bytes]) -> None:
        self.outcomes: list[Outcome] = []
        self._port, self._make = port, make
        self._epoll = select.epoll()
        self._busy: dict[int, _Client] = {}  # by the number of its socket
        self._free: list[_Client] = []

    def clients(self, n_clients: int, numbers: Iterator[int]) -> None:
        """So many clients, each of which sends a request after the last answer, until the server stops listening."""
        self._free = [_Client(self._port) for _ in range(n_clients)]
        while True:
            while self._free and (number := next(numbers, None)) is not None:
                self._send(number, time.monotonic())
            if not self._busy:
                break
            self._receive(HANG)
        self._close()

    def at_rate(self, rate: float, seconds: float, *, most: int = 900, seed: int = 1) -> None:
        """Requests that arrive at random (Poisson), whatever becomes of those before.

        None is sent while `most` have no answer. The outcome's seconds are counted from the arrival. Arrivals that
        are 10 ms late, as these clients are too slow for the rate, are left out.
        """
        draw, number, due = random.Random(seed), 0, time.monotonic()
        end = due + seconds
        self._free = [_Client(self._port) for _ in range(most)]
        gc.disable()  # its pauses would count as the server's
        while due < end or self._busy:
            while (now := time.monotonic()) >= due and due < end:
                if self._free and now - due < LATE:
                    self._send(number, due)
                number, due = number + 1, due + draw.expovariate(rate)
            self._receive(min(due - now, HANG) if due < end else HANG)
        gc.enable()
        self._close()

    def _send(self, number: int, due: float) -> None:
        """Send a request by the client that was used last; a client that cannot connect is given up."""
        client = self._free.pop()
        try:
            place = client.send(self._make(number), self._epoll)
        except OSError:
            return
        client.outcome = Outcome(number, 0, due, 0.0)
        self._busy[place] = client

    def _receive(self, seconds: float) -> None:
        """Handle what has arrived; wait for it until the time is over. The precision of epoll's own limit is 1 ms."""
        if not select.select([self._epoll], [], [], max(seconds, 0.0))[0] and seconds == HANG:
            raise SystemExit(f"FAILED: {len(self._busy)} requests had no answer for {HANG:g} seconds")
        for place, _ in self._epoll.poll(0):
            client = self._busy.get(place)
            if client is None or not client.receive():
                continue
            client.outcome.seconds = time.monotonic() - client.outcome.sent
            self.outcomes.append(client.outcome)
            self._free.append(self._busy.pop(place))

    def _close(self) -> None:
        for client in self._free:
            client.close()


class _Client:
    """A connection that is kept open between requests; opened again where the server closed it."""

    def __init__(self, port: int) -> None:
        self.outcome = Outcome(0, 0, 0.0, 0.0)
        self._port, self._used = port, 0.0
        self._socket: socket.socket | None = None
        self._answer = b""

    def send(self, data: bytes, epoll: select.epoll) -> int:
        """Send a request; returns the number of the socket."""
        now = time.monotonic()
        if now - self._used > IDLE:
            self.close()
        self._used, self._answer = now, b""
        if self._socket is None:
            self._socket = socket.create_connection((HOST, self._port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            epoll.register(self._socket, select.EPOLLIN)
        with suppress(ConnectionError):  # it is noticed when the answer is read
            self._socket.sendall(data)
        return self._socket.fileno()

    def receive(self) -> bool:
        """Read what has arrived; True: the answer is complete, or the connection has ended."""
        assert self._socket is not None
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        fields = head.lower()
        if not data:
            self.outcome.partial = bool(self._answer)
        elif not end or len(body) < int(fields.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]):
            return False
        else:
            self.outcome.status, self.outcome.body = int(head[9:12]), body
        if not data or b"\r\nconnection: close" in fields:
            self.close()
        return True

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
