"""OpenAI's protocol (https://platform.openai.com/docs/api-reference): chats and completions.

With a language model, both continue a prompt. With a run that translates, a chat translates its last user message.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from transduce.config.decoding import DecodingOptions
from transduce.config.section import MAX_SEED
from transduce.decoding.results import Translation
from transduce.errors import SettingsError, nearest
from transduce.serving.async_generator import AsyncTextGenerator, Completions
from transduce.serving.concurrency import in_parts, offload
from transduce.serving.http import (
    Call,
    Endpoint,
    Items,
    Texts,
    json_response,
    refuse_unsupported,
    stream_response,
)
from transduce.serving.limits import Limits, check_at_most
from transduce.serving.routes import Route
from transduce.serving.service import Service
from transduce.serving.texts import SHORTEST, TextTranslation, joined_parts, split_sentences, translate_texts

_GROUP = 16  # sentences that a stream sends together
_MAX_STOPS, _MAX_STOP = 4, 256
_UNSUPPORTED = (
    *("echo", "frequency_penalty", "functions", "logit_bias", "logprobs", "presence_penalty", "repetition_penalty"),
    *("response_format", "suffix", "tools", "top_logprobs"),
)
_NO_CHANGE: dict[str, Any] = {"repetition_penalty": 1, "response_format": {"type": "text"}}
_numbers = itertools.count(1)

Count = Annotated[int, Field(ge=1)]


def format_error(status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class GenerationRequest(BaseModel, extra="allow"):
    """The fields of chats and completions, and the form of their answers.

    `_UNSUPPORTED` are refused, other fields are ignored. Without a seed, each request draws anew. model: the name of a
    run, or languages such as en-de. n: outputs for each prompt. Extensions of the protocol: top_k; cut_prompt: cut the
    beginning off a prompt that is longer than the context.
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
    stop: str | Items[str] | None = None
    cut_prompt: bool = False
    best_of: Count | None = None

    @property
    def max_length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def content(self, text: str) -> dict[str, Any]:
        """The form of a whole text."""
        return {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        """The form of a part of a text."""
        return {"text": text}

    def respond(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> Response:
        return json_response({**self._head(), "object": self.object, "choices": choices, "usage": usage})

    async def respond_in_parts(self, chunks: AsyncIterator[dict[str, Any]], end: float) -> Response:
        head = {**self._head(), "object": self.chunk_object}
        parts = ({**head, **one} async for one in chunks)
        return await stream_response(parts, format_error, end=end, last="[DONE]")

    def _head(self) -> dict[str, Any]:
        return {"id": f"{self.kind}-{next(_numbers)}", "created": int(time.time()), "model": self.model}

    def chunk(self, place: int, text: str, *, finished: bool | None = None) -> dict[str, Any]:
        """A part of a text. `finished`: see `_choice`."""
        return {"choices": [_choice(place, self.part(text), finished=finished)]}

    def usage_chunks(self, usage: dict[str, int]) -> list[dict[str, Any]]:
        """The chunk with the numbers of tokens, if the client asked for it."""
        is_wanted = self.stream_options is not None and self.stream_options.include_usage
        return [{"choices": [], "usage": usage}] if is_wanted else []

    def refuse_unsupported(self, *more: str) -> None:
        """Raises `SettingsError` for options that would change the answer, and are not supported; `more`: others."""
        asked = [name for name in (*_UNSUPPORTED, *more) if getattr(self, name, None) != _NO_CHANGE.get(name)]
        refuse_unsupported(self, asked)

    def sampling(self, default_length: int, limits: Limits) -> DecodingOptions:
        """The options, within limits. Raises `SettingsError`: they are beyond, or not supported."""
        self.refuse_unsupported()
        n, length = self.n or 1, self.max_length or min(default_length, limits.max_length)
        if self.best_of not in (None, n):
            raise SettingsError(f"best_of = {self.best_of}: must be n = {n}; leave it out")
        check_at_most("n", n, limits.max_beam)
        check_at_most("max_tokens", length, limits.max_length)
        return DecodingOptions(
            max_length=length,
            n_best=n,
            sample=True,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
        )

    def stops(self) -> list[str]:
        """The strings before which a text ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MAX_STOPS or not all(0 < len(one) <= _MAX_STOP for one in stops):
            raise SettingsError(f"stop: must be at most {_MAX_STOPS} strings of 1 to {_MAX_STOP} characters")
        return stops


class CompletionRequest(GenerationRequest):
    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"

    prompt: Texts
    logprobs: Annotated[bool, BeforeValidator(lambda value: value is not None and value is not False)] = False
    """Whether log-probabilities are asked for: by a number of alternatives, of which 0 asks for those of the tokens."""


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    role: str
    content: str | Items[TextPart] | None = None

    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(GenerationRequest):
    """A chat. A translation ignores temperature, top_p, top_k and seed; its `n` are the best ones."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    messages: Items[Message]

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if text else {}}

    def source(self) -> str:
        """The last message of the user."""
        texts = [message.text() for message in self.messages if message.role == "user"]
        if not texts:
            raise SettingsError("messages: no message has the role 'user'; its content is what is translated")
        return texts[-1]

    def search(self) -> DecodingOptions:
        """The options of the translation. Raises `SettingsError` for options that are not supported."""
        self.refuse_unsupported("stop")
        return DecodingOptions(n_best=self.n or 1, max_length=self.max_length)


def _choice(place: int, content: dict[str, Any], *, finished: bool | None) -> dict[str, Any]:
    """A text, or a part of one. finished: whether it is complete, not cut off; None: more parts follow."""
    reason = None if finished is None else "stop" if finished else "length"
    return {"index": place, **content, "logprobs": None, "finish_reason": reason}


def _usage(n_prompt: int, n_new: int) -> dict[str, int]:
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


async def completions(call: Call) -> Response:
    asked = call.parse(CompletionRequest)
    generator = call.service.generators().get(asked.model)
    if generator is None:
        route = call.service.route(name=asked.model)
        raise SettingsError(f"model '{route.name}' translates; use /v1/chat/completions")
    if not asked.prompt:
        raise SettingsError("prompt: the list is empty; give at least one text")
    return await _generate(call, asked, generator, asked.prompt)


async def chat(call: Call) -> Response:
    asked = call.parse(ChatRequest)
    generator = call.service.generators().get(asked.model)
    if generator is not None:
        prompt = "\n".join(message.text() for message in asked.messages)
        return await _generate(call, asked, generator, [prompt])
    text, options = asked.source(), asked.search()
    call.take_texts([text])
    call.service.limits.check_options(options)
    route, end = call.service.route(name=asked.model), call.deadline()
    if asked.stream:
        if options.n_best > 1:
            raise SettingsError(f"n = {options.n_best}: a stream has one translation; leave n out")
        return await asked.respond_in_parts(_translation_chunks(call, asked, text, route, options, end), end)
    (found,) = await translate_texts(call.service, [text], [route], options, end=end)
    choices = [
        _choice(place, asked.content(found.alternative(place)), finished=_finished(found.sentences, place))
        for place in range(options.n_best)
    ]
    return asked.respond(choices, _translation_usage(found))


async def _generate(
    call: Call, asked: GenerationRequest, generator: AsyncTextGenerator, prompts: Sequence[str]
) -> Response:
    """Answer with `n` texts for each prompt, or with their parts."""
    limits = call.service.limits
    call.take_texts(list(prompts))
    options, stops = asked.sampling(generator.generator.settings.decoding.max_length, limits), asked.stops()
    if len(prompts) * options.n_best > limits.max_texts:
        raise SettingsError(f"{len(prompts)} prompts, n = {options.n_best}: more than {limits.max_texts} texts")
    end = call.deadline()
    generate = partial(generator.generate, prompts, options, cut_prompt=asked.cut_prompt, stop=stops, end=end)
    if asked.stream:
        chunks = _generation_chunks(asked, in_parts(lambda on_part: generate(on_part=on_part)))
        return await asked.respond_in_parts(chunks, end)
    found = await generate()
    choices = [_choice(place, asked.content(one.text), finished=one.finished) for place, one in enumerate(found.texts)]
    return asked.respond(choices, _usage(found.n_prompt, found.n_new))


async def _generation_chunks(
    asked: GenerationRequest, parts: AsyncIterator[tuple[int, str] | Completions]
) -> AsyncIterator[dict[str, Any]]:
    async for part in parts:
        if isinstance(part, tuple):
            yield asked.chunk(*part)
            continue
        for place, one in enumerate(part.texts):
            yield asked.chunk(place, "", finished=one.finished)
        for last in asked.usage_chunks(_usage(part.n_prompt, part.n_new)):
            yield last


async def _translation_chunks(
    call: Call, asked: ChatRequest, text: str, route: Route, options: DecodingOptions, end: float
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a translation: a few sentences at a time, with the space before them."""
    parts = await offload(len(text) // SHORTEST, split_sentences, text, route.source)
    sentences, found = parts[::2], list[Translation]()
    for first in range(0, len(sentences), _GROUP):
        last = first + _GROUP
        group = await call.service.translate(sentences[first:last], route, options, end=end, refuse=not first)
        found += group.sentences
        before = max(first - 1, 0)  # the sentence before these, which has been sent: the space may depend on it
        some = parts[2 * before : 2 * last - 1 if last < len(sentences) else len(parts)]
        new = joined_parts([one.text for one in found[before:]], some, *route.languages)
        yield asked.chunk(0, "".join(new[first - before :]))
    yield asked.chunk(0, "", finished=_finished(found))
    for chunk in asked.usage_chunks(_translation_usage(TextTranslation(tuple(parts), route, tuple(found)))):
        yield chunk


def _finished(sentences: Sequence[Translation], place: int = 0) -> bool:
    return all(one.candidates[min(place, len(one.candidates) - 1)].finished for one in sentences)


def _translation_usage(found: TextTranslation) -> dict[str, int]:
    """Numbers of tokens: of the source, and of the best translation."""
    runs = found.route.runs
    src, tgt = runs[0].translator.translator.tokenizers.src, runs[-1].translator.translator.tokenizers.tgt
    n_src = sum(map(len, src.encode_batch(list(found.parts[::2]))))
    n_tgt = sum(map(len, tgt.encode_batch([one.text for one in found.sentences])))
    return _usage(n_src, n_tgt)


def _models(service: Service) -> dict[str, dict[str, Any]]:
    """The models that requests may name."""
    routes = [name for route in service.routes for name in (route.name, f"{route.source}-{route.target}")]
    names = dict.fromkeys([*routes, *service.generators()])
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": "transduce"} for name in names}


async def models(call: Call) -> Response:
    return json_response({"object": "list", "data": list(_models(call.service).values())})


async def model(call: Call) -> Response:
    known, name = _models(call.service), call.request.path_params["id"]
    if name in known:
        return json_response(known[name])
    message = f"model '{name[:200]}'{nearest(name, list(known))}; available: {', '.join(known)}"
    return json_response(format_error(404, message), status=404)


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat, error=format_error),
    Endpoint("POST", "/v1/completions", completions, error=format_error),
    Endpoint("GET", "/v1/models", models, error=format_error),
    Endpoint("GET", "/v1/models/{id}", model, error=format_error),
)
