"""DeepL's glossaries, version 2 (https://developers.deepl.com/api-reference/glossaries)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from transduce.serving.glossaries import Glossaries, Glossary, parse_entries
from transduce.serving.http import Call, json_response
from transduce.serving.protocols.deepl import endpoint, format_error

_SEPARATORS = {"tsv": "\t", "csv": ","}
Language = Annotated[str, Field(max_length=35)]


class CreateRequest(BaseModel):
    """A new glossary."""

    name: Annotated[str, Field(max_length=1024)]
    source_lang: Language
    target_lang: Language
    entries: str
    entries_format: Literal["tsv", "csv"] = "tsv"


async def create(call: Call) -> Response:
    """Add a glossary for languages that are served."""
    asked = call.parse(CreateRequest)
    call.service.route(asked.source_lang, asked.target_lang)
    found = await asyncio.to_thread(_create, call.service.glossaries, asked)
    return json_response(_information(found), status=201)


def _create(glossaries: Glossaries, asked: CreateRequest) -> Glossary:
    terms = parse_entries(asked.entries, _SEPARATORS[asked.entries_format])
    return glossaries.create(asked.name, asked.source_lang, asked.target_lang, terms)


async def list_all(call: Call) -> Response:
    """All glossaries, without their entries."""
    return json_response({"glossaries": [_information(one) for one in call.service.glossaries.all()]})


async def show(call: Call) -> Response:
    """One glossary, without its entries."""
    found = call.service.glossaries.find(call.request.path_params["id"])
    return _missing() if found is None else json_response(_information(found))


async def entries(call: Call) -> Response:
    """The entries of a glossary, separated by tabs."""
    found = call.service.glossaries.find(call.request.path_params["id"])
    if found is None:
        return _missing()
    lines = "\n".join(f"{term}\t{translation}" for term, translation in found.terms.items())
    return Response(lines, media_type="text/tab-separated-values")


async def delete(call: Call) -> Response:
    """Remove a glossary."""
    if not await asyncio.to_thread(call.service.glossaries.delete, call.request.path_params["id"]):
        return _missing()
    return Response(status_code=204)


async def pairs(call: Call) -> Response:
    """The languages that glossaries may have."""
    known = dict.fromkeys((one.source, one.target) for one in call.service.routes())
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


def _missing() -> Response:
    return json_response(format_error(404, "there is no such glossary"), status=404)


ENDPOINTS = (
    endpoint("POST", "/v2/glossaries", create, is_change=True),
    endpoint("GET", "/v2/glossaries", list_all),
    endpoint("GET", "/v2/glossaries/{id}", show),
    endpoint("GET", "/v2/glossaries/{id}/entries", entries),
    endpoint("DELETE", "/v2/glossaries/{id}", delete, is_change=True),
    endpoint("GET", "/v2/glossary-language-pairs", pairs),
)
