"""Refusals under overload: what clients see, and that connections stay usable."""

import asyncio
import json
import re
import socket
import threading
import urllib.error
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from servers import request, serving
from transduce.serving.access import Limits
from transduce.serving.app import make_app
from transduce.serving.inspection_page import InspectionPage
from transduce.serving.service import RunSpec, Service

pytestmark = pytest.mark.loopback
BODY = {"text": "two women"}


def with_service(toy: Path, check: Callable[[int], None], *, is_full: bool) -> None:
    """Call `check` with the port of a service whose only place is taken, or free, and require that it works then."""

    async def main() -> None:
        service = Service([RunSpec(toy, "en", "de")], limits=Limits(max_requests=1))
        await service.start()
        try:
            async with serving(make_app(service, cors=("https://example.org",))) as (port, _):
                with service.request() if is_full else nullcontext():
                    await asyncio.to_thread(check, port)
                await asyncio.to_thread(_check_that_it_translates, port)
        finally:
            await service.close()

    asyncio.run(main())


def _check_that_it_translates(port: int) -> None:
    with connect(port) as connection:
        assert answers(connection, request("/v1/translate", BODY), 1)[0][0] == 200


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def answers(connection: socket.socket, data: bytes, n: int) -> list[tuple[int, bytes]]:
    """Status and head of n answers to data; the bodies must have the announced size."""
    connection.sendall(data)
    file, found = connection.makefile("rb"), []
    for _ in range(n):
        head = b"".join(iter(file.readline, b"\r\n"))
        size = re.search(rb"content-length: (\d+)", head)
        assert size is not None and json.loads(file.read(int(size[1])))
        found.append((int(head.split()[1]), head))
    return found


def test_a_refused_request_leaves_its_connection_usable(toy: Path) -> None:
    def check(port: int) -> None:
        with connect(port) as connection:
            large = request("/translate", b" " * 300_000)
            chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
            origin = request("/v1/translate", BODY, headers=["Origin: https://example.org"])
            for data in (request("/v1/translate", BODY), large, chunked, request("/v1/translate?a=b", BODY), origin):
                ((status, head),) = answers(connection, data, 1)
                assert status == 429 and b"retry-after: 1\r\n" in head
            assert b"access-control-allow-origin: https://example.org\r\n" in head
            health = request("/health", method="GET")
            pipelined = request("/v1/translate", BODY) + health + request("/v2/translate", BODY)
            assert [status for status, _ in answers(connection, pipelined, 3)] == [429, 200, 429]
            other = [request("/models/x", BODY), request("/v1/translate", method="GET"), request("/none", BODY)]
            assert [answers(connection, data, 1)[0][0] for data in other] == [429, 405, 404]

    with_service(toy, check, is_full=True)


def test_clients_report_that_they_were_refused(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepl
    import libretranslatepy
    import openai
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", {})  # else it is fetched from the Hub for the User-Agent header
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)

    def check(port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        with pytest.raises(deepl.TooManyRequestsException):
            deepl.DeepLClient("no key", server_url=url).translate_text("a man", target_lang="DE")
        message: list[Any] = [{"role": "user", "content": "a man"}]
        with pytest.raises(openai.RateLimitError, match="try again later"):
            client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            client.chat.completions.create(model="toy", messages=message)
        with pytest.raises(urllib.error.HTTPError, match="429"):
            libretranslatepy.LibreTranslateAPI(url + "/").translate("a man", "en", "de")
        with pytest.raises(HfHubHTTPError) as refused:
            InferenceClient(model=url).translation("a man")
        assert refused.value.response.status_code == 429

    with_service(toy, check, is_full=True)


def test_inspections_leave_places_for_translations(toy: Path) -> None:
    async def main() -> None:
        service, go = Service([RunSpec(toy, "en", "de")], limits=Limits(max_requests=20, seconds=60)), threading.Event()
        await service.start()
        page = InspectionPage({"toy": toy})
        page._worker.submit(go.wait)  # inspections take long
        try:
            async with serving(make_app(service, inspection=page)) as (port, connect_to):
                look = request("/inspect/look", {"run": "toy", "text": "two women"})
                opened = [await connect_to(look) for _ in range(40)]
                answered = [asyncio.ensure_future(reader.readline()) for reader, _ in opened]
                while sum(task.done() for task in answered) < 8:
                    await asyncio.sleep(0.01)
                assert {task.result() for task in answered if task.done()} == {b"HTTP/1.1 429 Too Many Requests\r\n"}
                await asyncio.to_thread(_check_that_it_translates, port)
                go.set()
                lines = Counter(await asyncio.gather(*answered))
                assert lines[b"HTTP/1.1 200 OK\r\n"] == 32
        finally:
            go.set()
            page.close()
            await service.close()

    asyncio.run(main())
