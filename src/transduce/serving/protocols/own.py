"""Our own protocol, `POST /v1/translate`: n-best lists, scores, prefixes, options of the search, streamed tokens."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from transduce.config.decoding import DecodingOptions
from transduce.decoding.results import Translation
from transduce.errors import SettingsError, nearest
from transduce.serving.concurrency import in_parts, offload
from transduce.serving.http import Call, Endpoint, Items, Texts, json_response, stream_response
from transduce.serving.routes import Route, RouteTranslation
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.tags.protected import DEFAULT_KINDS, Kind
from transduce.serving.tags.translating import TextFormat, translate_formatted
from transduce.serving.texts import TextTranslation, translate_texts

Text = Annotated[str, Field(strict=True)]
_WINDOW = 8  # tokens
_WORDS = 20  # time of a sentence with words, relative to one without
_SWITCHES = {"true": list(DEFAULT_KINDS), "false": []}


def _kinds(value: Any) -> Any:
    """The kinds of text that `protect` names; true, false and a single name too."""
    given = str(value).lower() if isinstance(value, (bool, str)) else ""
    return _SWITCHES.get(given, [value] if given else value)


class TranslationRequest(BaseModel):
    """A request for translations.

    text: one text or several. prefix: what the translation of each starts with. split: into sentences. words: with the
    log-probability of each word. alignment: with the words of each sentence that translate which. stream: tokens of one
    sentence as they are decoded. format: of the texts; tags stay. protect: what else stays, True for addresses and
    placeholders; by default those in html and xml.
    """

    model_config = ConfigDict(extra="allow")

    text: Texts
    source: Text | None = None
    target: Text | None = None
    model: Text | None = None
    prefix: Text | Items[Text] = ""
    split: bool = True
    words: bool = False
    alignment: bool = False
    stream: bool = False
    format: Literal["text", "html", "xml"] = "text"
    protect: Annotated[Items[Kind], BeforeValidator(_kinds)] | None = None

    def text_format(self) -> TextFormat | None:
        """Parts to preserve, or None."""
        kinds = DEFAULT_KINDS if self.protect is None and self.format != "text" else self.protect or ()
        if self.format == "text" and not kinds:
            return None
        for name in ("prefix", "words", "alignment", "stream"):
            if getattr(self, name):
                raise SettingsError(f"{name}: not with format or protect; leave one of them out")
        rules = None if self.format == "text" else MarkupRules(kind=self.format)
        return TextFormat(rules, protect=kinds)

    def options(self) -> DecodingOptions:
        """The other fields: how to decode."""
        given, known = self.model_extra or {}, DecodingOptions.model_fields.keys() - {"batch_tokens"}
        unknown = next((name for name in given if name not in known), None)  # pydantic would make an error of each
        if unknown is not None:
            raise SettingsError(f"{unknown}: no such field{nearest(unknown, [*known, *type(self).model_fields])}")
        return DecodingOptions(**given)


async def translate(call: Call) -> Response:
    """Answer with `{"translations": [...]}`, or with a stream of server-sent events for one text."""
    asked = call.parse(TranslationRequest)
    texts, end = asked.text, call.deadline()
    prefixes = [asked.prefix] if isinstance(asked.prefix, str) else asked.prefix
    if asked.prefix != "" and len(prefixes) != len(texts):
        raise SettingsError(f"{len(texts)} texts but {len(prefixes)} prefixes; give one each, empty for none")
    call.take_texts(texts)
    call.service.limits.check_texts(prefixes)
    options = asked.options()
    call.service.limits.check_options(options)
    route = call.service.route(asked.source, asked.target, name=asked.model)
    if (form := asked.text_format()) is not None:
        routes = [route] * len(texts)
        formatted = await translate_formatted(call.service, texts, routes, form, options, end=end, split=asked.split)
        return json_response({**_route(route), "translations": [{"text": one} for one in formatted]})
    if asked.stream:
        if len(texts) != 1:
            raise SettingsError(f"stream: for one sentence, not {len(texts)} texts; send several requests")
        if asked.words or asked.alignment:
            raise SettingsError("stream: not with words or alignment; ask for them without stream")

        async def work(on_part: Callable[[str], object]) -> RouteTranslation:
            return await call.service.translate(texts, route, options, end=end, prefixes=prefixes, on_part=on_part)

        return await stream_response(_events(in_parts(work)), end=end)
    found = await translate_texts(
        call.service,
        texts,
        [route] * len(texts),
        options,
        end=end,
        split=asked.split,
        prefixes=prefixes if any(prefixes) else (),
        align=range(len(texts)) if asked.alignment else (),
        scores=asked.words,
    )
    n_sentences = sum(len(one.sentences) for one in found)

    def answer() -> Response:
        return json_response({**_route(route), "translations": [_text(one) for one in found]})

    return await offload(n_sentences * options.n_best * (_WORDS if asked.words else 1), answer)


def token_ends(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The end of each token in the text. Only a few tokens before it are decoded with it: with all, long texts take
    quadratic time.
    """

    def size(start: int, end: int) -> int:
        return len(decode(ids[max(0, start) : end]))

    return list(accumulate(size(n - _WINDOW, n) - size(n - _WINDOW, n - 1) for n in range(1, len(ids) + 1)))


