"""The web application: all protocols, their OpenAPI description, the pages, health and metrics (ASGI)."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from transduce import __version__
from transduce.decoding.queue import CALLER, SECONDS, ExpiredError, expiring
from transduce.inspection.page import PAGE as THEME
from transduce.inspection.page import THEME_FILES
from transduce.logging import escape
from transduce.serving.access import NO_KEYS, ApiKeys
from transduce.serving.http import (
    PAGE,
    PAGE_HEADERS,
    SENDING,
    Call,
    Endpoint,
    describe_error,
    file_response,
    header_key,
    json_response,
    read_body,
)
from transduce.serving.protocols import deepl, huggingface, libretranslate, openai, own
from transduce.serving.service import Service

if TYPE_CHECKING:
    from transduce.serving.inspection_page import InspectionPage


_LOAD = {
    "n_waiting": ("transduce_queue_sentences", "Sentences that wait for decoding."),
    "n_waiting_tokens": ("transduce_queue_tokens", "Source tokens of the sentences that wait."),
    "n_open": ("transduce_open_sentences", "Sentences that wait or are being decoded."),
}
_WORK = {
    "n_steps": ("transduce_decoding_steps", "Decoding steps."),
    "n_rows": ("transduce_decoding_rows", "Hypotheses in these steps; rows / steps is the mean batch size."),
    "n_new": ("transduce_new_tokens", "Tokens of the best translations, and of the texts of language models."),
}


class Metrics:
    """Counters of one service, for Prometheus (`text`). No label contains data of a client."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        requests = Counter(
            "transduce_requests", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._requests: Callable[[str, int], Counter] = cache(requests.labels)  # cached: the library's lookup is slower
        seconds = Histogram(
            "transduce_request_seconds", "Time to the response.", ["route"], buckets=SECONDS, registry=self._registry
        )
        self._seconds: Callable[[str], Histogram] = cache(seconds.labels)
        self.n_characters = 0

    def count(self, route: str, status: int, seconds: float, n_characters: int) -> None:
        """Count a response and, if it succeeded, the characters of its texts."""
        if status == 200:
            self.n_characters += n_characters
        self._requests(route, status).inc()
        self._seconds(route).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the current values. Called by prometheus_client."""
        pending = {"requests": self._service.n_requests, "tokens": self._service.admission.n_tokens}
        for name, value in pending.items():
            yield GaugeMetricFamily(f"transduce_pending_{name}", f"Pending {name}, waiting or running.", value)
        help_text = "Characters of the texts that were translated."
        yield CounterMetricFamily("transduce_characters", help_text, self.n_characters)
        runs = self._service.runs
        loads = [(run.name, {**run.model.queue.workload(), "n_new": run.model.n_new}) for run in runs]
        families: tuple[tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], dict[str, tuple[str, str]]], ...]
        families = (GaugeMetricFamily, _LOAD), (CounterMetricFamily, _WORK)
        for family, names in families:
            for key, (name, help_text) in names.items():
                metric = family(name, help_text, labels=["run"])
                for label, load in loads:
                    if key in load:
                        metric.add_metric([label], load[key])
                yield metric
        help_text = "Time of the sentences of a call from the queue to the last result."
        times = HistogramMetricFamily("transduce_decoding_seconds", help_text, labels=["run"])
        for run in runs:
            buckets = zip([*map(str, SECONDS), "+Inf"], accumulate(run.model.queue.n_calls), strict=True)
            times.add_metric([run.name], list(buckets), run.model.queue.call_seconds)
        yield times


_BODIES = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_RESPONSES = {"200": {"description": "The result"}, "4XX": {"description": "One line that names the problem"}}


def describe_interface(endpoints: Sequence[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """Describe endpoints in OpenAPI, from the docstrings of their handlers and the classes of their requests."""
    classes = dict.fromkeys(endpoint.request for endpoint in endpoints if endpoint.request is not None)
    _, schemas = models_json_schema(
        [(request, "validation") for request in classes], ref_template="#/components/schemas/{model}"
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _describe_operation(endpoint)
        if needs_key and not endpoint.is_open:
            operation["security"] = [{"key": []}]
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "transduce", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _describe_operation(endpoint: Endpoint) -> dict[str, Any]:
    protocol = endpoint.handler.__module__.rpartition(".")[2]
    operation: dict[str, Any] = {
        "tags": ["transduce" if protocol in {"own", "app"} else protocol],
        "description": inspect.getdoc(endpoint.handler) or "",
        "responses": _RESPONSES,
    }
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    if names:
        in_path = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **in_path} for name in names]
    if endpoint.request is not None:
        body = {"schema": {"$ref": f"#/components/schemas/{endpoint.request.__name__}"}}
        operation["requestBody"] = {"required": True, "content": dict.fromkeys(_BODIES, body)}
    return operation


def interface_endpoints(endpoints: Sequence[Endpoint], *, needs_key: bool) -> list[Endpoint]:
    """The endpoints that describe all endpoints: `/openapi.json` for programs and `/docs` for people."""

    @cache
    def description() -> dict[str, Any]:
        return describe_interface(endpoints, needs_key=needs_key)

    async def openapi(call: Call) -> Response:
        return json_response(description())

    async def docs(call: Call) -> Response:
        from jinja2 import Environment, FileSystemLoader  # imported only if someone opens the page

        templates = Environment(loader=FileSystemLoader(PAGE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
        page = templates.get_template("interface.html").render(description())
        return Response(page, media_type="text/html", headers=PAGE_HEADERS)

    return [Endpoint("GET", "/openapi.json", openapi, is_open=True), Endpoint("GET", "/docs", docs, is_open=True)]


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
    """Create the ASGI application of a service.

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
    """Serve a file of the web pages.

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
        """Handle a request and send its response. A streamed response counts as running until its end."""
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
    """Log a response as a line of JSON on stderr. `key`: the name of the client's API key; empty without one."""
    line = {"time": round(time.time(), 3), "route": route, "status": status, "ms": round(1000 * seconds, 1)}
    line |= {"characters": n_characters} | ({"key": key} if key else {}) | ({"texts": texts} if with_texts else {})
    with suppress(OSError):  # the reader has closed the pipe
        # written in one piece, because other threads write too
        sys.stderr.write(escape(json.dumps(line, ensure_ascii=False)) + "\n")


def _error_response(endpoint: Endpoint, error: Exception) -> Response:
    """Report an error in the form that clients of the endpoint's protocol expect."""
    status, message = describe_error(error)
    status = endpoint.unauthorized if status == 401 else status
    headers = {"connection": "close"} if status in (408, 413, 503) else {}
    if status == 429:
        headers["retry-after"] = str(math.ceil(getattr(error, "retry_after", 1)))
    return json_response(endpoint.error(status, message), status=status, headers=headers)


class _Client:
    """The client of a request. If it disconnects before the response is complete, the work is cancelled."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._is_complete = False
        self.has_left = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True  # set before sending, after which the server reports the end of the request
        await self._send(message)

    async def receive(self) -> Message:
        """Wait until the client has disconnected."""
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
