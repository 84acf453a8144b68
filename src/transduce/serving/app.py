"""The web application: all protocols, health and metrics, as one ASGI application."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from transduce.serving.http import Call, Endpoint, Server, json_response
from transduce.serving.keys import NO_KEYS, ApiKeys
from transduce.serving.metrics import Metrics
from transduce.serving.protocols import huggingface, libretranslate, native
from transduce.serving.service import Service

_ENDPOINTS = (*native.ENDPOINTS, *libretranslate.ENDPOINTS, *huggingface.ENDPOINTS)


def make_app(
    service: Service, *, keys: ApiKeys = NO_KEYS, cors: tuple[str, ...] = (), log: bool = True, log_text: bool = False
) -> Starlette:
    """The application for a service.

    Args:
        service: What translates.
        keys: Who may use it.
        cors: Origins whose pages may use it from a browser.
        log: Print a line per request to stderr, without texts.
        log_text: With texts.
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
    server = Server(service, keys, metrics, log=log, log_text=log_text)
    routes = [server.route(endpoint) for endpoint in (*_ENDPOINTS, *state)]
    middleware = [Middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])]
    return Starlette(
        routes=routes, middleware=middleware if cors else [], exception_handlers={HTTPException: _not_found}
    )


async def _not_found(request: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return json_response({"error": message}, status=error.status_code)
