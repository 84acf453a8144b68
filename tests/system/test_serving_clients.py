"""Clients that do not send, do not read, or leave; in this process, as the command's limits are long."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse

from transduce.logging import Log
from transduce.serving.http import Call, Endpoint, Server
from transduce.serving.http_protocol import http_protocol
from transduce.serving.keys import NO_KEYS, ApiKeys, new_key
from transduce.serving.limits import Limits
from transduce.serving.metrics import Metrics
from transduce.serving.server import _Server, _watch
from transduce.serving.service import RunSpec, Service

pytestmark = [pytest.mark.loopback]
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UNFINISHED = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n123"
Connect = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving(app: Any, service: Service, *, seconds: float = 0.2) -> AsyncIterator[tuple[_Server, Connect]]:
    """A server with a time limit, and a function that connects and sends something. It ends at the signal."""
    protocol = http_protocol(lambda method, url: b"HTTP/1.1 429 Busy\r\n\r\n" if url == b"/busy" else None, seconds)
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical", port=0)
    server = _Server(config, service, Log())
    running = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port, writers = server.servers[0].sockets[0].getsockname()[1], list[asyncio.StreamWriter]()

    async def connect(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        writer.write(sent)
        return reader, writer

    yield server, connect
    server.handle_exit(signal.SIGTERM, None)
    await asyncio.wait_for(running, 10)
    for writer in writers:
        writer.close()


def make_service(**limits: Any) -> Service:
    return Service([RunSpec(Path("x"))], limits=Limits(**limits))


def make_app(service: Service, handler: Callable[[Call], Awaitable[Response]], keys: ApiKeys = NO_KEYS) -> Any:
    """An application with one endpoint; `metrics` has its numbers."""
    server = Server(service, keys, Metrics(service), log=False, log_text=False)
    endpoint = Endpoint("POST", "/", handler, body_key=lambda call: json.loads(call.body or b"{}").get("key"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await server.answer(endpoint, scope, receive, send)

    return app, server.metrics


async def endless(call: Call) -> Response:
    async def events() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 16)
            await asyncio.sleep(0)

    return StreamingResponse(events())


async def large(call: Call) -> Response:
    return Response(bytes(16 << 20), headers={"connection": "close"})


async def empty(call: Call) -> Response:
    return Response()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_client_that_asks_first_sends_no_large_body() -> None:
    async def main() -> None:
        service = make_service(max_body=100)
        async with serving(make_app(service, empty)[0], service, seconds=60) as (_, connect):
            for size in (100, 101):
                fields = f"Host: x\r\nExpect: 100-continue\r\nContent-Length: {size}\r\n\r\n"
                reader, writer = await connect(b"POST / HTTP/1.1\r\n" + fields.encode())
                status = await asyncio.wait_for(reader.readline(), 5)
                assert status.startswith(b"HTTP/1.1 100" if size == 100 else b"HTTP/1.1 413")
                writer.write(bytes(100))

    asyncio.run(main())


def test_a_problem_of_a_watched_run_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        service = Service([RunSpec(Path("/nowhere/x")), RunSpec(Path("/nowhere/y"))])
        service._runs = (object(), object())  # type: ignore[assignment]
        watching = asyncio.ensure_future(_watch(service, 0.01, Log()))
        await asyncio.sleep(0.3)
        watching.cancel()

    asyncio.run(main())
    log = capsys.readouterr().err
    assert log.count("stays in service") == 1 and "/nowhere/x" in log and "/nowhere/y" in log


@pytest.mark.parametrize("offered", ["h2c", "websocket"])
def test_offers_of_other_protocols_are_ignored(offered: str) -> None:
    async def echo(call: Call) -> Response:
        return Response(call.body, media_type="text/plain")

    fields = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {offered}\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{fields}".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nA dog\r\n0\r\n\r\n"
    whole = head + b"Content-Length: 5\r\n\r\nA cat"

    async def main() -> None:
        service = make_service()
        async with serving(make_app(service, echo)[0], service, seconds=60) as (_, connect):
            for packets in ([chunked + whole + GET], [whole[:-3], whole[-3:] + chunked], [whole[:90], whole[90:]]):
                reader, writer = await connect(b"")
                for packet in packets:
                    writer.write(packet)
                    await asyncio.sleep(0.02)
                sent = b"".join(packets)
                for body in sorted((x for x in (b"A dog", b"A cat") if x in sent), key=sent.index):
                    assert (await asyncio.wait_for(reader.readuntil(body), 5)).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


def test_headers_that_do_not_arrive_are_not_waited_for() -> None:
    async def main() -> None:
        service = make_service()
        async with serving(make_app(service, empty)[0], service) as (_, connect):
            refused = UNFINISHED.replace(b"/", b"/busy", 1)  # its body must arrive too
            for sent in (b"", GET[:-2] + b"X-Slow: ", GET + b"GET / HT", refused):
                reader, _ = await connect(sent)
                answer = await asyncio.wait_for(reader.read(), 5)  # to the end of the connection
                assert answer.startswith(b"HTTP/1.1 200") == sent.startswith(GET)

    asyncio.run(main())


@pytest.mark.parametrize("handler", [endless, large])
def test_a_client_that_does_not_read_loses_its_place_and_its_connection(handler: Any) -> None:
    async def main() -> None:
        service = make_service()
        app, metrics = make_app(service, handler)
        async with serving(app, service) as (server, connect):
            await connect(GET)
            await until(lambda: len(server.server_state.connections) == 1)
            await until(lambda: not server.server_state.connections)
            await until(lambda: not service.admission.n_requests)
        assert metrics.cancelled._value.get() == (handler is endless)  # the other response is on its way

    asyncio.run(main())


def test_a_stream_whose_client_leaves_is_counted_as_cancelled() -> None:
    async def main() -> None:
        service = make_service()
        app, metrics = make_app(service, endless)
        async with serving(app, service, seconds=60) as (_, connect):
            reader, writer = await connect(GET)
            await reader.read(1)
            writer.close()
            await until(lambda: not service.admission.n_requests)
        assert metrics.cancelled._value.get() == 1 and b'status="499"' in metrics.text()

    asyncio.run(main())


def test_a_shutdown_does_not_wait_for_a_client_that_does_not_read() -> None:
    async def main() -> None:
        service = make_service(drain_seconds=0.2)
        async with serving(make_app(service, endless)[0], service, seconds=60) as (server, connect):
            await connect(GET)
            await until(lambda: service.admission.n_requests == 1)
        assert not server.drained

    asyncio.run(main())


def test_bodies_that_may_have_a_key_are_bounded(tmp_path: Path) -> None:
    secret, line = new_key("alice")
    (tmp_path / "keys").write_text(line, encoding="utf-8")

    async def main() -> None:
        service = make_service(max_requests=1)
        app, _ = make_app(service, empty, ApiKeys.load(tmp_path / "keys"))
        async with serving(app, service, seconds=60) as (_, connect):
            _, writer = await connect(UNFINISHED)
            await asyncio.sleep(0.1)
            with_key = GET.replace(b"Host", b"X-API-Key: %s\r\nHost" % secret.encode())
            for sent, status in ((UNFINISHED, b"429"), (with_key, b"200")):
                reader, _ = await connect(sent)
                assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
            writer.write(b"45")

    asyncio.run(main())
