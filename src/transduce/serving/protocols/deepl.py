"""DeepL's protocol, version 2 (https://developers.deepl.com/api-reference): translation and glossaries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from transduce.errors import SettingsError
from transduce.serving.glossaries import Glossaries, Glossary, parse_entries
from transduce.serving.http import Call, Endpoint, Texts, json_response, refuse_unsupported
from transduce.serving.tags.markup import MarkupRules
from transduce.serving.texts import TextFormat, choose_routes, translate_or_keep
from transduce.text.languages import language_name

_UNLIMITED = 10**12  # reported limit of characters, because clients need one
_UNSUPPORTED = ("glossary_ids", "style_id", "translation_memory_id", "custom_instructions")

Names = Annotated[
    frozenset[str],
    Field(fail_fast=True),
    BeforeValidator(
        lambda value: value.split(",") if isinstance(value, str) else value or (),
        json_schema_input_type=str | list[str],
    ),
]
"""Names of tags: a list, or a text separated by commas."""
Language = Annotated[str, Field(max_length=35)]


class DeepLRequest(BaseModel, extra="allow"):
    """A request with the supported fields. Others are refused (`_UNSUPPORTED`) or ignored, as formality and context.

    split_sentences has no effect: line ends are always kept, and texts are always split, because a run trained on
    sentences would drop some of them.
    """

    text: Texts
    target_lang: str
    source_lang: str | None = None
    split_sentences: Literal["0", "1", "nonewlines", 0, 1, True, False] = "1"
    glossary_id: str | None = None
    tag_handling: Literal["xml", "html", "", "0"] | None = None
    ignore_tags: Names = frozenset()
    splitting_tags: Names = frozenset()
    non_splitting_tags: Names = frozenset()
    outline_detection: bool | Literal["0", "1"] = True


class LanguagesRequest(BaseModel):
    type: Literal["source", "target"] = "source"


async def translate(call: Call) -> Response:
    """Translate texts as DeepL's `/v2/translate` does."""
    asked = call.parse(DeepLRequest)
    refuse_unsupported(asked, _UNSUPPORTED)
    call.take_texts(asked.text)
    texts = asked.text
    routes, guesses = await choose_routes(call.service, texts, asked.source_lang, asked.target_lang, end=call.end)
    results = await translate_or_keep(call.service, texts, routes, guesses, _format(call, asked), end=call.end)
    translations = [
        {
            "detected_source_language": guess["language"].upper(),
            "billed_characters": len(text),
            "text": result.text,
            **result.note,
        }
        for text, result, guess in zip(texts, results, guesses, strict=True)
    ]
    return json_response({"translations": translations})


def _format(call: Call, asked: DeepLRequest) -> TextFormat | None:
    """Return the tag rules and glossary terms of a request, or None for plain text without a glossary."""
    terms: Mapping[str, str] = {}
    if asked.glossary_id:
        if not asked.source_lang:
            raise SettingsError("source_lang: must be given with glossary_id")
        terms = call.service.glossaries.terms(asked.glossary_id, asked.source_lang, asked.target_lang)
    if asked.tag_handling not in ("xml", "html"):
        return TextFormat(protect=(), terms=terms) if terms else None
    rules = MarkupRules(
        kind=asked.tag_handling,
        ignore=asked.ignore_tags,
        splitting=asked.splitting_tags,
        non_splitting=asked.non_splitting_tags,
        outline=asked.outline_detection not in (False, "0"),
    )
    return TextFormat(rules, terms=terms)


async def languages(call: Call) -> Response:
    """List the source or target languages."""
    side = call.parse(LanguagesRequest).type
    codes = dict.fromkeys(getattr(route, side) for route in call.service.routes)
    extra: dict[str, Any] = {"supports_formality": False} if side == "target" else {}
    return json_response([{"language": code.upper(), "name": language_name(code), **extra} for code in codes])


async def usage(call: Call) -> Response:
    """Report the number of characters translated since the service started. There is no limit."""
    return json_response({"character_count": call.n_translated, "character_limit": _UNLIMITED})


def format_error(status: int, message: str) -> dict[str, str]:
    return {"message": message}


class GlossaryRequest(BaseModel):
    name: Annotated[str, Field(max_length=1024)]
    source_lang: Language
    target_lang: Language
    entries: str
    entries_format: Literal["tsv", "csv"] = "tsv"


async def create_glossary(call: Call) -> Response:
    """Add a glossary for languages that are served."""
    asked = call.parse(GlossaryRequest)
    call.service.route(asked.source_lang, asked.target_lang)
    glossary = await asyncio.to_thread(_create, call.service.glossaries, asked)
    return json_response(_information(glossary), status=201)


def _create(glossaries: Glossaries, asked: GlossaryRequest) -> Glossary:
    terms = parse_entries(asked.entries, "," if asked.entries_format == "csv" else "\t")
    return glossaries.create(asked.name, asked.source_lang, asked.target_lang, terms)


async def list_glossaries(call: Call) -> Response:
    """List the glossaries."""
    return json_response({"glossaries": [_information(glossary) for glossary in call.service.glossaries.all()]})


async def show_glossary(call: Call) -> Response:
    """Describe a glossary."""
    return json_response(_information(call.service.glossaries.find(call.request.path_params["id"])))


async def list_entries(call: Call) -> Response:
    """List a glossary's entries as tab-separated values."""
    terms = call.service.glossaries.find(call.request.path_params["id"]).terms
    lines = "\n".join(f"{term}\t{translation}" for term, translation in terms.items())
    return Response(lines, media_type="text/tab-separated-values")


async def delete_glossary(call: Call) -> Response:
    """Delete a glossary."""
    await asyncio.to_thread(call.service.glossaries.delete, call.request.path_params["id"])
    return Response(status_code=204)


async def glossary_languages(call: Call) -> Response:
    """List the language pairs that a glossary may have."""
    known = dict.fromkeys((route.source, route.target) for route in call.service.routes)
    return json_response({"supported_languages": [{"source_lang": a, "target_lang": b} for a, b in known]})


def _information(glossary: Glossary) -> dict[str, Any]:
    return {
        "glossary_id": glossary.id,
        "name": glossary.name,
        "ready": True,
        "source_lang": glossary.source,
        "target_lang": glossary.target,
        "creation_time": glossary.created,
        "entry_count": len(glossary.terms),
    }


_endpoint = partial(Endpoint, error=format_error, unauthorized=403)

ENDPOINTS = (
    _endpoint("POST", "/v2/translate", translate, DeepLRequest),
    _endpoint("GET", "/v2/languages", languages),
    _endpoint("POST", "/v2/languages", languages, LanguagesRequest),
    _endpoint("GET", "/v2/usage", usage),
    _endpoint("POST", "/v2/usage", usage),
    _endpoint("POST", "/v2/glossaries", create_glossary, GlossaryRequest),
    _endpoint("GET", "/v2/glossaries", list_glossaries),
    _endpoint("GET", "/v2/glossaries/{id}", show_glossary),
    _endpoint("GET", "/v2/glossaries/{id}/entries", list_entries),
    _endpoint("DELETE", "/v2/glossaries/{id}", delete_glossary),
    _endpoint("GET", "/v2/glossary-language-pairs", glossary_languages),
)
