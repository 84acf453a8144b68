"""Clients that leave, signals and malformed requests: numbers 4 to 6 of serving.py."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import uvloop
from http_load import HANG, HOST, Connection, Load, LostError, Outcome
from memory import judge
from serving_setup import BEAMS, CLIENTS, TRANSLATE, Setup, check_answers, report, watch_memory

from malformed import malformed, mutated_stream
from servers import Server, request

_GROWTH = 32 << 20  # bytes of memory
_STREAMS = 16  # at a time
_PATIENCE = 0.05  # seconds without an answer after which a client leaves


@dataclass(slots=True)
class Mixed:
    """Clients that ask for 1 to 6 sentences with several beams; a fifth leave, and some send what is malformed."""

    setup: Setup
    count: Counter[str]
    n_done: int = 0

    async def client(self, port: int, numbers: Iterator[int]) -> None:
        connection = Connection(port)
        for number in numbers:
            draw = random.Random(f"mixed {number}")
            kind = draw.choices(("answered", "left", "malformed"), (75, 20, 5))[0]
            await asyncio.wait_for(getattr(self, f"_{kind}")(connection, number, draw), HANG)
            self.count[kind] += 1
            self.n_done += 1
        connection.close()

    def _request(self, draw: random.Random) -> tuple[bytes, list[str]]:
        beam = draw.choice(BEAMS)
        places = [draw.randrange(len(self.setup.lines)) for _ in range(min(draw.randrange(1, 7), draw.randrange(1, 7)))]
        body = {"text": [self.setup.lines[place] for place in places], "beam": beam, "split": False}
        return request(TRANSLATE, body), [self.setup.expected[beam][place] for place in places]

    async def _answered(self, connection: Connection, number: int, draw: random.Random) -> None:
        data, expected = self._request(draw)
        try:
            answer = await connection.ask(data)
        except LostError as error:
            raise SystemExit(f"FAILED: request {number}: {error}") from None
        if answer.status != 200:
            raise SystemExit(f"FAILED: request {number}: {answer.status} {answer.body[:300]!r}")
        found = [one["text"] for one in answer.json()["translations"]]
        if found != expected:
            raise SystemExit(f"FAILED: request {number}: {found} instead of {expected}")

    async def _left(self, connection: Connection, number: int, draw: random.Random) -> None:
        data, _ = self._request(draw)
        if draw.random() < 0.2:
            data = data[: draw.randrange(len(data))]
        await connection.send(data)
        await asyncio.sleep(draw.choice((0.0, 0.001, 0.01, 0.03)))
        connection.close(reset=draw.random() < 0.5)

    async def _malformed(self, connection: Connection, number: int, draw: random.Random) -> None:
        other = Connection(connection.port)
        answer = await other.ask(malformed(number))
        other.close()
        if not (200 <= answer.status < 500):
            raise SystemExit(f"FAILED: malformed request {number}: {answer.status} {answer.body[:300]!r}")


def mixed(setup: Setup) -> bool:
    """200,000 requests of mixed sizes with disconnects and malformed bodies: answers, memory, hangs."""
    n, state = setup.times(200_000, 500), Mixed(setup, Counter())

    async def run(port: int) -> None:
        numbers = iter(range(n))
        await asyncio.gather(*(state.client(port, numbers) for _ in range(CLIENTS)))
        await idle(port)

    room = "--max-requests=1000"  # the server may learn late that a client has left
    with setup.server(room) as server, watch_memory(server, lambda: state.n_done) as samples:
        began = time.monotonic()
        uvloop.run(run(server.port))
        seconds = time.monotonic() - began
    text = f"{n:,} requests in {seconds:,.0f} s: {dict(state.count)}; all answers are the offline translation's"
    if n < 20_000:
        return report("mixed", f"{text}; too few to judge memory ({samples[-1].resident >> 20} MiB)")
    row, flat = judge("mixed", samples)
    return report("mixed", f"{text}; memory {row}", good=flat)


async def idle(port: int) -> None:
    """Wait until the service says that nothing is pending, and that it still translates."""
    connection, end = Connection(port), time.monotonic() + HANG
    names = ("transduce_pending_requests", "transduce_pending_tokens", "transduce_open_sentences")
    while True:
        page = (await connection.ask(request("/metrics", method="GET"))).body.decode()
        values = [float(v) for name in names for v in re.findall(rf"^{name}\S* (\S+)$", page, re.MULTILINE)]
        if not any(values):
            break
        if time.monotonic() > end:
            raise SystemExit(f"FAILED: after the load, requests, tokens and sentences are pending: {values}")
        await asyncio.sleep(0.05)
    answer = await connection.ask(request(TRANSLATE, {"text": "1"}))
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"FAILED: after the load: {answer.status} {answer.body[:300]!r}")


def shutdown(setup: Setup) -> bool:
    """SIGTERM 50 times within the load of 16 clients: no request that was sent before it is lost."""
    n, total, lost = setup.times(50, 3), Counter[str](), 0
    for round_ in range(n):
        with setup.server() as server:
            outcomes, stopped, code = _terminated(setup, server, random.Random(round_).uniform(0.05, 0.5))
        check_answers(setup, outcomes, allowed=(0, 200, 503))
        lost += sum(o.partial or (o.status == 0 and o.sent < stopped) for o in outcomes) + (code != 0)
        total.update(str(o.status) for o in outcomes)
    text = f"{n} times; answers by status (0: sent later, and not read): {dict(total)}; lost: {lost}"
    return report("SIGTERM", text, good=not lost)


def _terminated(setup: Setup, server: Server, seconds: float) -> tuple[list[Outcome], float, int]:
    """The outcomes of clients, the time of the signal, and the exit code."""
    load, stopped = Load(server.port, setup.single), list[float]()

    def stop() -> None:
        stopped.append(time.monotonic())
        server.process.send_signal(signal.SIGTERM)

    threading.Timer(seconds, stop).start()
    load.clients(16, itertools.count())
    return load.outcomes, stopped[0], server.process.wait(40)


def restart(setup: Setup) -> bool:
    """kill -9 within load, and the time until a new server on the same port is ready."""
    seconds = []
    with setup.server() as first:
        port = first.port
        for _ in range(setup.times(10, 2)):
            threading.Timer(0.3, first.process.kill).start()
            Load(port, setup.single).clients(16, itertools.count())
            first.process.wait()
            began = time.monotonic()
            first = Server(f"en-de={setup.run}", *setup.serve, port=port)
            status, _ = first.request("/ready")
            seconds.append(time.monotonic() - began)
            assert status == 200
        first.stop()
    text = f"ready after {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s"
    return report("kill -9", text)


def malformed_requests(setup: Setup) -> bool:
    """10,000 malformed requests: always a 4xx with one line."""
    n, count = setup.times(10_000, 200), Counter[int]()

    async def client(port: int, numbers: Iterator[int]) -> None:
        for number in numbers:
            connection = Connection(port)
            answer = await asyncio.wait_for(connection.ask(malformed(number)), HANG)
            connection.close()
            count[answer.status] += 1
            if not (answer.status == 200 or (400 <= answer.status < 500 and b"\n" not in answer.body)):
                raise SystemExit(f"FAILED: malformed request {number}: {answer.status} {answer.body[:300]!r}")

    async def run(port: int) -> None:
        numbers = iter(range(n))
        await asyncio.gather(*(client(port, numbers) for _ in range(8)))
        await idle(port)

    with setup.server() as server:
        uvloop.run(run(server.port))
    return report("malformed", f"{n:,} requests: {dict(sorted(count.items()))} (200: the damage was harmless)")


def byte_streams(setup: Setup) -> bool:
    """100,000 damaged byte streams: each connection ends, no answer is a 5xx, and memory stays."""
    n, count, ended = setup.times(100_000, 300), Counter[int](), 0

    async def client(port: int, numbers: Iterator[int]) -> None:
        nonlocal ended
        for number in numbers:
            found = await asyncio.to_thread(_exchange, port, number)
            statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) [A-Z]", found)]
            count.update(statuses)
            ended += 1
            if any(status >= 500 for status in statuses):
                raise SystemExit(f"FAILED: byte stream {number}: {found[:300]!r}")

    async def run(port: int) -> None:
        numbers = iter(range(n))
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_STREAMS))
        await asyncio.gather(*(client(port, numbers) for _ in range(_STREAMS)))
        await idle(port)

    with setup.server() as server:
        uvloop.run(_detect(server.port))  # loads the language detector, 50 MB, which stays
        with watch_memory(server, lambda: ended) as samples:
            uvloop.run(run(server.port))
    start = next((one.resident for one in samples if one.done >= n // 100), samples[0].resident)
    growth = max(one.resident for one in samples) - start
    text = (
        f"{n:,} byte streams: {dict(sorted(count.items()))}; memory {start >> 20} MiB, at most {growth >> 20} MiB more"
    )
    return report("streams", text, good=growth <= _GROWTH)


async def _detect(port: int) -> None:
    connection = Connection(port)
    await connection.ask(request("/detect", {"q": "Two dogs run."}))
    connection.close()


def _exchange(port: int, number: int) -> bytes:
    """Everything that the server answers to a byte stream, to the end of the connection."""
    found = b""
    with socket.create_connection((HOST, port)) as connection, suppress(ConnectionError):
        connection.sendall(mutated_stream(number))
        if number % 2:  # else the client leaves at once
            with suppress(TimeoutError):
                connection.settimeout(_PATIENCE)
                while part := connection.recv(1 << 16):
                    found += part
        connection.settimeout(HANG)
        with suppress(OSError):  # the server has closed the connection
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            found += part
    return found
