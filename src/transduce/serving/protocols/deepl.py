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
from transduce.serving.tags.translating import TextFormat, translate_formatted
from transduce.serving.texts import choose_routes, translate_texts
from transduce.text.languages import language_name

_UNLIMITED = 10**12  # clients compare the number of characters with a limit
_UNSUPPORTED = ("glossary_ids", "style_id", "translation_memory_id", "custom_instructions")

Names = Annotated[
    frozenset[str],
    Field(fail_fast=True),
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value or ()),
]
"""Names of tags: a list, or a text with commas."""
Language = Annotated[str, Field(max_length=35)]


class DeepLRequest(BaseModel, extra="allow"):
    """The fields that clients send. Others are refused (`_UNSUPPORTED`), or ignored, such as formality and context."""

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

    def texts(self) -> list[str]:
        """The texts; without their line ends, if these do not end sentences. In documents they never do."""
        if self.split_sentences != "nonewlines" or self.tag_handling in ("xml", "html"):
            return self.text
        return [" ".join(text.splitlines()) for text in self.text]


class LanguagesRequest(BaseModel):
    type: Literal["source", "target"] = "source"


async def translate(call: Call) -> Response:
    asked = call.parse(DeepLRequest)
    refuse_unsupported(asked, _UNSUPPORTED)
    call.take_texts(asked.text)
    texts, end = asked.texts(), call.deadline()
    routes, _ = await choose_routes(call.service, texts, asked.source_lang, asked.target_lang, end=end)
    split = str(asked.split_sentences) not in ("0", "False")
    if (form := _format(call, asked)) is not None:
        found = await translate_formatted(call.service, texts, routes, form, end=end, split=split)
    else:
        results = await translate_texts(call.service, texts, routes, end=end, split=split)
        found = [one.text for one in results]
    translations = [
        {"detected_source_language": route.source.upper(), "text": one, "billed_characters": len(text)}
        for text, route, one in zip(asked.text, routes, found, strict=True)
    ]
    return json_response({"translations": translations})


def _format(call: Call, asked: DeepLRequest) -> TextFormat | None:
    """Parts to preserve and the glossary, or None."""
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
    side = call.parse(LanguagesRequest).type
    codes = dict.fromkeys(getattr(route, side) for route in call.service.routes)
    extra: dict[str, Any] = {"supports_formality": False} if side == "target" else {}
    return json_response([{"language": code.upper(), "name": language_name(code), **extra} for code in codes])


async def usage(call: Call) -> Response:
    """Characters that the service has translated since its start; there is no limit."""
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
    found = await asyncio.to_thread(_create, call.service.glossaries, asked)
    return json_response(_information(found), status=201)


def _create(glossaries: Glossaries, asked: GlossaryRequest) -> Glossary:
    terms = parse_entries(asked.entries, "," if asked.entries_format == "csv" else "\t")
    return glossaries.create(asked.name, asked.source_lang, asked.target_lang, terms)


async def list_glossaries(call: Call) -> Response:
    return json_response({"glossaries": [_information(one) for one in call.service.glossaries.all()]})


async def show_glossary(call: Call) -> Response:
    return json_response(_information(call.service.glossaries.find(call.request.path_params["id"])))


async def list_entries(call: Call) -> Response:
    terms = call.service.glossaries.find(call.request.path_params["id"]).terms
    lines = "\n".join(f"{term}\t{translation}" for term, translation in terms.items())
    return Response(lines, media_type="text/tab-separated-values")


async def delete_glossary(call: Call) -> Response:
    await asyncio.to_thread(call.service.glossaries.delete, call.request.path_params["id"])
    return Response(status_code=204)


async def glossary_languages(call: Call) -> Response:
    known = dict.fromkeys((one.source, one.target) for one in call.service.routes)
    return json_response({"supported_languages": [{"source_lang": a, "target_lang": b} for a, b in known]})


def _information(one: Glossary) -> dict[str, Any]:
    return {
        "glossary_id": one.id,
        "name": one.name,
        "ready": True,
        "source_lang": one.source,
        "target_lang": one.target,
        "creation_time": one.created,
        "entry_count": len(one.terms),
    }


_endpoint = partial(Endpoint, error=format_error, unauthorized=403)

ENDPOINTS = (
    _endpoint("POST", "/v2/translate", translate),
    _endpoint("GET", "/v2/languages", languages),
    _endpoint("POST", "/v2/languages", languages),
    _endpoint("GET", "/v2/usage", usage),
    _endpoint("POST", "/v2/usage", usage),
    _endpoint("POST", "/v2/glossaries", create_glossary, is_change=True),
    _endpoint("GET", "/v2/glossaries", list_glossaries),
    _endpoint("GET", "/v2/glossaries/{id}", show_glossary),
    _endpoint("GET", "/v2/glossaries/{id}/entries", list_entries),
    _endpoint("DELETE", "/v2/glossaries/{id}", delete_glossary, is_change=True),
    _endpoint("GET", "/v2/glossary-language-pairs", glossary_languages),
)
