"""Refusals under overload: what clients see, and that connections stay usable."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from http_load import request
from servers import serving
from transduce.serving.access_log import AccessLog
from transduce.serving.app import make_app
from transduce.serving.limits import Limits
from transduce.serving.routes import RunSpec
from transduce.serving.service import Service

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
BODY = {"text": "two women"}


def with_service(toy: Path, check: Callable[[int], None], *, is_full: bool, log: AccessLog | None = None) -> None:
    """Call `check` with the port of a service whose only place is taken, or free, and require that it works then."""

    async def main() -> None:
        service = Service([RunSpec(toy, "en", "de")], limits=Limits(max_requests=1))
        await service.start()
        try:
            async with serving(make_app(service, cors=("https://example.org",), log=log)) as (port, _):
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


def test_refusals_are_logged_once_per_second(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(port: int) -> None:
        with connect(port) as connection:
            for _ in range(50):
                answers(connection, request("/detect", {"q": "a"}), 1)

    log = AccessLog(with_texts=False)
    with_service(toy, check, is_full=True, log=log)
    log.flush()
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    lines = [line for line in lines if line["route"] == "POST /detect"]
    assert sum(line["requests"] for line in lines) == 50 and len(lines) < 10 and lines[0]["status"] == 429


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


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (["Origin: https://evil.example"], 403),
        (["Origin: null"], 403),
        (["Origin: http://x"], 403),  # with the same Host
        (["Origin: https://example.org"], 201),
        ([], 201),
    ],
)
def test_foreign_pages_change_nothing(toy: Path, headers: list[str], status: int) -> None:
    glossary = {"name": "x", "source_lang": "en", "target_lang": "de", "entries_format": "tsv", "entries": "a\tb"}

    def check(port: int) -> None:
        with connect(port) as connection:
            data = request("/v2/glossaries", glossary, headers=headers)
            assert answers(connection, data, 1)[0][0] == status
        with connect(port) as connection:  # a page may send this without asking first
            assert answers(connection, data.replace(b"application/json", b"text/plain"), 1)[0][0] in (403, 415)
        with connect(port) as connection:
            connection.sendall(request("/v2/glossaries", method="GET"))
            assert connection.recv(4096).count(b"glossary_id") == (status == 201)

    with_service(toy, check, is_full=False)
