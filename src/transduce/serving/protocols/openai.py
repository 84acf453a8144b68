"""OpenAI's chat protocol (https://platform.openai.com/docs/api-reference/chat): the last user message is translated."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from transduce.decoding.options import TranslationOptions
from transduce.decoding.results import Translation
from transduce.errors import SettingsError, TransduceError
from transduce.serving.http import Call, Endpoint, json_response
from transduce.serving.service import Route, Service
from transduce.serving.texts import TextTranslation, translate_texts
from transduce.text.sentences import join_sentences, split_sentences

_numbers = itertools.count(1)


class Part(BaseModel):
    """A part of a message: only text."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str | list[Part] | None = None

    def text(self) -> str:
        """The text, of all parts."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(BaseModel):
    """Whether the stream ends with the number of tokens."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The options that apply to a translation; others, such as a temperature, are ignored.

    model: the name of a run, or languages such as en-de. n: translations, best first.
    """

    model: str
    messages: list[Message]
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def text(self) -> str:
        """The last message of the user."""
        texts = [message.text() for message in self.messages if message.role == "user"]
        if not texts:
            raise SettingsError("messages: no message has the role 'user'; its content is what is translated")
        return texts[-1]

    def options(self) -> TranslationOptions:
        """How to search."""
        return TranslationOptions(n_best=self.n or 1, max_length=self.max_completion_tokens or self.max_tokens)


def find_route(service: Service, model: str) -> Route:
    """The route of a name, or of languages such as en-de."""
    routes = list(service.routes())
    for route in routes:
        if model in (route.name, f"{route.source}-{route.target}"):
            return route
    return service.route(name=model)  # the error


async def chat(call: Call) -> Response:
    """Answer with a chat completion, or with its chunks as server-sent events."""
    asked = call.parse(ChatRequest)
    text, options = asked.text(), asked.options()
    call.take_texts([text])
    call.service.limits.check_options(options)
    route = find_route(call.service, asked.model)
    head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": asked.model}
    if asked.stream:
        if options.n_best > 1:
            raise SettingsError(f"n = {options.n_best}: a stream has one translation; leave n out")
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        chunks = aiter(_chunks(call.service, text, route, options, usage=usage))
        first = await anext(chunks)  # an overloaded service is refused with its status
        return StreamingResponse(_events(head, first, chunks), media_type="text/event-stream")
    (found,) = await translate_texts(call.service, [text], [route], options)
    choices = [
        {"index": place, "message": {"role": "assistant", "content": found.alternative(place)}, "logprobs": None,
         "finish_reason": _reason(found.sentences, place)}
        for place in range(options.n_best)
    ]  # fmt: skip
    answer = {**head, "object": "chat.completion", "choices": choices, "usage": _usage(route, found)}
    return json_response(answer)


def _reason(sentences: tuple[Translation, ...] | list[Translation], place: int = 0) -> str:
    found = [one.candidates[min(place, len(one.candidates) - 1)] for one in sentences]
    return "stop" if all(one.finished for one in found) else "length"


def _usage(route: Route, found: TextTranslation) -> dict[str, int]:
    """Numbers of tokens: of the source, and of the best translation."""
    src = route.runs[0].translator.translator.tokenizers.src
    tgt = route.runs[-1].translator.translator.tokenizers.tgt
    n_src = sum(map(len, src.encode_batch(list(found.parts[::2]))))
    n_tgt = sum(map(len, tgt.encode_batch([one.text for one in found.sentences])))
    return {"prompt_tokens": n_src, "completion_tokens": n_tgt, "total_tokens": n_src + n_tgt}


async def _chunks(
    service: Service, text: str, route: Route, options: TranslationOptions, *, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a translation, sentence by sentence; a sentence grows as it is decoded."""
    parts, found, known = split_sentences(text, route.source), list[Translation](), ""
    end = time.monotonic() + service.limits.seconds
    for place, sentence in enumerate(parts[::2]):
        before = [one.text for one in found]
        async for part in service.stream(sentence, route, options, seconds=max(end - time.monotonic(), 1e-9)):
            now = part if isinstance(part, str) else part.text
            if isinstance(part, Translation):
                found.append(part)
            whole = join_sentences([*before, now], parts[: 2 * place + 1], route.source, route.target)
            if now and whole.startswith(known) and whole != known:
                yield _chunk({"role": "assistant", "content": whole[len(known) :]})
                known = whole
    whole = join_sentences([one.text for one in found], parts, route.source, route.target)
    if whole.startswith(known) and whole != known:  # a line end
        yield _chunk({"role": "assistant", "content": whole[len(known) :]})
    yield _chunk({}, _reason(found))
    if usage:
        yield {"choices": [], "usage": _usage(route, TextTranslation(tuple(parts), tuple(found), route))}


def _chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}


async def _events(
    head: dict[str, Any], first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    def event(chunk: dict[str, Any]) -> bytes:
        return b"data: " + to_json({**head, "object": "chat.completion.chunk", **chunk}) + b"\n\n"

    yield event(first)
    try:
        async for chunk in chunks:
            yield event(chunk)
        yield b"data: [DONE]\n\n"
    except TransduceError as error:
        yield b"data: " + to_json(format_error(500, str(error))) + b"\n\n"


async def models(call: Call) -> Response:
    """The names that requests may give as model."""
    names = dict.fromkeys(
        name for route in call.service.routes() for name in (route.name, f"{route.source}-{route.target}")
    )
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "transduce"} for name in names]
    return json_response({"object": "list", "data": data})


def format_error(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat, error=format_error),
    Endpoint("GET", "/v1/models", models, error=format_error),
)
