"""Hugging Face's inference protocol, as `huggingface_hub.InferenceClient(model=URL).translation` uses it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from transduce.serving.http import Call, Endpoint, Texts, json_response
from transduce.serving.texts import translate_texts


class Parameters(BaseModel):
    """Languages of the texts. Other parameters are ignored."""

    src_lang: str | None = None
    tgt_lang: str | None = None


class HuggingFaceRequest(BaseModel):
    inputs: Texts
    parameters: Parameters | None = None


async def translation(call: Call) -> Response:
    """Translate texts as Hugging Face's inference API does."""
    asked = call.parse(HuggingFaceRequest)
    call.take_texts(asked.inputs)
    parameters = asked.parameters or Parameters()
    name: Any = call.request.path_params.get("model")
    route = call.service.route(parameters.src_lang, parameters.tgt_lang, name=name)
    results = await translate_texts(call.service, asked.inputs, [route] * len(asked.inputs), end=call.end)
    return json_response([{"translation_text": result.text, **result.note} for result in results])


ENDPOINTS = (
    Endpoint("POST", "/", translation, HuggingFaceRequest),
    Endpoint("POST", "/models/{model}", translation, HuggingFaceRequest),
)
