"""Servers for tests: a process of `transduce serve`, and an HTTP server in the event loop of a test."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from transduce.serving.server import ServerOptions, find_address, make_server, start


def request(path: str, content: Any = None, *, method: str = "POST", headers: Sequence[str] = ()) -> bytes:
    """The bytes of a request. Content: bytes, or what becomes JSON."""
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    head = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


class Server:
    """A server process; `log` has the lines of its stderr. Leave with `stop`."""

    def __init__(self, *arguments: str | Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "transduce", "serve", *map(str, arguments), "--port", str(port)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        self.log: list[str] = []
        self.url, self.port = "", 0
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not (self._listening.wait(60) and self.url):
            self.process.kill()
            raise AssertionError("".join(self.log))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"listening on (https?://127.0.0.1:(\d+))", line):
                self.url, self.port = found[1], int(found[2])
                self._listening.set()
        self._listening.set()

    def wait_for_log(self, text: str) -> None:
        """Wait until a line of the log contains this."""
        deadline = time.monotonic() + 30
        while not any(text in line for line in self.log):
            assert time.monotonic() < deadline and self.process.poll() is None, "".join(self.log)
            time.sleep(0.001)

    def request(self, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of a response. Content: bytes, or what becomes JSON."""
        data = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End the server; returns its exit code."""
        self.process.send_signal(number)
        code = self.process.wait(40)
        self._reader.join()
        return code


Connect = Callable[[bytes], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving(app: Any, *, seconds: float = 60) -> AsyncIterator[tuple[int, Connect]]:
    """An HTTP server in this event loop: its port, and a function that connects and sends something."""
    address = find_address("127.0.0.1", 0)
    server = make_server(app, address, seconds, ServerOptions())
    running = await start(server, address, seconds)
    writers = list[asyncio.StreamWriter]()

    async def connect(sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address)
        writers.append(writer)
        writer.write(sent)
        return reader, writer

    yield address[1], connect
    for writer in writers:
        writer.close()
    server.stop()
    await asyncio.wait_for(running, 10)
