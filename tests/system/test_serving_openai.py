"""OpenAI's client with `transduce serve` of a translator and a language model: completions, and chats with both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import marians
from servers import Server
from transduce import DecodingOptions, Generator, Translator

pytestmark = pytest.mark.loopback
LINES = marians.LINES[:4]
PROMPTS = ["Der Hund", ""]
SAMPLING: dict[str, Any] = {"temperature": 1.1, "top_p": 0.9, "extra_body": {"top_k": 50}}
OPTIONS = DecodingOptions(sample=True, temperature=1.1, top_k=50, top_p=0.9, max_length=50, seed=4, n_best=2)
TEXT = f"{LINES[0]}\n\n{LINES[1]}\n"


@pytest.fixture(scope="module")
def generator(gpt: Path) -> Generator:
    return Generator.load(gpt)


@pytest.fixture(scope="module")
def server(toy: Path, gpt: Path) -> Iterator[Server]:
    server = Server(gpt, f"en-de={toy}")
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.log)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: Any, *, model: str = "en-de", **options: Any) -> Any:
    """The answer to a message of a user."""
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **options)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "en-de", "gpt"]
    assert client.models.retrieve("en-de").id == "en-de"
    with pytest.raises(openai.NotFoundError, match="did you mean 'toy'"):
        client.models.retrieve("toi")


@pytest.mark.parametrize("model", ["en-de", "toy"])
def test_the_last_user_message_is_translated(client: openai.OpenAI, translator: Translator, model: str) -> None:
    first, second = (one.text for one in translator.translate(LINES[:2]))
    found = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Translate."},
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
        ],
        temperature=0,
    )
    (choice,) = found.choices
    assert choice.message.content == f"{first}\n\n{second}\n" and choice.finish_reason in ("stop", "length")
    assert found.usage.prompt_tokens > 0 and found.model == model


def test_parts_of_a_message_are_lines(client: openai.OpenAI, translator: Translator) -> None:
    found = ask(client, [{"type": "text", "text": line} for line in LINES[:2]], model="en_DE")
    expected = "\n".join(one.text for one in translator.translate(LINES[:2]))
    assert found.choices[0].message.content == expected


def test_a_large_limit_of_tokens_reserves_no_more_than_a_text_needs(client: openai.OpenAI) -> None:
    text = f"{LINES[0]}\n" * 100  # 100 times 1,000 tokens times 5 beams would be refused
    found = ask(client, text, model="toy", max_tokens=10_000)
    assert (found.choices[0].message.content or "").count("\n") == 100


def test_several_choices_and_a_limit_of_tokens(client: openai.OpenAI, translator: Translator) -> None:
    options = DecodingOptions(n_best=3, max_length=3)
    (expected,) = translator.translate(LINES[:1], options)
    found = ask(client, LINES[0], n=3, max_tokens=3)
    assert [choice.message.content for choice in found.choices] == [one.text for one in expected.candidates]
    reasons = ["stop" if one.finished else "length" for one in expected.candidates]
    assert [choice.finish_reason for choice in found.choices] == reasons


@pytest.mark.parametrize("text", [TEXT, LINES[2], "", "\n", f" {LINES[0]}. {LINES[1]}.\n\n" * 17])
def test_a_stream_is_the_answer_in_parts(client: openai.OpenAI, text: str) -> None:
    whole = ask(client, text)
    chunks = list(ask(client, text, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_notes_are_beside_the_choices(client: openai.OpenAI, translator: Translator) -> None:
    text = f"{LINES[0]} ශ්‍රී"
    (expected,) = translator.translate([text])
    whole = ask(client, text, model="toy")
    *parts, last = ask(client, text, model="toy", stream=True)
    assert whole.model_extra == last.model_extra == {"note": expected.note} != {"note": ""}
    assert not any(part.model_extra for part in parts)


def test_bad_requests(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="no message has the role 'user'"):
        create(model="en-de", messages=[])
    with pytest.raises(openai.BadRequestError, match="a stream has one"):
        create(model="toy", messages=[{"role": "user", "content": "a"}], n=2, stream=True)


@pytest.mark.parametrize("model", ["toy", "gpt"])
@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"n": 17}, "n", "at most 16"),
        ({"n": "many"}, "n", "integer"),
        ({"messages": "text"}, "messages", "array"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages", "string"),
        ({"model": "gpt-9"}, "model", "available: toy"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not supported"),
        *(
            ({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages", f"type '{kind}'")
            for kind in ("image_url", "input_audio", "file")
        ),
        ({"messages": [{"role": "user", "content": "a" * 20_001}]}, None, "20,001 characters"),
    ],
)
def test_an_error_names_its_parameter(
    client: openai.OpenAI, model: str, arguments: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.chat.completions.create(**{"model": model, "messages": [{"role": "user", "content": "a"}], **arguments})
    assert refused.value.param == param


def test_completions_are_those_of_the_generator(client: openai.OpenAI, generator: Generator) -> None:
    expected = generator.generate(PROMPTS, OPTIONS)
    found = client.completions.create(model="gpt", prompt=PROMPTS, n=2, max_tokens=50, seed=4, best_of=2, **SAMPLING)
    assert [choice.text for choice in found.choices] == [one.text for one in expected]
    reasons = ["stop" if one.finished else "length" for one in expected]
    assert [(choice.index, choice.finish_reason) for choice in found.choices] == list(enumerate(reasons))
    assert found.usage.completion_tokens == sum(len(one.ids) for one in expected)
    again = [
        client.completions.create(model="gpt", prompt=PROMPTS[0], max_tokens=20, **SAMPLING).choices[0].text
        for _ in range(3)
    ]
    assert len(set(again)) > 1  # without a seed


def test_a_stream_of_completions_ends_before_a_stop_string(client: openai.OpenAI, generator: Generator) -> None:
    expected = [one.text for one in generator.generate(PROMPTS[:1], OPTIONS)]
    stop = expected[0][len(expected[0]) // 2 :][:3]
    arguments: dict[str, Any] = {"model": "gpt", "prompt": PROMPTS[0], "n": 2, "max_tokens": 50, "seed": 4, **SAMPLING}
    whole = client.completions.create(stop=[stop, "@@@"], **arguments)
    assert [choice.text for choice in whole.choices] == [text.partition(stop)[0] for text in expected]
    assert whole.choices[0].finish_reason == "stop"
    texts, last = ["", ""], None
    for chunk in client.completions.create(stop=stop, stream=True, stream_options={"include_usage": True}, **arguments):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        last = chunk
    assert texts == [choice.text for choice in whole.choices] and last.usage == whole.usage


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_have_the_log_probabilities_of_their_tokens(
    client: openai.OpenAI, generator: Generator, streamed: bool
) -> None:
    expected = generator.generate(PROMPTS, OPTIONS)
    asked: dict[str, Any] = {"prompt": PROMPTS, "n": 2, "max_tokens": 50, "seed": 4, "logprobs": 0, **SAMPLING}
    answers = client.completions.create(model="gpt", stream=True, **asked) if streamed else None
    chunks = answers or [client.completions.create(model="gpt", **asked)]
    choices = {choice.index: choice for chunk in chunks for choice in chunk.choices if choice.finish_reason}
    for number, text in enumerate(expected):
        found = choices[number].logprobs
        assert "".join(found.tokens) == text.text and len(found.token_logprobs) == len(text.ids)
        assert [
            text.text[start:][: len(token)] for start, token in zip(found.text_offset, found.tokens, strict=True)
        ] == (found.tokens)
        if not text.finished:  # else the end of the text counts too
            assert sum(found.token_logprobs) == pytest.approx(text.log_prob, abs=0.01)


def test_completions_without_log_probabilities(server: Server) -> None:
    for given in ({}, {"logprobs": None}, {"logprobs": False}):
        status, answer = server.request("/v1/completions", {"model": "gpt", "prompt": "a", "max_tokens": 2, **given})
        assert status == 200 and answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_continues_its_messages(client: openai.OpenAI, generator: Generator, streamed: bool) -> None:
    messages: Any = [{"role": "system", "content": "Der"}, {"role": "user", "content": "Hund"}]
    (expected,) = generator.generate(["Der\nHund"], DecodingOptions(max_length=20, sample=True, temperature=0))
    arguments: dict[str, Any] = {"model": "gpt", "messages": messages, "max_tokens": 20, "temperature": 0}
    if streamed:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**arguments).choices
        text, reason = choice.message.content or "", choice.finish_reason
    assert (text, reason) == (expected.text, "stop" if expected.finished else "length")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 17}, "n = 17.*16"),
        ({"prompt": ["a"] * 20, "n": 16}, "20 prompts"),
        ({"prompt": "x" * 60}, "context of this model is 40"),
        ({"prompt": []}, "prompt"),
        ({"extra_body": {"top_k": -2}}, "top_k = -2"),
        ({"stop": [""]}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logprobs": 1}, "logprobs.*0"),
        ({"extra_body": {"repetition_penalty": 2}}, "repetition_penalty"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format"),
        ({"best_of": 3}, "best_of = 3"),
        ({"model": "gtp"}, "did you mean 'gpt'"),
        ({"model": "toy"}, "toy.*chat/completions"),
    ],
)
def test_bad_completions(client: openai.OpenAI, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.completions.create(**{"model": "gpt", "prompt": "a", **arguments})


@pytest.mark.parametrize("model", ["gpt", "EN-de"])
def test_chats_refuse_options_that_would_change_the_answer(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": LINES[0]}], "max_tokens": 5}
    bad: dict[str, Any] = {"response_format": {"type": "json_object"}, "top_logprobs": 2, "logprobs": True}
    for name, value in (bad if model == "gpt" else bad | {"stop": ["Hund"]}).items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**asked, **{name: value})
    same: dict[str, Any] = {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "presence_penalty": 0}
    assert client.chat.completions.create(**asked, **same).choices


def test_a_language_model_has_no_languages(server: Server) -> None:
    status, found = server.request("/v1/translate", {"text": "a", "model": "gpt"})
    assert status == 400 and "language model" in found["error"]
    assert server.request("/v1/translate", {"text": LINES[0]})[1]["model"] == "toy"
    assert [one["code"] for one in server.request("/languages")[1]] == ["en", "de"]
    assert [one["language"] for one in server.request("/v2/languages?type=source")[1]] == ["EN"]
    assert [one["model"] for one in server.request("/v1/directions")[1]["models"]] == ["toy"]


def test_a_service_of_language_models_only(gpt: Path) -> None:
    server = Server(gpt)
    for path, content in [
        ("/detect", {"q": "a"}),
        ("/translate", {"q": "a", "target": "de"}),
        ("/v1/translate", {"text": "a"}),
        ("/v2/translate", {"text": ["a"], "target_lang": "DE"}),
        ("/frontend/settings", None),
    ]:
        status, answer = server.request(path, content)
        assert status == 400 and "no model here translates; language models: gpt" in str(answer)
    assert server.request("/languages") == (200, [])
    assert server.request("/v1/directions") == (200, {"models": [], "language_models": ["gpt"]})
    assert server.request("/v1/completions", {"model": "gpt", "prompt": "Der", "max_tokens": 2})[0] == 200
    assert server.stop() == 0
