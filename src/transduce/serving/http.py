"""Common parts of all protocols: requests and their bodies, endpoints, responses, errors."""

from __future__ import annotations

import asyncio
import io
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError, to_json
from python_multipart import parse_form
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from transduce.decoding.queue import ExpiredError, QueueClosedError
from transduce.errors import SettingsError, UserError, message_of
from transduce.logging import print_exception
from transduce.serving.access import DrainingError, OverloadedError, UnauthorizedError
from transduce.serving.glossaries import StorageError, UnknownGlossaryError
from transduce.serving.service import Service

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the parser warns about clients' malformed input

ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT")
SENDING = 2.0
"""Seconds after a request's deadline in which its client can read the rest of a stream."""

_READ_ON = 16  # read and drop up to 16 * max_body bytes: most clients read the response only after sending
_FORM, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
_MOST_FIELDS = 1000  # maximum number of fields of a form
PAGE = Path(__file__).parent / "page"
_PAGE_TYPES = {  # Windows may define other types
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "font-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_LONGEST_ERROR = 1000  # maximum characters of a message, which may quote input of a client
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a body. The first wrong item ends the validation, since very many would take seconds."""


def as_list(value: Any) -> Any:
    """Put a single text into a list. Lists are unchanged; other values are an error."""
    if not isinstance(value, str | list):
        raise PydanticCustomError("texts", "Input should be a text or a list of texts")
    return [value] if isinstance(value, str) else value


Texts = Annotated[Items[str], BeforeValidator(as_list, json_schema_input_type=str | list[str])]


class RequestError(UserError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_STATUS: dict[type[Exception], int] = {
    OverloadedError: 429,
    ExpiredError: 504,
    DrainingError: 503,
    QueueClosedError: 503,
    UnauthorizedError: 401,
    StorageError: 507,
    UnknownGlossaryError: 404,
    UserError: 400,  # last, because the others are subclasses
}


@dataclass(slots=True)
class Call:
    """A request whose body has arrived.

    needs_key: whether clients need an API key. n_translated: characters that the service has translated so far.
    key: name of the client's API key. end: time of the event loop at which the request expires. n_characters: length
    of all texts of the request. texts: these texts, for a log with texts. status: HTTP status of the response.
    """

    service: Service
    request: Request
    needs_key: bool = False
    n_translated: int = 0
    body: bytes | None = None
    key: str = ""
    end: float = math.inf
    n_characters: int = 0
    texts: list[str] = field(default_factory=list)
    status: int = 500

    def parse(self, model: type[ModelT]) -> ModelT:
        """Parse the body (JSON or a form) as `model` or, without a body, the query of the URL."""
        kind, body = self.header("content-type").partition(";")[0].strip().lower(), self.body or b""
        try:
            # curl -d sends the content type of a form, even with JSON
            if kind in (_FORM, _MULTIPART) and not body.lstrip().startswith(b"{"):
                fields = self._form(body, is_multipart=kind == _MULTIPART)
                return model.model_validate({name: v if len(v) > 1 else v[0] for name, v in fields.items()})
            if not body and self.request.query_params:
                return model.model_validate(dict(self.request.query_params))
            return model.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise SettingsError(_first_problem(error)) from None

    def _form(self, body: bytes, *, is_multipart: bool) -> dict[str, list[str]]:
        """Parse a form of an HTML page, a browser's FormData or `curl -F`. Files are ignored."""
        fields, n_parts = dict[str, list[str]](), itertools.count(1)

        def take(part: Any) -> None:
            if next(n_parts) > _MOST_FIELDS:
                raise ValueError
            if hasattr(part, "value"):  # no file
                fields.setdefault(part.field_name.decode(), []).append((part.value or b"").decode())

        try:
            if not is_multipart:
                return parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
            parse_form({"Content-Type": self.header("content-type").encode()}, io.BytesIO(body), take, take)
        except ValueError:
            raise SettingsError(f"the form is damaged, not UTF-8, or has more than {_MOST_FIELDS:,} fields") from None
        return fields

    def header(self, name: str) -> str:
        return self.request.headers.get(name, "")

    def deadline(self) -> float:
        """The time of the event loop at which the request expires. The header X-Request-Timeout may set it earlier."""
        try:
            given = float(self.header("x-request-timeout") or "inf")
        except ValueError:
            given = 0.0
        if not given > 0:
            raise SettingsError("the header X-Request-Timeout must be a number of seconds above 0, or left out")
        return self.service.deadline(given)

    def take_texts(self, texts: list[str]) -> None:
        """Store the texts of the request, and count their characters. Raises `SettingsError` beyond the limits."""
        self.service.limits.check_texts(texts)
        self.n_characters, self.texts = sum(map(len, texts)), texts


Handler = Callable[[Call], Awaitable[Response]]
FormatError = Callable[[int, str], Mapping[str, Any]]


def format_error(status: int, message: str) -> dict[str, str]:
    return {"error": message}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of a protocol.

    request: the class of its requests, for the OpenAPI description.
    error: a function from an error's status and message to its JSON.
    body_key: returns the API key from the body, for protocols that send it there.
    is_open: whether requests need no API key.
    admit: counts an open request, and refuses too many (default: `Service.request`).
    unauthorized: the HTTP status that the protocol's clients expect for a request without a valid API key.
    """

    method: str
    path: str
    handler: Handler
    request: type[BaseModel] | None = None
    error: FormatError = format_error
    body_key: Callable[[Call], str | None] | None = None
    is_open: bool = False
    admit: Callable[[], AbstractContextManager[None]] | None = None
    unauthorized: int = 401


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, headers=dict(headers or {}), media_type="application/json")


def file_response(path: Path) -> Response:
    """Send a file of a self-contained page."""
    return FileResponse(path, headers=PAGE_HEADERS, media_type=_PAGE_TYPES[path.suffix])


def describe_error(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error and its message in one line. The cause of an internal error is printed."""
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    if isinstance(error, RequestError):
        status = error.status
    if status == 500:
        print_exception(error)
        return status, "internal error; the server's log has the cause"
    message = message_of(error)
    return status, message if len(message) <= _LONGEST_ERROR else message[:_LONGEST_ERROR] + "..."


def refuse_unsupported(asked: BaseModel, names: Sequence[str], *, no_change: Mapping[str, Any] | None = None) -> None:
    """Raise `SettingsError` for unsupported fields, unless empty or equal to their value in `no_change`."""
    for name in names:
        value = getattr(asked, name, None)
        if value and value != (no_change or {}).get(name):
            raise SettingsError(f"{name}: not supported by this service; leave it out")


def header_key(call: Call) -> str | None:
    """The API key in a request's headers, or None: Bearer (OpenAI, Hugging Face), DeepL-Auth-Key or X-API-Key."""
    kind, _, key = call.header("authorization").strip().partition(" ")
    if kind.lower() in ("bearer", "deepl-auth-key") and key:
        return key.strip()
    return call.header("x-api-key") or None


async def read_body(call: Call) -> bytes:
    """Read the body within the limits of size and time. DeepL's client sends a body even with GET."""
    limits, body, size = call.service.limits, bytearray(), 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in call.request.stream():
                size += len(part)
                if size <= limits.max_body:
                    body += part
                elif size > _READ_ON * limits.max_body:
                    break
    except ClientDisconnect:
        raise RequestError(400, "the body is incomplete or malformed") from None
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    if size > limits.max_body:
        raise RequestError(413, f"the body has more than {limits.max_body:,} bytes; send several requests")
    return bytes(body)


def _first_problem(error: ValidationError) -> str:
    """Describe a failed validation in one line: the field, the problem, and the given value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    given = repr(first.get("input"))
    return f"{where}: {first['msg']}; given: {given if len(given) <= 60 else given[:60] + '...'}"
