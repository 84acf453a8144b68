"""The web pages of the folder `page`: they need nothing from elsewhere."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import Response

from transduce.serving.http import Call, Endpoint

_SHARED = ("style.css", "shared.js", "app.js", "files.js", "generate.js")
_FILES = {"/": "index.html", "/generate": "generate.html", **{f"/{name}": name for name in _SHARED}}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, with the ETag
}


async def page(call: Call) -> Response:
    """A file of the pages. A service without translators has only the one that continues texts."""
    name = _FILES[call.request.url.path]
    if name == "index.html" and not call.service.routes:
        name = "generate.html"
    return file_response(call, name, _read(name))


@cache
def _read(name: str) -> bytes:
    return files("transduce.serving").joinpath("page", name).read_bytes()


def file_response(call: Call, name: str, content: bytes) -> Response:
    """A file of a page; none of its content if the browser has it already."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}
    if call.header("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])


ENDPOINTS = tuple(Endpoint("GET", path, page, is_open=True) for path in _FILES)
