"""LibreTranslate's protocol (https://docs.libretranslate.com), as its clients use it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from transduce.config.decoding import DecodingOptions
from transduce.errors import SettingsError
from transduce.serving.concurrency import offload
from transduce.serving.http import Call, Endpoint, Items, Texts, json_response
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.tags.translating import TextFormat, translate_formatted
from transduce.serving.texts import choose_routes, detect, source_languages, translate_texts
from transduce.text.languages import language_name

MAX_ALTERNATIVES = 10
_HTML = TextFormat(MarkupRules(kind="html"))


class LibreTranslateRequest(BaseModel):
    """Unknown fields are ignored, as LibreTranslate does."""

    q: str | Items[str]
    source: str = "auto"
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0


class DetectRequest(BaseModel):
    q: Texts


class _Key(BaseModel):
    api_key: str | None = None


async def translate(call: Call) -> Response:
    asked = call.parse(LibreTranslateRequest)
    texts = [asked.q] if isinstance(asked.q, str) else asked.q
    call.take_texts(texts)
    options, end = DecodingOptions(n_best=asked.alternatives + 1), call.deadline()
    call.service.limits.check_options(options)
    source = "" if asked.source == "auto" else asked.source
    routes, guesses = await choose_routes(call.service, texts, source, asked.target, end=end)
    answer: dict[str, list[Any]] = {}
    if asked.format == "html":
        answer["translatedText"] = await translate_formatted(call.service, texts, routes, _HTML, end=end)
        alternatives: list[list[str]] = [[] for _ in texts]  # their tags would have to be aligned anew
    else:
        results = await translate_texts(call.service, texts, routes, options, end=end)
        answer["translatedText"] = [one.text for one in results]
        alternatives = []
        if asked.alternatives:
            n_sentences = sum(len(one.sentences) for one in results) * asked.alternatives
            alternatives = await offload(n_sentences, lambda: [one.alternatives(asked.alternatives) for one in results])
    if asked.alternatives:
        answer["alternatives"] = alternatives
    if not source:
        answer["detectedLanguage"] = guesses
    return json_response({name: values[0] for name, values in answer.items()} if isinstance(asked.q, str) else answer)


async def detect_language(call: Call) -> Response:
    texts = call.parse(DetectRequest).q
    call.take_texts(texts)
    return json_response(await detect("\n".join(texts), source_languages(call.service)))


async def languages(call: Call) -> Response:
    routes = call.service.routes
    codes = dict.fromkeys(code for route in routes for code in (route.source, route.target))
    targets = {code: list(dict.fromkeys(one.target for one in routes if one.source == code)) for code in codes}
    return json_response([{"code": code, "name": language_name(code), "targets": targets[code]} for code in codes])


async def settings(call: Call) -> Response:
    """The settings that LibreTranslate's own page asks for."""
    route = call.service.route()
    limits = call.service.limits
    return json_response(
        {
            "apiKeys": call.needs_key,
            "charLimit": limits.max_characters,
            "frontendTimeout": 500,
            "keyRequired": call.needs_key,
            "language": {
                "source": {"code": route.source, "name": language_name(route.source)},
                "target": {"code": route.target, "name": language_name(route.target)},
            },
            "suggestions": False,
            "supportedFilesFormat": [],
        }
    )


def _body_key(call: Call) -> str | None:
    try:
        return call.parse(_Key).api_key
    except SettingsError:
        return None


ENDPOINTS = (
    Endpoint("POST", "/translate", translate, body_key=_body_key),
    Endpoint("POST", "/detect", detect_language, body_key=_body_key),
    Endpoint("GET", "/languages", languages, is_open=True),
    Endpoint("GET", "/frontend/settings", settings, is_open=True),
)
