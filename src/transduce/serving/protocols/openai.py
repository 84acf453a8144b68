"""OpenAI's protocol (https://platform.openai.com/docs/api-reference): chats and completions.

With a language model, both continue a prompt. With a run that translates, a chat translates its last user message.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from transduce.config.decoding import DecodingOptions
from transduce.config.section import MAX_SEED
from transduce.decoding.queue import EXPIRED, ExpiredError
from transduce.decoding.results import Candidate, Translation
from transduce.errors import SettingsError, TransduceError, nearest
from transduce.serving.access import Limits, check_at_most
from transduce.serving.async_models import AsyncTextGenerator, Completion, Completions, in_parts, offload
from transduce.serving.http import (
    SENDING,
    Call,
    Endpoint,
    Items,
    Texts,
    as_list,
    describe_error,
    json_response,
    refuse_unsupported,
)
from transduce.serving.service import Route, Service
from transduce.serving.texts import SHORTEST, TextTranslation, join_notes, translate_texts
from transduce.text.sentences import joined_parts

_GROUP = 16  # sentences that a stream sends together
_UNSUPPORTED = (
    *("echo", "frequency_penalty", "functions", "logit_bias", "logprobs", "presence_penalty", "repetition_penalty"),
    *("response_format", "suffix", "tools", "top_logprobs"),
)
_NO_CHANGE: dict[str, Any] = {"repetition_penalty": 1, "response_format": {"type": "text"}}
_numbers = itertools.count(1)

Count = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


def format_error(status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    field = re.match(r"(\w+)[\w.]*(?: =|: | ')", message)  # the form of all messages about a setting
    param = field[1] if field and field[1] in _PARAMETERS else None
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel, extra="allow"):
    """The common fields of requests for chats and completions, and the form of their responses.

    Fields in `_UNSUPPORTED` are refused; other fields are ignored. Without a seed, each request draws anew. model: the
    name of a run, or languages such as en-de. n: outputs for each prompt. Extensions of the protocol are top_k, and
    cut_prompt, which cuts the beginning off a prompt that is longer than the context.
    """

    kind: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    model: str
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: Annotated[Items[Stop], Field(max_length=4), BeforeValidator(as_list)] | None = None
    cut_prompt: bool = False
    best_of: Count | None = None

    @property
    def max_length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def respond(
        self, texts: Sequence[Candidate | Completion], usage: dict[str, int], note: Mapping[str, str] = {}
    ) -> Response:
        """Build the response. `note`: see `join_notes`."""
        choices = [
            _choice(number, self.content(text.text), text.finished, _log_probs(text))
            for number, text in enumerate(texts)
        ]
        return json_response({**self._head(), "object": self.object, "choices": choices, "usage": usage, **note})

    async def respond_in_parts(self, call: Call, chunks: AsyncIterator[dict[str, Any]]) -> Response:
        head = {**self._head(), "object": self.chunk_object}
        return await stream_response(({**head, **chunk} async for chunk in chunks), end=call.end)

    def _head(self) -> dict[str, Any]:
        return {"id": f"{self.kind}-{next(_numbers)}", "created": int(time.time()), "model": self.model}

    def chunk(self, number: int, text: str, *, finished: bool | None = None, log_probs: Any = None) -> dict[str, Any]:
        """Make the chunk of a stream with a part of text `number`. `finished`: see `_choice`."""
        return {"choices": [_choice(number, self.part(text), finished, log_probs)]}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, default_length: int, limits: Limits) -> DecodingOptions:
        """The sampling options. Raises `SettingsError` if they exceed limits or are not supported."""
        refuse_unsupported(self, _UNSUPPORTED, no_change=_NO_CHANGE)
        n, length = self.n or 1, min(self.max_length or default_length, limits.max_length)
        if self.best_of not in (None, n):
            raise SettingsError(f"best_of = {self.best_of}: must be n = {n}; leave it out")
        check_at_most("n", n, limits.max_beam)
        return DecodingOptions(
            max_length=length,
            n_best=n,
            sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
        )


class CompletionRequest(GenerationRequest):
    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"

    prompt: Annotated[Texts, Field(min_length=1)]
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=0)] | None, BeforeValidator(lambda value: None if value is False else value)
    ] = None
    """Add the log-probability of each new token if 0. Other numbers, which request alternatives, are not supported."""


class ContentPart(BaseModel):
    """A part of a message. Only parts of type `text` have a text."""

    type: str
    text: str = ""


class Message(BaseModel):
    role: str
    content: str | Items[ContentPart] | None = None

    def text(self) -> str:
        if isinstance(self.content, str | None):
            return self.content or ""
        if others := [part.type for part in self.content if part.type != "text"]:
            raise SettingsError(
                f"messages: a part of type '{others[0]}' cannot be read; send parts of type 'text' only"
            )
        return "\n".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """A request for a chat. Translation ignores temperature, top_p, top_k and seed, and returns the `n` best texts."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    messages: Items[Message]

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if text else {}}

    def source(self) -> str:
        messages = [message for message in self.messages if message.role == "user"]
        if not messages:
            raise SettingsError("messages: no message has the role 'user'; its content is what is translated")
        return messages[-1].text()

    def search(self, text: str, limits: Limits) -> DecodingOptions:
        """The options for the translation of a text. Raises `SettingsError` if they exceed limits or are not supported.

        A token limit above the run's limit for the text is dropped, since it would only reserve more memory.
        """
        refuse_unsupported(self, (*_UNSUPPORTED, "stop"), no_change=_NO_CHANGE)
        check_at_most("n", self.n, limits.max_beam)
        length = self.max_length or limits.max_length
        is_shorter = length < min(2 * len(text) + 16, limits.max_length)
        return DecodingOptions(n_best=self.n or 1, max_length=length if is_shorter else None)


