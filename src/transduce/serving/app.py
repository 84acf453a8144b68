"""The web application: all protocols, the pages, health and metrics, as one ASGI application."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transduce.serving.access_log import AccessLog
from transduce.serving.http import Call, Endpoint, RequestError, describe_error, header_key, json_response, read_body
from transduce.serving.inspection_page import InspectionPage
from transduce.serving.keys import NO_KEYS, ApiKeys
from transduce.serving.metrics import Metrics
from transduce.serving.protocols import deepl, huggingface, libretranslate, openai, own
from transduce.serving.service import Service
from transduce.serving.web_page import ENDPOINTS as PAGE

_PROTOCOLS = (own, libretranslate, deepl, huggingface, openai)
_ENDPOINTS = tuple(endpoint for protocol in (PAGE, *(one.ENDPOINTS for one in _PROTOCOLS)) for endpoint in protocol)
_CHANGE_TYPES = "application/json", "application/x-www-form-urlencoded", ""
_STATUS_LEFT = 499  # nginx's status for a client that left; it appears in the log only
_WATCH_AFTER = 0.05  # seconds until a client that leaves is noticed; most responses are ready before


def make_app(
    service: Service,
    *,
    keys: ApiKeys = NO_KEYS,
    cors: tuple[str, ...] = (),
    log: AccessLog | None = None,
    inspection: InspectionPage | None = None,
) -> ASGIApp:
    """The application for a service.

    Args:
        service: What translates.
        keys: Who may use it.
        cors: Origins whose pages may use it from a browser.
        log: Has a line per request.
        inspection: The page that shows the inside of runs.
    """

    async def health(call: Call) -> Response:
        return json_response({"status": "ok"})

    async def ready(call: Call) -> Response:
        return json_response({"ready": not service.is_draining}, status=503 if service.is_draining else 200)

    async def numbers(call: Call) -> Response:
        return Response(app.metrics.text(), media_type="text/plain; version=0.0.4")

    state = (
        Endpoint("GET", "/health", health, is_open=True),
        Endpoint("GET", "/ready", ready, is_open=True),
        Endpoint("GET", "/metrics", numbers, is_open=True),
    )
    more = () if inspection is None else inspection.endpoints()
    app = App(service, (*_ENDPOINTS, *state, *more), keys=keys, cors=cors, log=log)
    return CORSMiddleware(app, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]) if cors else app


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
        cors: Sequence[str] = (),
        log: AccessLog | None = None,
    ) -> None:
        self.metrics = Metrics(service)
        self._service, self._keys, self._cors, self._log = service, keys, {*cors}, log
        self._exact = {(one.method, one.path): one for one in endpoints if "{" not in one.path}
        self._patterns = [(one, compile_path(one.path)[0]) for one in endpoints if "{" in one.path]
        self._unknown = Endpoint("", "unknown", self._refuse, is_open=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to a request. A streamed one counts as running until its end."""
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
                with self._service.request():  # now: a request whose body is still to come keeps nobody else out
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
            if method == endpoint.method and (found := pattern.match(scope["path"])):
                scope["path_params"] = found.groupdict()
                return endpoint
        return self._unknown

    async def _refuse(self, call: Call) -> Response:
        scope = call.request.scope
        methods = {method for method, path in self._exact if path == scope["path"]}
        methods |= {one.method for one, pattern in self._patterns if pattern.match(scope["path"])}
        what = f"{scope['method'][:20]} {scope['path'][:200]}"
        if not methods:
            return json_response({"error": f"{what}: not found"}, status=404)
        headers: dict[str, Any] = {"allow": ", ".join(sorted(methods))}
        return json_response({"error": f"{what}: use {headers['allow']}"}, status=405, headers=headers)

    async def _authorize_and_read(self, endpoint: Endpoint, call: Call) -> None:
        """Check whose request it is, and read its body, which contains the API key in some protocols."""
        if endpoint.is_change:
            self._check_origin(call)
        key = header_key(call)
        is_inside = self._keys.are_needed and key is None and endpoint.body_key is not None
        if not is_inside:
            call.key = self._keys.check(key)
        with self._service.admission.arriving(call.request.scope["client"][0]):
            call.body = await read_body(call)
        if is_inside and endpoint.body_key is not None:
            call.key = self._keys.check(endpoint.body_key(call))

    def _check_origin(self, call: Call) -> None:
        """Refuse requests of pages, which a browser may send for any site without a preflight.

        Not even Host shows whether a page is the service's own (DNS rebinding), and that one changes nothing.
        """
        origin = call.header("origin")
        if origin and not {origin, "*"} & self._cors:
            raise RequestError(
                403, f"pages of {origin} may not change anything here; the service must allow their origin (cors)"
            )
        if call.content_type not in _CHANGE_TYPES:
            raise RequestError(415, f"Content-Type {call.content_type}: send {_CHANGE_TYPES[0]}")

    async def _respond(self, endpoint: Endpoint, call: Call, client: _Client) -> None:
        with client.watched():
            response = await endpoint.handler(call)
            call.status = response.status_code
            await response(call.request.scope, client.receive, client.send)

    def _finish(self, endpoint: Endpoint, call: Call, seconds: float) -> None:
        self.metrics.count(endpoint.path, call.status, seconds, call.n_characters)
        if self._log is not None and not endpoint.is_open:
            route = f"{endpoint.method} {endpoint.path}"
            self._log.write(route, call.status, seconds, call.n_characters, call.key, call.texts)


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
            self._is_complete = True  # before it is sent: then the server reports the end of the request
        await self._send(message)

    async def receive(self) -> Message:
        """Wait until the client has left."""
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, the current task is cancelled when the client leaves."""
        work, watching = asyncio.current_task(), set[asyncio.Task[None]]()
        loop = asyncio.get_running_loop()
        # A task for each request would take a tenth of the time of HTTP.
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
