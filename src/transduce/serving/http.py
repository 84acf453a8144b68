"""Common parts of all protocols: requests and their bodies, endpoints, responses, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from transduce.decoding.queue import EXPIRED, ExpiredError, QueueClosedError
from transduce.errors import SettingsError, TransduceError, UserError, message_of
from transduce.logging import print_exception
from transduce.serving.concurrency import expiring
from transduce.serving.glossaries import StorageError, UnknownGlossaryError
from transduce.serving.keys import UnauthorizedError
from transduce.serving.limits import DrainingError, OverloadedError
from transduce.serving.service import Service

ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT")
_SENDING = 2.0  # seconds after its deadline in which the rest of a stream can be read
_READ_ON = 16  # times the limit of a body: read and drop it, as most clients read the response only after sending
_MOST_FIELDS = 1000  # of a form
_LONGEST_ERROR = 1000  # characters; a message may quote what a client sent
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a body. The first wrong item ends the validation: a megabyte of them would take seconds."""
Texts = Annotated[Items[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class RequestError(UserError):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (OverloadedError, 429),
    (ExpiredError, 504),
    (DrainingError, 503),
    (QueueClosedError, 503),
    (UnauthorizedError, 401),
    (StorageError, 507),
    (UnknownGlossaryError, 404),
    (UserError, 400),
)


@dataclass(slots=True)
class Call:
    """A request whose body has arrived.

    needs_key: whether clients need an API key. n_translated: characters that the service has translated so far.
    key: name of the client's API key. n_characters: of the texts of this request; texts: what the access log shows if
    it has texts. status: of the response.
    """

    service: Service
    request: Request
    needs_key: bool = False
    n_translated: int = 0
    body: bytes | None = None
    key: str = ""
    n_characters: int = 0
    texts: list[str] = field(default_factory=list)
    status: int = 500

    def parse(self, model: type[ModelT]) -> ModelT:
        """The body, JSON or a form, as this model; without a body, the query."""
        body = self.body or b""
        is_form = self.content_type == "application/x-www-form-urlencoded"
        try:
            if is_form and not body.lstrip().startswith(b"{"):  # curl -d sends JSON so
                return model.model_validate(_form(body))
            if not body and self.request.query_params:
                return model.model_validate(dict(self.request.query_params))
            return model.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise SettingsError(_first_problem(error)) from None

    def header(self, name: str) -> str:
        return self.request.headers.get(name, "")

    @property
    def content_type(self) -> str:
        return self.header("content-type").partition(";")[0].strip().lower()

    def deadline(self) -> float:
        """The time of the event loop at which the request expires; the header X-Request-Timeout may shorten it."""
        try:
            given = float(self.header("x-request-timeout") or "inf")
        except ValueError:
            given = 0.0
        if not given > 0:
            raise SettingsError("the header X-Request-Timeout must be a number of seconds above 0, or left out")
        return self.service.deadline(given)

    def take_texts(self, texts: list[str]) -> None:
        """Refuse texts beyond the limits, and count the others."""
        self.service.limits.check_texts(texts)
        self.n_characters, self.texts = sum(map(len, texts)), texts


Handler = Callable[[Call], Awaitable[Response]]
FormatError = Callable[[int, str], Mapping[str, Any]]


def format_error(status: int, message: str) -> dict[str, str]:
    return {"error": message}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of a protocol.

    error: the JSON of an error, from its status and message.
    body_key: the API key in a body, where the protocol puts it there.
    is_open: needs no API key.
    is_change: changes what the service keeps; pages are refused, except those of allowed origins.
    unauthorized: the status of a request without a valid API key, as the protocol's clients know it.
    """

    method: str
    path: str
    handler: Handler
    error: FormatError = format_error
    body_key: Callable[[Call], str | None] | None = None
    is_open: bool = False
    is_change: bool = False
    unauthorized: int = 401


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status_code=status, headers=dict(headers or {}), media_type="application/json")


async def stream_response(
    parts: AsyncIterator[Any], error: FormatError = format_error, *, end: float, last: str = ""
) -> Response:
    """JSON as server-sent events, and `last` after them. What is raised before the first one becomes a status.

    A client that has not read everything shortly after `end`, the request's deadline, does not get the rest.
    """
    first, time = await anext(parts), asyncio.get_running_loop().time

    async def events() -> AsyncIterator[bytes]:
        yield _event(to_json(first))
        try:
            async for part in parts:
                if time() > end + _SENDING:
                    raise ExpiredError(EXPIRED)
                yield _event(to_json(part))
            if last:
                yield _event(last.encode())
        except TransduceError as problem:
            yield _event(to_json(error(*describe_error(problem))))

    return _EventStream(events(), end=end + 2 * _SENDING)


class _EventStream(StreamingResponse):
    """Server-sent events, until `end` at most: then the connection of a client that does not read is closed."""

    def __init__(self, events: AsyncIterator[bytes], *, end: float) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ExpiredError):
            async with expiring(self.end):
                await super().__call__(scope, receive, send)


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def describe_error(error: Exception) -> tuple[int, str]:
    """The status of an error, and its message in one line; prints the cause of an internal one."""
    if isinstance(error, RequestError):
        status = error.status
    else:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    if status == 500:
        print_exception(error)
        return status, "internal error; the server's log has the cause"
    message = message_of(error)
    return status, message if len(message) <= _LONGEST_ERROR else message[:_LONGEST_ERROR] + "..."


def refuse_unsupported(asked: BaseModel, names: Sequence[str]) -> None:
    """Refuse fields of a request that the service does not have, if they would change something."""
    for name in names:
        if getattr(asked, name, None):
            raise SettingsError(f"{name}: not supported by this service; leave it out")


def _form(body: bytes) -> dict[str, Any]:
    try:
        values = parse_qs(body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except (UnicodeDecodeError, ValueError):
        raise SettingsError(f"the form is not valid UTF-8, or has more than {_MOST_FIELDS:,} fields") from None
    return {name: found if len(found) > 1 else found[0] for name, found in values.items()}


def header_key(call: Call) -> str | None:
    """The API key in a request's headers: Bearer (OpenAI, Hugging Face), DeepL-Auth-Key or X-API-Key."""
    kind, _, key = call.header("authorization").strip().partition(" ")
    if kind.lower() in ("bearer", "deepl-auth-key") and key:
        return key.strip()
    return call.header("x-api-key") or None


async def read_body(call: Call) -> bytes:
    """The body, within the limits of size and time; DeepL's client sends one with GET, too."""
    limits, length = call.service.limits, call.header("content-length")
    announced = int(length) if length.isdecimal() and len(length) <= 20 else -1  # -1: unknown
    body, size, is_last = bytearray(), 0, announced == 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            while not is_last and size <= _READ_ON * limits.max_body:
                message = await call.request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestError(400, "the body is incomplete or malformed")
                part = message.get("body", b"")
                size += len(part)
                is_last = size == announced or not message.get("more_body", False)
                if size <= limits.max_body:
                    body += part
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None
    if size > limits.max_body:
        raise RequestError(413, f"the body has more than {limits.max_body:,} bytes; send several requests")
    return bytes(body)


def _first_problem(error: ValidationError) -> str:
    """One line of a failed validation: the field, what is wrong, and what was given."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    given = repr(first.get("input"))
    return f"{where}: {first['msg']}; given: {given if len(given) <= 60 else given[:60] + '...'}"