_PARAMETERS = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *_UNSUPPORTED}


async def stream_response(parts: AsyncIterator[Any], *, end: float) -> Response:
    """Send JSON objects as server-sent events. An error before the first event becomes an HTTP status.

    `end`: the request's deadline. Parts that the client has not read `SENDING` seconds later are not sent.
    """
    first = await anext(parts)

    async def events() -> AsyncIterator[bytes]:
        yield _event(first)
        try:
            async for part in parts:
                if asyncio.get_running_loop().time() > end + SENDING:
                    raise ExpiredError(EXPIRED)
                yield _event(part)
            yield b"data: [DONE]\n\n"
        except TransduceError as problem:
            yield _event(format_error(*describe_error(problem)))

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(content: Any) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


def _choice(number: int, content: dict[str, Any], finished: bool | None, log_probs: Any) -> dict[str, Any]:
    """Make the JSON of a text or a part of it. finished: False if the text was cut off, None if more parts follow."""
    reason = None if finished is None else "stop" if finished else "length"
    return {"index": number, **content, "logprobs": log_probs, "finish_reason": reason}


def _log_probs(text: Candidate | Completion) -> dict[str, Any] | None:
    if not isinstance(text, Completion) or text.log_probs is None:
        return None
    offsets = [*itertools.accumulate(map(len, text.tokens[:-1]), initial=0)]
    return {"tokens": text.tokens, "token_logprobs": text.log_probs, "text_offset": offsets}


def _usage(n_prompt: int, n_new: int) -> dict[str, int]:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


async def completions(call: Call) -> Response:
    """Continue prompts."""
    asked = call.parse(CompletionRequest)
    generator = call.service.generators().get(asked.model)
    if generator is None:
        route = call.service.route(name=asked.model)
        raise SettingsError(f"model '{route.name}' translates; use /v1/chat/completions")
    return await _generate(call, asked, generator, asked.prompt)


async def chat(call: Call) -> Response:
    """Translate the user's last message, or continue the messages with a language model."""
    asked = call.parse(ChatRequest)
    generator = call.service.generators().get(asked.model)
    if generator is not None:
        prompt = "\n".join(message.text() for message in asked.messages)
        return await _generate(call, asked, generator, [prompt])
    text = asked.source()
    call.take_texts([text])
    options = asked.search(text, call.service.limits)
    route = call.service.route(name=asked.model)
    if asked.stream:
        if options.n_best > 1:
            raise SettingsError(f"n = {options.n_best}: a stream has one translation; leave n out")
        return await asked.respond_in_parts(call, _translation_chunks(call, asked, text, route, options))
    (result,) = await translate_texts(call.service, [text], [route], options, end=call.end)
    return asked.respond(result.candidates, _translation_usage(result), result.note)


