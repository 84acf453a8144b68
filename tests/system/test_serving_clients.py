"""Clients that do not send, do not read, or leave; in this process, as the command's limits are long."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response, StreamingResponse

from servers import serving
from transduce.logging import Log
from transduce.serving.access import NO_KEYS, ApiKeys, Limits, new_key
from transduce.serving.app import App
from transduce.serving.http import Call, Endpoint
from transduce.serving.server import _reload_when_asked
from transduce.serving.service import RunSpec, Service

pytestmark = [pytest.mark.loopback, pytest.mark.anyio]
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
UNFINISHED = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n123"


def make_service(**limits: Any) -> Service:
    return Service([RunSpec(Path("x"))], limits=Limits(**limits))


def make_app(service: Service, handler: Callable[[Call], Awaitable[Response]], keys: ApiKeys = NO_KEYS) -> App:
    """An application with one endpoint."""
    endpoint = Endpoint("POST", "/", handler, body_key=lambda call: json.loads(call.body or b"{}").get("key"))
    return App(service, [endpoint], keys=keys)


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


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the next response; 0: the connection ended without one."""
    line = await asyncio.wait_for(reader.readline(), 5)
    return int(line.split()[1]) if line else 0


def test_a_problem_of_a_watched_run_is_logged_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        service = Service([RunSpec(Path("/nowhere/x")), RunSpec(Path("/nowhere/y"))])
        service.runs = (object(), object())  # type: ignore[assignment]
        watching = asyncio.ensure_future(_reload_when_asked(service, asyncio.Event(), 0.01, Log()))
        await asyncio.sleep(0.3)
        watching.cancel()

    asyncio.run(main())
    log = capsys.readouterr().err
    assert log.count("stays in service") == 1 and "/nowhere/x" in log and "/nowhere/y" in log


@pytest.mark.parametrize(
    "start",
    [GET[:-2] + b"X: ", b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: "],
    ids=["headers", "trailers"],
)
async def test_headers_and_trailers_are_bounded(start: bytes) -> None:
    async with serving(make_app(make_service(), empty)) as (_, connect):
        reader, writer = await connect(start)
        n_sent, line = 0, b"a" * 1000 + b"\r\nX: "
        while n_sent < 1 << 27 and not reader.at_eof():  # 128 MiB
            try:
                writer.write(100 * line)
                await writer.drain()
            except ConnectionError:
                break
            n_sent += 100 * len(line)
        assert n_sent < 1 << 25  # what the buffers of both sockets contain


@pytest.mark.parametrize(
    "sent",
    [b"", GET[:-2] + b"X-Slow: ", POST + b"GET / HT", POST, POST + b"\r\n", UNFINISHED],
    ids=["nothing", "half a head", "half of a second head", "idle", "line end after the response", "half a body"],
)
async def test_connections_without_progress_are_closed(sent: bytes) -> None:
    service = make_service(body_seconds=0.3)
    async with serving(make_app(service, empty), seconds=0.3) as (_, connect):
        reader, _ = await connect(sent)
        answer = await asyncio.wait_for(reader.read(), 5)  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 200") == sent.startswith(POST)
        assert answer.startswith(b"HTTP/1.1 408") == (sent == UNFINISHED)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of the operating system")
@pytest.mark.parametrize("handler", [endless, large])
async def test_a_client_that_does_not_read_loses_its_place_and_its_connection(handler: Any) -> None:
    service = make_service()
    app = make_app(service, handler)
    async with serving(app, seconds=0.5) as (_, connect):
        reader, writer = await connect(POST)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: app.metrics.text().count(b'route="/",status="') > 0)  # it has ended
        assert not service.n_requests
        await asyncio.sleep(2)  # more than the time limit
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1 << 30), 5)
    assert (b'status="499"' in app.metrics.text()) == (handler is endless)  # the other response is on its way


async def test_a_stream_whose_client_leaves_is_counted_as_cancelled() -> None:
    service = make_service()
    app = make_app(service, endless)
    async with serving(app) as (_, connect):
        reader, writer = await connect(POST)
        await reader.read(1)
        writer.close()
        await until(lambda: not service.n_requests)
    assert b'transduce_requests_total{route="/",status="499"} 1.0' in app.metrics.text()


async def test_bodies_that_do_not_arrive_keep_nobody_out() -> None:
    async with serving(make_app(make_service(max_requests=1), empty)) as (_, connect):
        slow = [await connect(UNFINISHED) for _ in range(3)]
        assert await status_of((await connect(POST))[0]) == 200
        for reader, writer in slow:
            writer.write(b"45")
            assert await status_of(reader) == 200


async def test_a_body_without_a_valid_key_is_not_read(tmp_path: Path) -> None:
    secret, line = new_key("alice")
    (tmp_path / "keys").write_text(line, encoding="utf-8")
    app = make_app(make_service(), empty, ApiKeys(tmp_path / "keys"))
    async with serving(app) as (_, connect):
        reader, _ = await connect(UNFINISHED.replace(b"Host", b"X-API-Key: wrong\r\nHost"))
        assert await status_of(reader) == 401
        body = json.dumps({"key": secret}).encode()
        reader, _ = await connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        assert await status_of(reader) == 200
