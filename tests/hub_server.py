"""A local server with the part of the Hub's API that a download uses, and with faults that tests set."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".spm")


@dataclass
class Hub:
    """One model, `name`, with the files in `folder`. Faults are set while it runs."""

    folder: Path
    name: str = "some-one/a-model"
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    door: int = 0  # 401, 403 or 500: the answer to every request
    breaks: dict[str, int] = field(default_factory=dict)  # bytes of a file after which the connection is closed
    times: int = 1
    announced: dict[str, int] = field(default_factory=dict)  # wrong sizes in the list of files
    headed: dict[str, int] = field(default_factory=dict)
    forged: dict[str, bytes] = field(default_factory=dict)  # content that differs from the list of files
    endless: tuple[str, ...] = ()
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.elsewhere = self.endpoint.replace("127.0.0.1", "localhost")  # large files are on another host
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def downloaded(self) -> list[str]:
        """Names of the files whose content was asked for, in order."""
        return [
            path.rpartition("/")[2] for method, path in self.asked if method == "GET" and not path.startswith("api/")
        ]

    def siblings(self) -> list[dict[str, Any]]:
        """What the API lists."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.iterdir()):
            content = path.read_bytes()
            size = self.announced.get(path.name, len(content))
            entry: dict[str, Any] = {"rfilename": path.name, "size": size, "blobId": hashlib.sha1(content).hexdigest()}
            if path.name.endswith(LARGE):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            found.append(entry)
        return found


def _handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path).strip("/")
            hub.asked.append((self.command, path))
            if hub.door:
                code = {401: "RepoNotFound", 403: "GatedRepo", 500: ""}[hub.door]
                self.head(hub.door, {"X-Error-Code": code} if code else {})
            elif path.startswith("cdn/"):
                self.file(path.removeprefix("cdn/"))
            elif path in (f"api/models/{hub.name}", *(f"api/models/{hub.name}/revision/{r}" for r in hub.revisions)):
                assert parse_qs(parts.query).get("blobs")
                body = json.dumps({"id": hub.name, "sha": COMMIT, "siblings": hub.siblings()}).encode()
                self.head(200, {"Content-Type": "application/json"}, body)
            elif path.startswith(f"api/models/{hub.name}/revision/"):
                self.head(404, {"X-Error-Code": "RevisionNotFound"})
            elif path.startswith(f"{hub.name}/resolve/{COMMIT}/"):
                self.resolve(path.rpartition("/")[2])
            else:
                self.head(404, {"X-Error-Code": "RepoNotFound"})

        def resolve(self, name: str) -> None:
            """Small files are here, large ones elsewhere."""
            if not (hub.folder / name).exists():
                return self.head(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            content = (hub.folder / name).read_bytes()
            size = str(hub.headed.get(name, hub.announced.get(name, len(content))))
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            if name.endswith(LARGE):
                headers |= {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": size}
                return self.head(302, {**headers, "Location": f"{hub.elsewhere}/cdn/{name}"})
            if self.command == "HEAD":
                return self.head(200, {**headers, "Content-Length": size})
            return self.file(name)

        def file(self, name: str) -> None:
            content = hub.forged.get(name, (hub.folder / name).read_bytes())
            if name in hub.endless:
                self.head(200, {"Transfer-Encoding": "chunked"})
                try:
                    while True:
                        self.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                except OSError:
                    return None
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            rest, more = content[start:], {}
            if start:
                more = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            stop = hub.breaks.get(name)
            if stop is not None and hub.times > 0:
                hub.times -= 1
                self.head(206 if start else 200, {**more, "Content-Length": str(len(rest))}, rest[:stop], short=True)
                self.close_connection = True
                return None
            return self.head(206 if start else 200, more, rest)

        def head(self, code: int, headers: dict[str, str], body: bytes = b"", *, short: bool = False) -> None:
            self.send_response(code)
            if not {"Content-Length", "Transfer-Encoding"} & headers.keys():
                headers = {**headers, "Content-Length": str(len(body))}
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            if short:
                self.wfile.flush()

    return Handler
