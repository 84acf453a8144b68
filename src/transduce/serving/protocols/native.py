"""Our own protocol, `POST /v1/translate`: n-best lists, scores, prefixes, options of the search, streamed tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from transduce.decoding.options import TranslationOptions
from transduce.decoding.results import Translation
from transduce.errors import SettingsError, TransduceError
from transduce.serving.http import Call, Endpoint, json_response
from transduce.serving.service import Route
from transduce.serving.texts import TextTranslation, translate_texts

Text = Annotated[str, Field(strict=True)]


class TranslateRequest(BaseModel):
    """What is asked for.

    text: one text or several. prefix: what the translation of each starts with. split: into sentences. stream: tokens
    of one sentence as they are decoded. timeout: seconds, shorter than the service's deadline.
    """

    model_config = ConfigDict(extra="forbid")

    text: Text | list[Text]
    source: Text | None = None
    target: Text | None = None
    model: Text | None = None
    beam: Annotated[int, Field(ge=1)] | None = None
    n_best: Annotated[int, Field(ge=1)] = 1
    max_length: Annotated[int, Field(ge=1)] | None = None
    length_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    prefix: Text | list[Text] = ""
    split: bool = True
    stream: bool = False
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def options(self) -> TranslationOptions:
        """How to search. Scores are computed by beam search anyway."""
        return TranslationOptions(
            beam=self.beam, n_best=self.n_best, max_length=self.max_length, length_penalty=self.length_penalty
        )


async def translate(call: Call) -> Response:
    """Answer with `{"translations": [...]}`, or with a stream of server-sent events for one text."""
    asked = call.parse(TranslateRequest)
    texts = [asked.text] if isinstance(asked.text, str) else asked.text
    prefixes = [asked.prefix] if isinstance(asked.prefix, str) else asked.prefix
    if any(prefixes) and len(prefixes) != len(texts):
        raise SettingsError(f"{len(texts)} texts but {len(prefixes)} prefixes; give one each, empty for none")
    call.take_texts(texts)
    options = asked.options()
    call.service.limits.check_options(options)
    route = call.service.route(asked.source, asked.target, name=asked.model)
    if asked.stream:
        if len(texts) != 1:
            raise SettingsError(f"stream: for one sentence, not {len(texts)} texts; send several requests")
        parts = call.service.stream(texts[0], route, options, prefix=prefixes[0])
        return StreamingResponse(_events(parts, route), media_type="text/event-stream")
    found = await translate_texts(
        call.service,
        texts,
        [route] * len(texts),
        options,
        seconds=asked.timeout,
        split=asked.split,
        prefixes=prefixes if any(prefixes) else (),
    )
    return json_response({**_route(route), "translations": [_text(one) for one in found]})


async def _events(parts: AsyncIterator[str | Translation], route: Route) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            content = {"text": part} if isinstance(part, str) else {**_route(route), "translation": _translation(part)}
            yield b"data: " + to_json(content) + b"\n\n"
    except TransduceError as error:
        yield b"data: " + to_json({"error": str(error)}) + b"\n\n"


def _route(route: Route) -> dict[str, str]:
    return {"model": route.name, "source": route.source, "target": route.target}


def _translation(translation: Translation) -> dict[str, Any]:
    keys = ("text", "log_prob", "score", "finished")
    candidates = [{key: getattr(one, key) for key in keys} for one in translation.candidates]
    note = {"note": translation.note} if translation.note else {}
    return {"text": translation.text, "candidates": candidates, **note}


def _text(found: TextTranslation) -> dict[str, Any]:
    pairs = zip(found.parts[::2], found.sentences, strict=True)
    sentences = [{"source": source, **_translation(one)} for source, one in pairs if source]
    return {"text": found.text, "sentences": sentences}


async def models(call: Call) -> Response:
    """The models and their languages."""
    routes = [_route(route) for route in call.service.routes()]
    return json_response({"models": routes})


ENDPOINTS = (Endpoint("POST", "/v1/translate", translate), Endpoint("GET", "/v1/directions", models))
