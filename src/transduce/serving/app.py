"""The web application: all protocols, the pages, health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transduce.decoding.queue import CALLER, ExpiredError, expiring
from transduce.inspection.page import PAGE as THEME
from transduce.inspection.page import THEME_FILES
from transduce.logging import escape
from transduce.serving.http import (
    PAGE,
    SENDING,
    Call,
    Endpoint,
    describe_error,
    file_response,
    header_key,
    json_response,
    read_body,
)
from transduce.serving.interface import interface_endpoints
from transduce.serving.keys import NO_KEYS, ApiKeys
from transduce.serving.metrics import Metrics
from transduce.serving.protocols import deepl, huggingface, libretranslate, openai, own
from transduce.serving.service import Service

if TYPE_CHECKING:
    from transduce.serving.inspection_page import InspectionPage

_PROTOCOLS = (own, libretranslate, deepl, huggingface, openai)
_PAGE_FILES = {
    "/": PAGE / "index.html",
    "/generate": PAGE / "generate.html",
    **{f"/{name}": PAGE / name for name in ("style.css", "shared.js", "app.js", "files.js", "generate.js")},
    **{f"/{name}": THEME / name for name in THEME_FILES},
}
_STATUS_LEFT = 499  # nginx's status for a client that left; it appears in the log only
_WATCH_AFTER = 0.05  # seconds until a disconnected client is noticed; most responses are ready earlier


def make_app(
    service: Service,
    *,
    keys: ApiKeys = NO_KEYS,
    cors: tuple[str, ...] = (),
    log: Callable[..., None] | None = None,
    inspection: InspectionPage | None = None,
) -> ASGIApp:
    """The application for a service.

    `cors`: origins whose pages may use it from a browser. `log`: called with each response, see
    `log_request`. `inspection`: the page for inspecting runs.
    """

    async def health(call: Call) -> Response:
        """Report that the process answers."""
        return json_response({"status": "ok"})

    async def ready(call: Call) -> Response:
        """Report whether new requests are accepted: 503 while the service shuts down."""
        return json_response({"ready": not service.is_draining}, status=503 if service.is_draining else 200)

    async def numbers(call: Call) -> Response:
        """Report metrics in Prometheus' format."""
        return Response(app.metrics.text(), media_type="text/plain; version=0.0.4")

    endpoints = [endpoint for protocol in _PROTOCOLS for endpoint in protocol.ENDPOINTS]
    for path, handler in (("/health", health), ("/ready", ready), ("/metrics", numbers)):
        endpoints.append(Endpoint("GET", path, handler, is_open=True))
    endpoints += interface_endpoints(tuple(endpoints), needs_key=keys.are_needed)
    endpoints += [Endpoint("GET", path, _page, is_open=True) for path in _PAGE_FILES]
    without_inspection = (Endpoint("GET", "/inspect/models", _no_models, is_open=True),)  # the page asks for its models
    endpoints += without_inspection if inspection is None else inspection.endpoints()
    app = App(service, endpoints, keys=keys, log=log)
    return CORSMiddleware(app, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]) if cors else app


async def _no_models(call: Call) -> Response:
    return json_response([])


async def _page(call: Call) -> Response:
    """A file of the pages.

    A service without translators has only the page for text generation; without any runs, only the inspection page.
    """
    path = call.request.url.path
    if path == "/" and not call.service.runs:
        return RedirectResponse("/inspect/")
    return file_response(_PAGE_FILES["/generate" if path == "/" and not call.service.routes else path])


