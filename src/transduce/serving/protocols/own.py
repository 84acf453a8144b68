"""Our own protocol, `POST /v1/translate`, with n-best lists, scores, prefixes and decoding options."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.responses import Response

from transduce.config.decoding import DecodingOptions
from transduce.errors import SettingsError, nearest
from transduce.serving.async_models import offload
from transduce.serving.http import Call, Endpoint, Items, Texts, json_response
from transduce.serving.service import Route
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.tags.protected import DEFAULT_KINDS, Kind
from transduce.serving.texts import TextFormat, TextTranslation, translate_formatted, translate_texts

Text = Annotated[str, Field(strict=True)]
_WINDOW = 8  # tokens that `token_ends` decodes together
_WORDS = 20  # cost of a sentence with `words`, relative to a sentence without
_SWITCHES = {"true": list(DEFAULT_KINDS), "false": []}


def _kinds(value: Any) -> Any:
    """Convert `protect` to a list of kinds. It may also be true, false or a single kind."""
    given = str(value).lower() if isinstance(value, (bool, str)) else ""
    return _SWITCHES.get(given, [value] if given else value)


class TranslationRequest(BaseModel):
    """A request for translations.

    text: one text or several. prefix: the beginning of each translation. split: split into sentences (null: the run's
    setting). words: add the log-probability of each word. alignment: add links between the words of each sentence
    and its translation. format: format of the texts, whose tags are preserved. protect: other parts to preserve;
    true: URLs, e-mail addresses, mentions and placeholders (the default for html and xml). Any decoding option may be
    added, such as beam, n_best or length_penalty.
    """

    model_config = ConfigDict(extra="allow")

    text: Texts
    source: Text | None = None
    target: Text | None = None
    model: Text | None = None
    prefix: Text | Items[Text] = ""
    split: bool | None = None
    words: bool = False
    alignment: bool = False
    format: Literal["text", "html", "xml"] = "text"
    protect: Annotated[Items[Kind], BeforeValidator(_kinds, json_schema_input_type=bool | Kind | list[Kind])] | None = (
        None
    )

    def text_format(self) -> TextFormat | None:
        """The format of the texts with the parts to preserve, or None for plain text without such parts."""
        kinds = DEFAULT_KINDS if self.protect is None and self.format != "text" else self.protect or ()
        if self.format == "text" and not kinds:
            return None
        for name in ("prefix", "words", "alignment"):
            if getattr(self, name):
                raise SettingsError(f"{name}: not with format or protect; leave one of them out")
        rules = None if self.format == "text" else MarkupRules(kind=self.format)
        return TextFormat(rules, protect=kinds)

    def options(self) -> DecodingOptions:
        """The decoding options, from the request's additional fields."""
        given, known = self.model_extra or {}, DecodingOptions.model_fields.keys() - {"batch_tokens"}
        # pydantic would report an error for every unknown field
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise SettingsError(f"{unknown}: no such field{nearest(unknown, [*known, *type(self).model_fields])}")
        return DecodingOptions(**given, **({} if self.split is None else {"split": self.split}))


async def translate(call: Call) -> Response:
    """Translate texts."""
    asked = call.parse(TranslationRequest)
    texts = asked.text
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
        formatted = await translate_formatted(call.service, texts, routes, form, options, end=call.end)
        return json_response(
            {**_route(route), "translations": [{"text": result.text, **result.note} for result in formatted]}
        )
    results = await translate_texts(
        call.service,
        texts,
        [route] * len(texts),
        options,
        end=call.end,
        prefixes=prefixes if any(prefixes) else (),
        align=range(len(texts)) if asked.alignment else (),
        scores=asked.words,
    )
    n_sentences = sum(len(result.sentences) for result in results)

    def answer() -> Response:
        return json_response({**_route(route), "translations": [_text(result) for result in results]})

    return await offload(n_sentences * options.n_best * (_WORDS if asked.words else 1), answer)


def token_ends(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """The end of each token in the decoded text, in characters.

    Each token is decoded with only a few tokens before it, since long texts would otherwise take quadratic time.
    """

    def size(start: int, end: int) -> int:
        return len(decode(ids[max(0, start) : end]))

    return list(accumulate(size(n - _WINDOW, n) - size(n - _WINDOW, n - 1) for n in range(1, len(ids) + 1)))


def word_log_probs(text: str, ends: Sequence[int], log_probs: Sequence[float]) -> list[tuple[str, float]]:
    """Return the words of a text, each with the summed log-probability of its tokens. `ends`: ends of the tokens.

    >>> word_log_probs("Ein Hund.", [3, 8, 9], [-0.1, -0.25, -0.25, -0.4])
    [('Ein', -0.1), ('Hund.', -0.5)]
    """
    words = [(match[0], match.end()) for match in re.finditer(r"\S+", text)]
    sums, i = [0.0] * len(words), 0
    # the last log-probability belongs to the end of the sentence
    for end, log_prob in zip(ends, log_probs, strict=False):
        while i + 1 < len(words) and end > words[i][1]:
            i += 1
        if words:
            sums[i] += log_prob
    return [(word, round(value, 4)) for (word, _), value in zip(words, sums, strict=True)]


def _route(route: Route) -> dict[str, str]:
    return {"model": route.name, "source": route.source, "target": route.target}


def _text(result: TextTranslation) -> dict[str, Any]:
    decode = result.route.steps[-1].translator.translator.tokenizers.tgt.decode

    def extras(number: int) -> dict[str, Any]:
        known: dict[str, Any] = {"alignment": result.links[number]} if result.links else {}
        if result.scores:
            sentence = result.sentences[number]
            known["words"] = word_log_probs(
                sentence.text, token_ends(sentence.ids, decode), result.scores[number].token_log_probs
            )
        return known

    sentences = [
        {"source": source, **sentence.to_json(), **extras(number)}
        for number, (source, sentence) in enumerate(zip(result.parts[::2], result.sentences, strict=True))
        if source
    ]
    return {"text": result.text, "sentences": sentences}


async def models(call: Call) -> Response:
    """List the languages that are served, and the language models."""
    routes = [_route(route) for route in call.service.routes]
    return json_response({"models": routes, "language_models": list(call.service.generators())})


ENDPOINTS = (
    Endpoint("POST", "/v1/translate", translate, TranslationRequest),
    Endpoint("GET", "/v1/directions", models),
)