async def _generate(
    call: Call, asked: GenerationRequest, generator: AsyncTextGenerator, prompts: Sequence[str]
) -> Response:
    """Respond with `n` texts for each prompt, as a stream of their parts if requested."""
    limits = call.service.limits
    call.take_texts(list(prompts))
    options = asked.sampling(generator.generator.settings.decoding.max_length, limits)
    if len(prompts) * options.n_best > limits.max_texts:
        raise SettingsError(f"{len(prompts)} prompts, n = {options.n_best}: more than {limits.max_texts} texts")
    stop, end = asked.stop or (), call.end
    scored = isinstance(asked, CompletionRequest) and asked.logprobs is not None
    generate = partial(
        generator.generate, prompts, options, cut_prompt=asked.cut_prompt, stop=stop, end=end, log_probs=scored
    )
    if asked.stream:
        chunks = _generation_chunks(asked, in_parts(lambda on_part: generate(on_part=on_part)))
        return await asked.respond_in_parts(call, chunks)
    completed = await generate()
    return asked.respond(completed.texts, _usage(completed.n_prompt, completed.n_new))


async def _generation_chunks(
    asked: GenerationRequest, parts: AsyncIterator[tuple[int, str] | Completions]
) -> AsyncIterator[dict[str, Any]]:
    async for part in parts:
        if isinstance(part, tuple):
            yield asked.chunk(*part)
            continue
        for number, completion in enumerate(part.texts):
            yield asked.chunk(number, "", finished=completion.finished, log_probs=_log_probs(completion))
        if asked.wants_usage:
            yield {"choices": [], "usage": _usage(part.n_prompt, part.n_new)}


async def _translation_chunks(
    call: Call, asked: ChatRequest, text: str, route: Route, options: DecodingOptions
) -> AsyncIterator[dict[str, Any]]:
    """Yield a translation in chunks of a few sentences, each with the space before it."""
    parts = await offload(len(text) // SHORTEST, route.split, text, options)
    sentences, translated = parts[::2], list[Translation]()
    for first in range(0, len(sentences), _GROUP):
        last = first + _GROUP
        group = await call.service.translate(sentences[first:last], route, options, end=call.end, refuse=not first)
        translated += group.sentences
        before = max(first - 1, 0)  # include the last sentence sent, because the space may depend on it
        parts_of_group = parts[2 * before : 2 * last - 1 if last < len(sentences) else len(parts)]
        new = joined_parts([sentence.text for sentence in translated[before:]], parts_of_group)
        yield asked.chunk(0, "".join(new[first - before :]))
    yield asked.chunk(0, "", finished=all(sentence.finished for sentence in translated)) | join_notes(translated)
    if asked.wants_usage:
        yield {"choices": [], "usage": _translation_usage(TextTranslation(parts, route, translated))}


def _translation_usage(result: TextTranslation) -> dict[str, int]:
    """Count the tokens of the source and of the best translation."""
    steps = result.route.steps
    src, tgt = steps[0].translator.translator.tokenizers.src, steps[-1].translator.translator.tokenizers.tgt
    n_src = sum(map(len, src.encode_batch(list(result.parts[::2]))))
    n_tgt = sum(map(len, tgt.encode_batch([sentence.text for sentence in result.sentences])))
    return _usage(n_src, n_tgt)


def _models(service: Service) -> dict[str, dict[str, Any]]:
    routes = [name for route in service.routes for name in (route.name, f"{route.source}-{route.target}")]
    names = dict.fromkeys([*routes, *service.generators()])
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": "transduce"} for name in names}


async def models(call: Call) -> Response:
    """List the models."""
    return json_response({"object": "list", "data": list(_models(call.service).values())})


async def model(call: Call) -> Response:
    """Describe a model."""
    known, name = _models(call.service), call.request.path_params["id"]
    if name in known:
        return json_response(known[name])
    message = f"model '{name[:200]}'{nearest(name, list(known))}; available: {', '.join(known)}"
    return json_response(format_error(404, message), status=404)


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat, ChatRequest, error=format_error),
    Endpoint("POST", "/v1/completions", completions, CompletionRequest, error=format_error),
    Endpoint("GET", "/v1/models", models, error=format_error),
    Endpoint("GET", "/v1/models/{id}", model, error=format_error),
)
