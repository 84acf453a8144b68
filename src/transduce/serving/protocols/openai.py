"""OpenAI's protocol (https://platform.openai.com/docs/api-reference): chats and completions.

With a language model, both continue a prompt. With a run that translates, a chat translates its last user message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import field_validator
from starlette.responses import Response

from transduce.decoding.options import TranslationOptions
from transduce.decoding.results import Translation
from transduce.errors import SettingsError, nearest
from transduce.serving.concurrency import offload
from transduce.serving.http import Call, Endpoint, Items, Texts, json_response, translation_options
from transduce.serving.protocols.openai_format import Chat, Message, choice, chunk, format_error, stream_chunks, usage
from transduce.serving.protocols.openai_generation import GenerationRequest, generate
from transduce.serving.routes import Route
from transduce.serving.sentences import join_sentences, split_sentences
from transduce.serving.service import Service
from transduce.serving.texts import SHORTEST, TextTranslation, translate_texts

_CHAT = Chat()


class ChatRequest(GenerationRequest):
    """A chat. A translation ignores temperature, top_p, top_k and seed; its `n` are the best ones."""

    messages: Items[Message]

    def source(self) -> str:
        """The last message of the user."""
        texts = [message.text() for message in self.messages if message.role == "user"]
        if not texts:
            raise SettingsError("messages: no message has the role 'user'; its content is what is translated")
        return texts[-1]

    def search(self) -> TranslationOptions:
        """How to translate. Raises `SettingsError`: options that are not supported."""
        self.refuse_unsupported("stop")
        return translation_options(n_best=self.n or 1, max_length=self.max_length)


class CompletionRequest(GenerationRequest):
    """Prompts that a language model continues."""

    prompt: Texts
    logprobs: Any = None

    @field_validator("logprobs")
    @classmethod
    def _is_asked_for(cls, value: Any) -> Any:
        return value if value is None else value is not False  # 0: those of the tokens themselves


async def completions(call: Call) -> Response:
    """Answer with what continues the prompts."""
    asked = call.parse(CompletionRequest)
    generator = call.service.generators().get(asked.model)
    if generator is None:
        route = call.service.route(name=asked.model)
        raise SettingsError(f"model '{route.name}' translates; use /v1/chat/completions")
    if not asked.prompt:
        raise SettingsError("prompt: the list is empty; give at least one text")
    return await generate(call, asked, generator, asked.prompt, is_chat=False)


async def chat(call: Call) -> Response:
    """Answer with a chat completion, or with its chunks as server-sent events."""
    asked = call.parse(ChatRequest)
    generator = call.service.generators().get(asked.model)
    if generator is not None:
        prompt = "\n".join(message.text() for message in asked.messages)
        return await generate(call, asked, generator, [prompt], is_chat=True)
    text, options = asked.source(), asked.search()
    call.take_texts([text])
    call.service.limits.check_options(options)
    route = call.service.route(name=asked.model)
    head = asked.head(_CHAT.kind)
    if asked.stream:
        if options.n_best > 1:
            raise SettingsError(f"n = {options.n_best}: a stream has one translation; leave n out")
        chunks = _chunks(call, text, route, options, with_usage=asked.usage_in_stream)
        return await stream_chunks({**head, "object": _CHAT.chunk_object}, chunks)
    (found,) = await translate_texts(call.service, [text], [route], options, seconds=call.seconds())
    choices = [
        choice(place, _CHAT.text(found.alternative(place)), finished=_finished(found.sentences, place))
        for place in range(options.n_best)
    ]
    return json_response({**head, "object": _CHAT.object, "choices": choices, "usage": _usage(route, found)})


def _finished(sentences: Sequence[Translation], place: int = 0) -> bool:
    return all(one.candidates[min(place, len(one.candidates) - 1)].finished for one in sentences)


def _usage(route: Route, found: TextTranslation) -> dict[str, int]:
    """Numbers of tokens: of the source, and of the best translation."""
    src = route.runs[0].translator.translator.tokenizers.src
    tgt = route.runs[-1].translator.translator.tokenizers.tgt
    n_src = sum(map(len, src.encode_batch(list(found.parts[::2]))))
    n_tgt = sum(map(len, tgt.encode_batch([one.text for one in found.sentences])))
    return usage(n_src, n_tgt)


async def _chunks(
    call: Call, text: str, route: Route, options: TranslationOptions, *, with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a translation, sentence by sentence; a sentence grows as it is decoded."""
    parts = await offload(len(text) // SHORTEST, split_sentences, text, route.source)
    found, done, known = list[Translation](), "", ""
    end, languages = call.service.deadline(call.seconds()), (route.source, route.target)
    for place, sentence in enumerate(parts[::2]):
        before = [one.text for one in found[-1:]]  # all of them would take quadratic time
        async for part in call.service.stream(sentence, route, options, end=end, refuse=not place):
            now = part if isinstance(part, str) else part.text
            if isinstance(part, Translation):
                found.append(part)
            last = join_sentences([*before, now], parts[max(0, 2 * place - 2) : 2 * place + 1], *languages)
            whole = done + last[sum(map(len, before)) :]
            if now and whole.startswith(known) and whole != known:
                yield chunk(0, _CHAT.part(whole[len(known) :]))
                known = whole
        done = whole
    whole = join_sentences([one.text for one in found], parts, *languages)
    if whole.startswith(known) and whole != known:  # a line end
        yield chunk(0, _CHAT.part(whole[len(known) :]))
    yield chunk(0, _CHAT.part(""), finished=_finished(found))
    if with_usage:
        yield {"choices": [], "usage": _usage(route, TextTranslation(tuple(parts), tuple(found), route))}


def _models(service: Service) -> dict[str, dict[str, Any]]:
    """What requests may give as model, by name."""
    routes = [name for route in service.routes() for name in (route.name, f"{route.source}-{route.target}")]
    names = dict.fromkeys([*routes, *service.generators()])
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": "transduce"} for name in names}


async def models(call: Call) -> Response:
    """All models."""
    return json_response({"object": "list", "data": list(_models(call.service).values())})


async def model(call: Call) -> Response:
    """One model."""
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
