"""Refusals of `transduce serve` under overload: what clients see, and that connections stay usable."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import marians
from http_load import request
from servers import Server

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
BODY = {"text": "two women"}
UNFINISHED = b"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = marians.make_run(tmp_path_factory.mktemp("runs") / "toy")
    server = Server(f"en-de={run}", "--max-requests=1", "--cors=https://example.org")
    yield server
    n_lines = len(server.log)
    with connect(server) as holder:
        holder.sendall(UNFINISHED)
        while server.request("/v1/translate", b"{}")[0] != 429:
            time.sleep(0.01)
        holder.sendall(b"12345")
    assert server.stop() == 0
    assert any('"status": 429' in line for line in server.log[n_lines:])  # of the last second too
    assert not any("Traceback" in line for line in server.log)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


@pytest.fixture
def full(server: Server) -> Iterator[socket.socket]:
    """The connection that has the only place."""
    with connect(server) as holder:
        holder.sendall(UNFINISHED)
        while server.request("/v1/translate", b"{}")[0] != 429:
            time.sleep(0.01)
        yield holder
        holder.sendall(b"12345")  # not JSON
        assert b" 400 " in holder.recv(4096)


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


def test_a_refused_request_leaves_its_connection_usable(server: Server, full: socket.socket) -> None:
    with connect(server) as connection:
        large = request("/translate", b" " * 300_000)
        chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n"
        for data in (request("/v1/translate", BODY), large, chunked, request("/v1/translate?a=b", BODY)):
            ((status, head),) = answers(connection, data, 1)
            assert status == 429 and b"retry-after: 1\r\n" in head and b"access-control-allow-origin: *" in head
        pipelined = request("/v1/translate", BODY) + request("/health", method="GET") + request("/v2/translate", BODY)
        assert [status for status, _ in answers(connection, pipelined, 3)] == [429, 200, 429]
        other = [request("/models/x", BODY), request("/v1/translate", method="GET"), request("/none", BODY)]
        assert [answers(connection, data, 1)[0][0] for data in other] == [429, 405, 404]
        expecting = b"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        assert answers(connection, expecting, 1)[0][0] == 429
        assert answers(connection, b"{}" + request("/health", method="GET"), 1)[0][0] == 200


def test_a_client_that_does_not_read_is_not_read_either(server: Server, full: socket.socket) -> None:
    with connect(server) as connection, pytest.raises(TimeoutError):
        connection.settimeout(2)
        for _ in range(1000):  # 100 MB
            connection.sendall(1000 * request("/v1/translate", BODY))


@pytest.mark.parametrize("data", [request("/translate", BODY, headers=["Connection: close"]),
                                  request("/translate", BODY).replace(b"HTTP/1.1", b"HTTP/1.0")])  # fmt: skip
def test_a_connection_that_is_not_kept_open_ends(server: Server, full: socket.socket, data: bytes) -> None:
    with connect(server) as connection:
        ((status, head),) = answers(connection, data, 1)
        assert status == 429 and b"connection: close" in head and connection.recv(1) == b""


def test_refusals_are_counted_and_logged_once_per_second(server: Server, full: socket.socket) -> None:
    def rejected() -> float:
        with urllib.request.urlopen(server.url + "/metrics", timeout=30) as page:
            found = re.search(r"^transduce_rejected_total (\S+)", page.read().decode(), re.MULTILINE)
            assert found is not None
            return float(found[1])

    before, n_lines = rejected(), len(server.log)
    with connect(server) as connection:
        for _ in range(50):
            answers(connection, request("/detect", {"q": "a"}), 1)
    assert rejected() - before == 50
    time.sleep(1.2)
    lines = [json.loads(line) for line in server.log[n_lines:]]
    lines = [line for line in lines if line["route"] == "POST /detect"]
    assert sum(line["requests"] for line in lines) == 50 and len(lines) <= 3 and lines[0]["status"] == 429


def test_clients_report_that_they_were_refused(
    server: Server, full: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepl
    import libretranslatepy
    import openai
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import _detect_agent

    monkeypatch.setattr(_detect_agent, "_registry", {})  # else it is fetched from the Hub for the User-Agent header
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)
    with pytest.raises(deepl.TooManyRequestsException):
        deepl.DeepLClient("no key", server_url=server.url).translate_text("a man", target_lang="DE")
    message: list[Any] = [{"role": "user", "content": "a man"}]
    with pytest.raises(openai.RateLimitError, match="try again later"):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        client.chat.completions.create(model="toy", messages=message)
    with pytest.raises(urllib.error.HTTPError, match="429"):
        libretranslatepy.LibreTranslateAPI(server.url + "/").translate("a man", "en", "de")
    with pytest.raises(HfHubHTTPError) as refused:
        InferenceClient(model=server.url).translation("a man")
    assert refused.value.response.status_code == 429