class App:
    """Answers requests: finds the endpoint, reads the body, runs the handler, and counts and logs the response.

    The table of endpoints takes a tenth of the time of Starlette's router.
    """

    def __init__(
        self,
        service: Service,
        endpoints: Sequence[Endpoint],
        *,
        keys: ApiKeys = NO_KEYS,
        log: Callable[..., None] | None = None,
    ) -> None:
        self.metrics = Metrics(service)
        self._service, self._keys, self._log = service, keys, log
        self._exact = {(endpoint.method, endpoint.path): endpoint for endpoint in endpoints if "{" not in endpoint.path}
        self._patterns = [(endpoint, compile_path(endpoint.path)[0]) for endpoint in endpoints if "{" in endpoint.path]
        self._unknown = Endpoint("", "unknown", self._refuse, is_open=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to a request. A streamed response counts as running until its end."""
        if scope["type"] != "http":
            return
        start, endpoint, client = time.perf_counter(), self._find(scope), _Client(receive, send)
        call = Call(self._service, Request(scope, receive), needs_key=self._keys.are_needed)
        call.n_translated = self.metrics.n_characters
        try:
            if endpoint.is_open:
                await self._respond(endpoint, call, client)
            else:
                await self._authorize_and_read(endpoint, call)
                CALLER.set(call.key or scope["client"][0])
                call.end = call.deadline()
                admit = endpoint.admit or self._service.request
                with admit():  # not before the body has arrived: a client that sends it slowly must not block others
                    await self._respond(endpoint, call, client)
        except asyncio.CancelledError:
            if not client.has_left.is_set():  # the service ends
                call.status = 503
                raise
            call.status = _STATUS_LEFT
        except Exception as error:
            response = _error_response(endpoint, error)
            call.status = response.status_code
            await response(scope, client.receive, client.send)
        finally:
            self._finish(endpoint, call, time.perf_counter() - start)

    def _find(self, scope: Scope) -> Endpoint:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        if (exact := self._exact.get((method, scope["path"]))) is not None:
            return exact
        for endpoint, pattern in self._patterns:
            if method == endpoint.method and (match := pattern.match(scope["path"])):
                scope["path_params"] = match.groupdict()
                return endpoint
        return self._unknown

    async def _refuse(self, call: Call) -> Response:
        scope = call.request.scope
        methods = {method for method, path in self._exact if path == scope["path"]}
        methods |= {endpoint.method for endpoint, pattern in self._patterns if pattern.match(scope["path"])}
        given = f"{scope['method'][:20]} {scope['path'][:200]}"
        allow = ", ".join(sorted(methods))
        message = f"{given}: use {allow}" if methods else f"{given}: not found"
        answer = {"error": message, "message": message}  # DeepL's clients show the second field
        headers = {"allow": allow} if methods else {}
        return json_response(answer, status=405 if methods else 404, headers=headers)

    async def _authorize_and_read(self, endpoint: Endpoint, call: Call) -> None:
        """Check the API key, and read the body, which contains the key in some protocols."""
        key = header_key(call)
        is_inside = self._keys.are_needed and key is None and endpoint.body_key is not None
        if not is_inside:
            call.key = self._keys.check(key)
        call.body = await read_body(call)
        if is_inside and endpoint.body_key is not None:
            call.key = self._keys.check(endpoint.body_key(call))

    async def _respond(self, endpoint: Endpoint, call: Call, client: _Client) -> None:
        with client.watched():
            response = await endpoint.handler(call)
            call.status = response.status_code
            with suppress(ExpiredError):  # raised for a client that does not read; its connection is closed
                async with expiring(call.end + 2 * SENDING):
                    await response(call.request.scope, client.receive, client.send)

    def _finish(self, endpoint: Endpoint, call: Call, seconds: float) -> None:
        self.metrics.count(endpoint.path, call.status, seconds, call.n_characters)
        if self._log is not None and not endpoint.is_open:
            route = f"{endpoint.method} {endpoint.path}"
            self._log(route, call.status, seconds, call.n_characters, call.key, call.texts)


def log_request(
    route: str, status: int, seconds: float, n_characters: int, key: str, texts: Sequence[str], *, with_texts: bool
) -> None:
    """Print a line of JSON for a response. `key`: the name of the client's API key, if it has one."""
    line = {"time": round(time.time(), 3), "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    line |= {"characters": n_characters} | ({"key": key} if key else {}) | ({"texts": texts} if with_texts else {})
    with suppress(OSError):  # the reader has closed the pipe
        # written in one piece, because other threads write too
        sys.stderr.write(escape(json.dumps(line, ensure_ascii=False)) + "\n")


def _error_response(endpoint: Endpoint, error: Exception) -> Response:
    """The response that reports an error to a protocol's clients."""
    status, message = describe_error(error)
    status = endpoint.unauthorized if status == 401 else status
    headers = {"connection": "close"} if status in (408, 413, 503) else {}
    if status == 429:
        headers["retry-after"] = str(math.ceil(getattr(error, "retry_after", 1)))
    return json_response(endpoint.error(status, message), status=status, headers=headers)


class _Client:
    """The client of a request: notices when it leaves before the response is complete, and then cancels the work."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_complete = False
        self.has_left = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True  # set before sending, after which the server reports the end of the request
        await self._send(message)

    async def receive(self) -> Message:
        """Wait until the client has left."""
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which the current task is cancelled when the client disconnects."""
        work, watching = asyncio.current_task(), set[asyncio.Task[None]]()
        loop = asyncio.get_running_loop()
        # A task for each request would take a tenth of the time of handling HTTP.
        later = loop.call_later(_WATCH_AFTER, lambda: watching.add(loop.create_task(self._watch(work))))
        try:
            yield
        finally:
            later.cancel()
            for task in watching:
                task.cancel()

    async def _watch(self, work: asyncio.Task[Any] | None) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_complete and work is not None:
            self.has_left.set()
            work.cancel()