def word_log_probs(text: str, ends: Sequence[int], log_probs: Sequence[float]) -> list[tuple[str, float]]:
    """The words of a text, each with the sum of the log-probabilities of its tokens, which end at `ends`.

    >>> word_log_probs("Ein Hund.", [3, 8, 9], [-0.1, -0.25, -0.25, -0.4])
    [('Ein', -0.1), ('Hund.', -0.5)]
    """
    words = [(found[0], found.end()) for found in re.finditer(r"\S+", text)]
    sums, place = [0.0] * len(words), 0
    for end, log_prob in zip(ends, log_probs, strict=False):  # the last one is of the end of the sentence
        while place + 1 < len(words) and end > words[place][1]:
            place += 1
        if words:
            sums[place] += log_prob
    return [(word, round(value, 4)) for (word, _), value in zip(words, sums, strict=True)]


async def _events(parts: AsyncIterator[str | RouteTranslation]) -> AsyncIterator[dict[str, Any]]:
    async for part in parts:
        if isinstance(part, str):
            yield {"text": part}
        else:
            yield {**_route(part.route), "translation": _translation(part.sentences[0])}


def _route(route: Route) -> dict[str, str]:
    return {"model": route.name, "source": route.source, "target": route.target}


def _translation(translation: Translation) -> dict[str, Any]:
    keys = ("text", "log_prob", "score", "finished")
    candidates = [{key: getattr(one, key) for key in keys} for one in translation.candidates]
    note = {"note": translation.note} if translation.note else {}
    return {"text": translation.text, "candidates": candidates, **note}


def _text(found: TextTranslation) -> dict[str, Any]:
    decode = found.route.runs[-1].translator.translator.tokenizers.tgt.decode

    def extras(place: int) -> dict[str, Any]:
        known: dict[str, Any] = {"alignment": found.links[place]} if found.links else {}
        if found.scores:
            one = found.sentences[place]
            known["words"] = word_log_probs(one.text, token_ends(one.ids, decode), found.scores[place].token_log_probs)
        return known

    sentences = [
        {"source": source, **_translation(one), **extras(place)}
        for place, (source, one) in enumerate(zip(found.parts[::2], found.sentences, strict=True))
        if source
    ]
    return {"text": found.text, "sentences": sentences}


async def models(call: Call) -> Response:
    routes = [_route(route) for route in call.service.routes]
    return json_response({"models": routes, "language_models": list(call.service.generators())})


ENDPOINTS = (Endpoint("POST", "/v1/translate", translate), Endpoint("GET", "/v1/directions", models))
