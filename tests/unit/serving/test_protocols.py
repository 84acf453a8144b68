"""Common parts of the service's protocols, without a server."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import StreamingResponse

import marians
from transduce.decoding.queue import ExpiredError
from transduce.errors import SettingsError
from transduce.serving.access import Limits, OverloadedError
from transduce.serving.http import Call, Handler
from transduce.serving.protocols import deepl, huggingface, libretranslate, openai, own
from transduce.serving.protocols.own import token_ends
from transduce.serving.service import Service

FORM = b"application/x-www-form-urlencoded"


def call(service: Service | None = None, body: bytes = b"", **headers: bytes) -> Call:
    fields = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    request = Request({"type": "http", "headers": fields, "query_string": b"", "state": {}})
    return Call(service or Service([]), request, body=body)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ExpiredError("too\nlate"), 504, "server_error"),
        (OverloadedError("too\nlate", retry_after=1), 429, "rate_limit_error"),
    ],
)
def test_an_error_inside_a_stream_has_one_line_and_its_kind(error: Exception, status: int, kind: str) -> None:
    async def parts() -> AsyncIterator[dict[str, int]]:
        yield {"a": 1}
        raise error

    async def read(streamed: Any) -> list[Any]:
        assert isinstance(streamed, StreamingResponse)
        return [json.loads(bytes(event).removeprefix(b"data: ")) async for event in streamed.body_iterator]

    async def main() -> None:
        first, found = await read(await openai.stream_response(parts(), end=math.inf))
        assert first == {"a": 1}
        assert found == openai.format_error(status, "too late") and found["error"]["type"] == kind

    asyncio.run(main())


@pytest.mark.anyio
async def test_a_stream_that_is_not_read_ends_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "SENDING", 0.0)

    async def parts() -> AsyncIterator[int]:
        for number in range(100):
            yield number

    end = asyncio.get_running_loop().time() + 0.2
    response: Any = await openai.stream_response(parts(), end=end)
    events = []
    async for event in response.body_iterator:
        events.append(bytes(event))
        await asyncio.sleep(0.05)  # a slow reader
    assert 2 <= len(events) < 10 and b"error" in events[-1]


def test_forms_have_a_limit_of_fields() -> None:
    with pytest.raises(SettingsError, match="1,000 fields"):
        call(body=b"q=a&" * 1001, content_type=FORM).parse(libretranslate.LibreTranslateRequest)


def test_a_header_shortens_the_deadline() -> None:
    async def seconds(**headers: bytes) -> float:
        return call(**headers).deadline() - asyncio.get_running_loop().time()

    assert asyncio.run(seconds()) == pytest.approx(10, abs=1)
    for given, expected in ((b"100", 10), (b"inf", 10), (b"2.5", 2.5)):
        assert asyncio.run(seconds(x_request_timeout=given)) == pytest.approx(expected, abs=1)
    for bad in (b"x", b"-1", b"0", b"nan"):
        with pytest.raises(SettingsError, match="X-Request-Timeout"):
            asyncio.run(seconds(x_request_timeout=bad))


def test_runs_of_the_same_languages_are_listed_once() -> None:
    service, route = Service([]), SimpleNamespace(source="en", target="de")
    service.routes = [route, route]  # type: ignore[list-item]

    def answer(handler: Handler) -> Any:
        return json.loads(bytes(asyncio.run(handler(call(service))).body))  # type: ignore[arg-type]

    assert [one["targets"] for one in answer(libretranslate.languages)] == [["de"], []]
    assert answer(deepl.glossary_languages) == {"supported_languages": [{"source_lang": "en", "target_lang": "de"}]}


@pytest.mark.parametrize("name", ["name", "source_lang", "target_lang"])
def test_names_of_glossaries_are_bounded(name: str) -> None:
    body = {"name": "x", "source_lang": "en", "target_lang": "de", "entries": "a\tb", name: "de-" + "x" * 1025}
    with pytest.raises(SettingsError, match=f"{name}: .*at most"):
        call(body=json.dumps(body).encode()).parse(deepl.GlossaryRequest)


def test_ends_of_tokens_in_a_text() -> None:
    tokenizer = marians.tokenizers(joint=True).tgt
    for text in (*marians.LINES[:20], "long " * 50, ""):
        ids = tokenizer.encode(text)
        ends = token_ends(ids, tokenizer.decode)
        assert ends == [len(tokenizer.decode(ids[:n])) for n in range(1, len(ids) + 1)]
    sizes: list[int] = []
    token_ends(range(500), lambda ids: str(sizes.append(len(ids))))  # type: ignore[func-returns-value]
    assert max(sizes) <= 8


@pytest.mark.parametrize(
    ("model", "field", "item"),
    [
        (own.TranslationRequest, "text", 1),
        (own.TranslationRequest, "protect", 1),
        (own.TranslationRequest, "prefix", 1),
        (huggingface.HuggingFaceRequest, "inputs", 1),
        (deepl.DeepLRequest, "text", 1),
        (deepl.DeepLRequest, "ignore_tags", 1),
        (libretranslate.LibreTranslateRequest, "q", 1),
        (openai.ChatRequest, "messages", 1),
        (openai.ChatRequest, "messages", {"role": "user", "content": [{}] * 1000}),
        (openai.CompletionRequest, "stop", 1),
    ],
)
def test_the_first_wrong_item_of_a_list_ends_the_validation(model: type[BaseModel], field: str, item: object) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps({field: [item] * 1000}))
    assert caught.value.error_count() <= 5


@pytest.mark.parametrize("value", [123, None, {"a": "b"}])
def test_a_wrong_text_is_told_what_is_allowed(value: object) -> None:
    with pytest.raises(SettingsError, match=r"^text: Input should be a text or a list of texts; given: "):
        call(body=json.dumps({"text": value}).encode()).parse(own.TranslationRequest)


def test_limits_of_tokens_are_lowered_to_those_of_the_service() -> None:
    for limits, most in (
        ({"max_tokens": 10**6}, 1024),
        ({"max_completion_tokens": 1025}, 1024),
        ({"max_tokens": 9}, 9),
    ):
        asked = openai.ChatRequest.model_validate({"model": "gpt", "messages": [], **limits})
        assert asked.sampling(256, Limits()).max_length == most
        search = asked.search("A dog runs." * 500, Limits())
        assert ("max_length" in search.model_fields_set) == (most == 9) and (search.max_length == 9) == (most == 9)


def test_other_fields_of_a_translation_are_decoding_options() -> None:
    def options(fields: dict[str, Any]) -> Any:
        return call(body=json.dumps({"text": "a", **fields}).encode()).parse(own.TranslationRequest).options()

    given = {"beam": 3, "n_best": 2, "no_repeat_ngram": 2}
    found = options({**given, "length_penalty": None})
    assert found.model_dump(exclude_unset=True) == given
    assert options({"sample": True, "top_k": 5, "seed": 7}).top_k == 5
    for fields, message in (
        ({"splt": True}, "splt: no such field; did you mean 'split'"),
        ({"zz": None}, "zz: no such field"),
        ({"batch_tokens": 5}, "batch_tokens: no such field"),
        ({f"x{i}": 1 for i in range(100_000)}, "x0: no such field"),
        ({"beam": 0}, "beam = 0"),
        ({"temperature": 0.5}, "temperature: no effect on a search"),
    ):
        with pytest.raises(SettingsError, match=message):
            options(fields)
