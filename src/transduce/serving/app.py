"""The web application: all protocols, health and metrics, as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from transduce.serving.access_log import AccessLog
from transduce.serving.http import Call, Endpoint, Server, json_response
from transduce.serving.keys import NO_KEYS, ApiKeys
from transduce.serving.metrics import Metrics
from transduce.serving.protocols import deepl, deepl_glossaries, huggingface, libretranslate, native, openai
from transduce.serving.service import Service
from transduce.serving.web_page import ENDPOINTS as PAGE

_PROTOCOLS = (native, libretranslate, deepl, deepl_glossaries, huggingface, openai)
_ENDPOINTS = tuple(endpoint for protocol in (PAGE, *(one.ENDPOINTS for one in _PROTOCOLS)) for endpoint in protocol)


def make_app(
    service: Service, *, keys: ApiKeys = NO_KEYS, cors: tuple[str, ...] = (), log: AccessLog | None = None
) -> ASGIApp:
    """The application for a service.

    Args:
        service: What translates.
        keys: Who may use it.
        cors: Origins whose pages may use it from a browser.
        log: Has a line per request.
    """
    metrics = Metrics(service)

    async def health(call: Call) -> Response:
        return json_response({"status": "ok"})

    async def ready(call: Call) -> Response:
        return json_response({"ready": service.is_ready}, status=200 if service.is_ready else 503)

    async def numbers(call: Call) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    state = (
        Endpoint("GET", "/health", health, is_open=True),
        Endpoint("GET", "/ready", ready, is_open=True),
        Endpoint("GET", "/metrics", numbers, is_open=True),
    )
    app = _App(Server(service, metrics, keys, cors, log), (*_ENDPOINTS, *state))
    return CORSMiddleware(app, allow_origins=cors, allow_methods=["*"], allow_headers=["*"]) if cors else app


class _App:
    """Finds the endpoint of a request: by a table, which takes a tenth of the time of Starlette's router."""

    def __init__(self, server: Server, endpoints: Sequence[Endpoint]) -> None:
        self._server = server
        self._exact = {(one.method, one.path): one for one in endpoints if "{" not in one.path}
        self._unknown = Endpoint("", "unknown", self._refuse, is_open=True)
        self._patterns = [(one, compile_path(one.path)[0]) for one in endpoints if "{" in one.path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        endpoint = self._exact.get((method, scope["path"])) or self._matched(method, scope) or self._unknown
        await self._server.answer(endpoint, scope, receive, send)

    def _matched(self, method: str, scope: Scope) -> Endpoint | None:
        for endpoint, pattern in self._patterns:
            if method == endpoint.method and (found := pattern.match(scope["path"])):
                scope["path_params"] = found.groupdict()
                return endpoint
        return None

    async def _refuse(self, call: Call) -> Response:
        scope = call.request.scope
        methods = {method for method, path in self._exact if path == scope["path"]}
        methods |= {one.method for one, pattern in self._patterns if pattern.match(scope["path"])}
        what = f"{scope['method'][:20]} {scope['path'][:200]}"
        if not methods:
            return json_response({"error": f"{what}: not found"}, status=404)
        headers: dict[str, Any] = {"allow": ", ".join(sorted(methods))}
        return json_response({"error": f"{what}: use {headers['allow']}"}, status=405, headers=headers)
