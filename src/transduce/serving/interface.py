"""The description of the service's endpoints: OpenAPI 3.1, and a page with the same content."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from transduce import __version__
from transduce.serving.http import PAGE, PAGE_HEADERS, Call, Endpoint, json_response

_BODIES = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_RESPONSES = {"200": {"description": "The result"}, "4XX": {"description": "One line that names the problem"}}


def describe_interface(endpoints: Sequence[Endpoint], *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI description of endpoints, by their handlers' docstrings and the classes of their requests."""
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
    """The endpoints `/openapi.json` for programs and `/docs` for people."""

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
