"""HTTP clients that load a server: raw sockets of asyncio, so that a client costs little beside the server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a closed connection is reset
IDLE = 5.0  # seconds after which a connection is not used again, as the server may be closing it


def request(path: str, content: Any = None, *, method: str = "POST", headers: Sequence[str] = ()) -> bytes:
    """The bytes of a request. Content: bytes, or what becomes JSON."""
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


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
    """What became of a request. status: 0: no answer. sent, seconds: `time.monotonic`, and until the answer."""

    number: int
    status: int
    sent: float
    seconds: float
    body: bytes = b""
    partial: bool = False


@dataclass(slots=True)
class Load:
    """What clients send, and what came of it; `make` gives the bytes of a request by its number."""

    port: int
    make: Callable[[int], bytes]
    outcomes: list[Outcome] = field(default_factory=list)
    is_stopped: bool = False

    async def clients(self, n_clients: int, numbers: Iterator[int]) -> None:
        """So many clients, each of which sends a request when the last was answered."""
        await asyncio.gather(*(self._client(numbers) for _ in range(n_clients)))

    async def _client(self, numbers: Iterator[int]) -> None:
        connection = Connection(self.port)
        for number in numbers:
            if self.is_stopped or not await self._ask(connection, number, time.monotonic()):
                break
        connection.close()

    async def at_rate(self, rate: float, seconds: float, *, most: int = 900, seed: int = 1) -> None:
        """Requests that arrive at random (Poisson), whatever becomes of those before.

        None is sent while `most` have no answer. The outcome's seconds are counted from the arrival. A client that is
        too slow for the rate sends fewer: no arrival is earlier than 10 ms ago.
        """
        draw, number, due = random.Random(seed), 0, time.monotonic()
        end, free, running = due + seconds, list[Connection](), set[asyncio.Task[None]]()

        async def ask(number: int, due: float) -> None:
            connection = free.pop() if free else Connection(self.port)
            await self._ask(connection, number, due)
            free.append(connection)

        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic() - 0.01)
            if len(running) < most:
                task = asyncio.create_task(ask(number, due))
                running.add(task)
                task.add_done_callback(running.discard)
            number, due = number + 1, due + draw.expovariate(rate)
        await asyncio.gather(*running)
        for connection in free:
            connection.close()

    async def _ask(self, connection: Connection, number: int, due: float) -> bool:
        """Send a request and keep the outcome; False: the server does not listen."""
        try:
            await connection.send(self.make(number))
        except OSError:
            return False
        outcome = Outcome(number, 0, time.monotonic(), 0.0)
        try:
            answer = await connection.receive()
            outcome.status, outcome.body = answer.status, answer.body
        except LostError as error:
            outcome.partial = error.partial
        outcome.seconds = time.monotonic() - due
        self.outcomes.append(outcome)
        return True


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
