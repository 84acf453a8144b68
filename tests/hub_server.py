"""A local server with the part of the Hub's API that a download uses, and with faults that tests set."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
    forged: dict[str, bytes] = field(default_factory=dict)  # content that differs from the list of files
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> Hub:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
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

    def tree(self) -> list[dict[str, Any]]:
        """The API's list of files."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.iterdir()):
            content = path.read_bytes()
            entry: dict[str, Any] = {"type": "file", "path": path.name, "size": len(content), "oid": _sha1(content)}
            if path.name.endswith(LARGE):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            found.append(entry)
        return found


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


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
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append((self.command, path))
            model = f"api/models/{hub.name}"
            if hub.door:
                code = {401: "RepoNotFound", 403: "GatedRepo", 500: ""}[hub.door]
                self.head(hub.door, {"X-Error-Code": code} if code else {})
            elif path in (model, *(f"{model}/revision/{revision}" for revision in hub.revisions)):
                self.json({"id": hub.name, "sha": COMMIT})
            elif path == f"{model}/tree/{COMMIT}":
                self.json(hub.tree())
            elif path.startswith(f"{model}/revision/"):
                self.head(404, {"X-Error-Code": "RevisionNotFound"})
            elif path.startswith(f"{hub.name}/resolve/{COMMIT}/"):
                self.file(hub.folder / path.rpartition("/")[2])
            else:
                self.head(404, {"X-Error-Code": "RepoNotFound"})

        def json(self, content: Any) -> None:
            self.head(200, {"Content-Type": "application/json"}, json.dumps(content).encode())

        def file(self, path: Path) -> None:
            if not path.exists():
                return self.head(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            content = path.read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha1(content)}"'}
            if path.name.endswith(LARGE):
                headers["X-Linked-ETag"] = f'"{hashlib.sha256(content).hexdigest()}"'
                headers["X-Linked-Size"] = str(len(content))
            content = hub.forged.get(path.name, content)
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            rest = content[start:]
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            stop = hub.breaks.get(path.name)
            if self.command == "GET" and stop is not None and hub.times > 0:
                hub.times -= 1
                self.close_connection = True
                return self.head(206 if start else 200, {**headers, "Content-Length": str(len(rest))}, rest[:stop])
            return self.head(206 if start else 200, headers, rest)

        def head(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(code)
            for key, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
                self.wfile.flush()

    return Handler
