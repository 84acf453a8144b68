"""LibreTranslate's protocol (https://docs.libretranslate.com), as its clients use it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from transduce.config.decoding import DecodingOptions
from transduce.errors import SettingsError
from transduce.serving.http import Call, Endpoint, Items, Texts, json_response
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.texts import TextFormat, choose_routes, detect, translate_or_keep
from transduce.text.languages import language_name

MAX_ALTERNATIVES = 10
_HTML = TextFormat(MarkupRules(kind="html"))


class LibreTranslateRequest(BaseModel):
    """Unknown fields are ignored, as in LibreTranslate. Null and empty fields get their defaults."""

    q: str | Items[str]
    source: str = "auto"
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, fields: Any) -> Any:
        is_mapping = isinstance(fields, dict)
        return {k: v for k, v in fields.items() if k == "q" or v not in (None, "")} if is_mapping else fields


class DetectRequest(BaseModel):
    q: Texts


class _Key(BaseModel):
    api_key: str | None = None


async def translate(call: Call) -> Response:
    """Translate texts as LibreTranslate's `/translate` does."""
    asked = call.parse(LibreTranslateRequest)
    texts = [asked.q] if isinstance(asked.q, str) else asked.q
    call.take_texts(texts)
    form = _HTML if asked.format == "html" else None
    # Texts with tags have no alternatives, because the tags of each alternative would have to be aligned too.
    options = DecodingOptions(n_best=1 if form else asked.alternatives + 1)
    call.service.limits.check_options(options)
    routes, guesses = await choose_routes(call.service, texts, asked.source, asked.target, end=call.end)
    results = await translate_or_keep(call.service, texts, routes, guesses, form, options, end=call.end)
    answer: dict[str, list[Any]] = {"translatedText": [result.text for result in results]}
    if any(result.note for result in results):
        answer["note"] = [result.note.get("note", "") for result in results]
    if asked.alternatives:
        answer["alternatives"] = [result.texts[1:] for result in results]
    if asked.source == "auto":
        answer["detectedLanguage"] = guesses
    return json_response({name: values[0] for name, values in answer.items()} if isinstance(asked.q, str) else answer)


async def detect_language(call: Call) -> Response:
    """Detect the language of a text."""
    texts = call.parse(DetectRequest).q
    call.take_texts(texts)
    call.service.route()  # raises an error if there is no translator
    known = {code: 1.0 for route in call.service.routes for code in route.languages}
    (guesses,) = await detect(["\n".join(texts)], known, end=call.end)
    return json_response(guesses)


async def languages(call: Call) -> Response:
    """List the source languages, with the targets of each."""
    targets = dict[str, dict[str, None]]()
    for route in call.service.routes:
        targets.setdefault(route.source, {})[route.target] = None
        targets.setdefault(route.target, {})
    return json_response(
        [{"code": code, "name": language_name(code), "targets": [*to]} for code, to in targets.items()]
    )


async def settings(call: Call) -> Response:
    """Return the settings that LibreTranslate's web page requests."""
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
    Endpoint("POST", "/translate", translate, LibreTranslateRequest, body_key=_body_key),
    Endpoint("POST", "/detect", detect_language, DetectRequest, body_key=_body_key),
    Endpoint("GET", "/languages", languages, is_open=True),
    Endpoint("GET", "/frontend/settings", settings, is_open=True),
)
