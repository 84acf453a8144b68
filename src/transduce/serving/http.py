"""What all protocols share: limits of bodies, errors, clients that leave, keys, metrics and the access log."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qs

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from transduce.decoding.options import TranslationOptions
from transduce.decoding.queue import ExpiredError, QueueClosedError
from transduce.errors import SettingsError, TransduceError, UserError
from transduce.logging import print_exception
from transduce.serving.access_log import AccessLog
from transduce.serving.client import Client
from transduce.serving.glossaries import StorageError
from transduce.serving.keys import ApiKeys, UnauthorizedError
from transduce.serving.limits import DrainingError, OverloadedError
from transduce.serving.metrics import Metrics
from transduce.serving.service import Service

ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT")
_READ_ON = 16  # times the limit of a body: read and drop it, as most clients read the response only after sending
_MOST_FIELDS = 1000  # of a form
_LONGEST_LENGTH = 20  # digits of a Content-Length
_LONGEST_ERROR = 1000  # characters; a message may quote what a client sent
_CHANGE_TYPES = "application/json", "application/x-www-form-urlencoded", ""
_STATUS_LEFT = 499  # nginx's status for a client that left; it appears in the log only
Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list in a body. The first wrong item ends the validation: a megabyte of them would take seconds."""
Texts = Annotated[Items[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""One text or several."""
translation_options = lru_cache(TranslationOptions)  # to check them takes longer


class RequestError(UserError):
    """A request that is refused with a status of its own."""

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
    (UserError, 400),
)


@dataclass(slots=True)
class Call:
    """A request whose body has arrived.

    needs_key: whether clients need an API key. n_translated: characters that the service has translated so far.
    key: name of the client's API key. n_characters: of the texts of this request; texts: what the access log shows with
    --log-text. status: of the response.
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

    def header(self, name: bytes) -> str:
        """A header by its name in lower case, empty if there is none."""
        return next((value.decode("latin-1") for key, value in self.request.scope["headers"] if key == name), "")

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case and without parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    def seconds(self, asked: float | None = None) -> float:
        """The time that the client gives its request, at most the limit: `asked`, or the header X-Request-Timeout."""
        try:
            given = float(self.header(b"x-request-timeout") or "inf")
        except ValueError:
            given = 0.0
        if not given > 0:
            raise SettingsError("the header X-Request-Timeout must be a number of seconds above 0, or left out")
        return min(given, math.inf if asked is None else asked, self.service.limits.seconds)

    def take_texts(self, texts: list[str]) -> None:
        """Refuse texts beyond the limits, and count the others."""
        self.service.limits.check_texts(texts)
        self.n_characters, self.texts = sum(map(len, texts)), texts


Handler = Callable[[Call], Awaitable[Response]]
FormatError = Callable[[int, str], Mapping[str, Any]]


def format_error(status: int, message: str) -> dict[str, str]:
    """The JSON of an error in most protocols."""
    return {"error": message}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route of a protocol.

    error: the JSON of an error, from its status and message.
    body_key: the API key in a body, where the protocol puts it there.
    is_open: needs no API key.
    is_change: changes what the service keeps; pages are refused, except those of --cors.
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


class Server:
    """Answers requests: reads their bodies, runs the handlers, and counts and logs the responses."""

    def __init__(
        self, service: Service, metrics: Metrics, keys: ApiKeys, cors: Collection[str], log: AccessLog | None
    ) -> None:
        self.service, self._metrics, self._keys, self._cors, self._log = service, metrics, keys, {*cors}, log

    async def answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to a request. A streamed one counts as running until its end."""
        start = time.perf_counter()
        client = Client(receive, send)
        call = Call(self.service, Request(scope, receive), needs_key=self._keys.are_needed)
        call.n_translated = self._metrics.n_characters
        try:
            if endpoint.is_open:
                await self._respond(endpoint, call, client)
            else:
                await self._authorize_and_read(endpoint, call)
                with self.service.request():  # now: a request whose body is still to come keeps nobody else out
                    await self._respond(endpoint, call, client)
        except asyncio.CancelledError:
            if not client.has_left:  # the service ends
                call.status = 503
                raise
            self._metrics.cancelled.inc()
            call.status = _STATUS_LEFT
        except Exception as error:
            response = self._error_response(endpoint, error)
            call.status = response.status_code
            await response(scope, client.receive, client.send)
        finally:
            self._finish(endpoint, call, time.perf_counter() - start)

    async def _authorize_and_read(self, endpoint: Endpoint, call: Call) -> None:
        """Check whose request it is, and read its body, which contains the API key in some protocols."""
        if endpoint.is_change:
            self._check_origin(call)
        key = header_key(call)
        is_inside = self._keys.are_needed and key is None and endpoint.body_key is not None
        if not is_inside:
            call.key = self._keys.check(key)
        with self.service.admission.arriving(call.request.scope["client"][0]):
            call.body = await read_body(call)
        if is_inside and endpoint.body_key is not None:
            call.key = self._keys.check(endpoint.body_key(call))

    def _check_origin(self, call: Call) -> None:
        """Refuse requests of pages, which a browser may send for any site without a preflight.

        Not even Host tells whether a page is the service's own (DNS rebinding), and that one changes nothing.
        """
        origin = call.header(b"origin")
        if origin and not {origin, "*"} & self._cors:
            raise RequestError(403, f"pages of {origin} may not change anything here; allow them with --cors")
        if call.content_type not in _CHANGE_TYPES:
            raise RequestError(415, f"Content-Type {call.content_type}: send {_CHANGE_TYPES[0]}")

    async def _respond(self, endpoint: Endpoint, call: Call, client: Client) -> None:
        with client.watched():
            response = await endpoint.handler(call)
            call.status = response.status_code
            await response(call.request.scope, client.receive, client.send)

    def _error_response(self, endpoint: Endpoint, error: Exception) -> Response:
        """The response that reports an error to a protocol's clients."""
        status, message = _problem(error)
        status = endpoint.unauthorized if status == 401 else status
        headers = {"connection": "close"} if status in (408, 413, 503) else {}
        if status == 429:
            headers["retry-after"] = str(math.ceil(getattr(error, "retry_after", 1)))
        return json_response(endpoint.error(status, message), status=status, headers=headers)

    def _finish(self, endpoint: Endpoint, call: Call, seconds: float) -> None:
        self._metrics.count(endpoint.path, call.status, seconds, call.n_characters)
        if self._log is not None and not endpoint.is_open:
            route = f"{endpoint.method} {endpoint.path}"
            self._log.write(route, call.status, seconds, call.n_characters, call.key, call.texts)


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON."""
    return Response(to_json(content), status_code=status, headers=dict(headers or {}), media_type="application/json")


async def stream_response(parts: AsyncIterator[Any], error: FormatError = format_error, *, last: str = "") -> Response:
    """JSON as server-sent events, and `last` after them. What is raised before the first one becomes a status."""
    first = await anext(parts)

    async def events() -> AsyncIterator[bytes]:
        yield _event(to_json(first))
        try:
            async for part in parts:
                yield _event(to_json(part))
            if last:
                yield _event(last.encode())
        except TransduceError as problem:
            yield _event(to_json(error(*_problem(problem))))

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def _problem(error: Exception) -> tuple[int, str]:
    """The status of an error, and its message in one line; prints the cause of an internal one."""
    if isinstance(error, RequestError):
        status = error.status
    else:
        status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    if status == 500:
        print_exception(error)
        return status, "internal error; the server's log has the cause"
    message = " ".join(str(error).split())
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
    kind, _, key = call.header(b"authorization").strip().partition(" ")
    if kind.lower() in ("bearer", "deepl-auth-key") and key:
        return key.strip()
    return call.header(b"x-api-key") or None


async def read_body(call: Call) -> bytes:
    """The body, within the limits of size and time; DeepL's client sends one with GET, too."""
    limits, length = call.service.limits, call.header(b"content-length")
    announced = int(length) if length.isdecimal() and len(length) <= _LONGEST_LENGTH else -1
    if announced > limits.max_body and call.header(b"expect"):  # the client waits to send it
        raise _too_large(limits.max_body)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _receive_body(call.request, announced, limits.max_body)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {limits.body_seconds:g} seconds") from None


async def _receive_body(request: Request, announced: int, most: int) -> bytes:
    """The body. `announced`: its size, after which no further message is awaited; -1: unknown."""
    body, size, is_last = bytearray(), 0, announced == 0
    while not is_last and size <= _READ_ON * most:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestError(400, "the body is incomplete or malformed")
        part = message.get("body", b"")
        size += len(part)
        is_last = size == announced or not message.get("more_body", False)
        if size <= most:
            body += part
    if size > most:
        raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> RequestError:
    return RequestError(413, f"the body has more than {most:,} bytes; send several requests")


def _first_problem(error: ValidationError) -> str:
    """One line of a failed validation: the field, what is wrong, and what was given."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "body"
    given = repr(first.get("input"))
    return f"{where}: {first['msg']}; given: {given if len(given) <= 60 else given[:60] + '...'}"
