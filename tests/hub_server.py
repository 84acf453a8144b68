"""A local server with the part of the Hub's API that downloads and uploads use, and with faults that tests set."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".bin", ".spm")


@dataclass
class Hub:
    """One model, `name`, with the files in `folder`. Faults are set while it runs.

    `created`: requests to create a model. `invalid`: the answer to its metadata, if that is refused.
    """

    folder: Path
    name: str = "some-one/a-model"
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    door: int = 0  # 401, 403 or 500: the answer to every request
    breaks: dict[str, int] = field(default_factory=dict)  # bytes of a file after which the connection is closed
    times: int = 1
    forged: dict[str, bytes] = field(default_factory=dict)  # content that differs from the list of files
    asked: list[tuple[str, str]] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    invalid: str = ""
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded content by its sha256

    def __enter__(self) -> Self:
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

        def do_POST(self) -> None:
            path, body = self.read()
            owner, _, name = hub.name.partition("/")
            if hub.door:
                self.head(hub.door, {"X-Error-Code": "RepoNotFound"} if hub.door == 401 else {})
            elif path == "api/repos/create":
                hub.created.append(json.loads(body))
                known = (hub.created[-1]["organization"], hub.created[-1]["name"]) == (owner, name)
                self.json({"url": f"{hub.endpoint}/{hub.name}"}) if known else self.head(403, {})
            elif path == "api/validate-yaml":
                self.json({"errors": [{"message": hub.invalid}]} if hub.invalid else {}, 400 if hub.invalid else 200)
            elif path == f"api/models/{hub.name}/preupload/main":
                modes = {True: "lfs", False: "regular"}
                files = [file["path"] for file in json.loads(body)["files"]]
                answers = [{"path": f, "uploadMode": modes[f.endswith(LARGE)], "shouldIgnore": False} for f in files]
                self.json({"files": answers})
            elif path == f"{hub.name}.git/info/lfs/objects/batch":
                objects = json.loads(body)["objects"]
                for each in objects:
                    each["actions"] = {"upload": {"href": f"{hub.endpoint}/large/{each['oid']}"}}
                self.json({"transfer": "basic", "objects": objects})
            elif path == f"api/models/{hub.name}/commit/main":
                self.commit([json.loads(line) for line in body.splitlines()])
            else:
                self.head(404, {"X-Error-Code": "RepoNotFound"})

        def do_PUT(self) -> None:
            path, body = self.read()
            hub.large[path.removeprefix("large/")] = body
            self.head(200, {})

        def read(self) -> tuple[str, bytes]:
            path = unquote(urlsplit(self.path).path).strip("/")
            hub.asked.append((self.command, path))
            if self.headers.get("Transfer-Encoding") != "chunked":
                return path, self.rfile.read(int(self.headers["Content-Length"]))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return path, b"".join(parts)

        def commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    (hub.folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
                elif line["key"] == "lfsFile":
                    content = hub.large[value["oid"]]
                    assert (hashlib.sha256(content).hexdigest(), len(content)) == (value["oid"], value["size"])
                    (hub.folder / value["path"]).write_bytes(content)
            self.json({"commitUrl": f"{hub.endpoint}/{hub.name}/commit/{COMMIT}", "commitOid": COMMIT})

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

        def json(self, content: Any, code: int = 200) -> None:
            self.head(code, {"Content-Type": "application/json"}, json.dumps(content).encode())

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


@contextmanager
def serving(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the folder to huggingface_hub, with an empty cache and without pauses between two attempts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet is another protocol than HTTP
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with Hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub
