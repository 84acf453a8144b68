"""OpenAI's client with `transduce serve`: a translation as a chat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import marians
from servers import Server
from transduce import TranslationOptions, Translator

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
LINES = marians.LINES[:4]
TEXT = f"{LINES[0]}\n\n{LINES[1]}\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marians.make_run(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="module")
def translator(run: Path) -> Translator:
    return Translator.load(run)


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[openai.OpenAI]:
    server = Server(f"en-de={run}")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.log)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy", "en-de"]


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
    assert found.usage is not None and found.usage.prompt_tokens > 0 and found.model == model


def test_several_choices_and_a_limit_of_tokens(client: openai.OpenAI, translator: Translator) -> None:
    options = TranslationOptions(n_best=3, max_length=3)
    (expected,) = translator.translate(LINES[:1], options)
    found = client.chat.completions.create(
        model="en-de", messages=[{"role": "user", "content": LINES[0]}], n=3, max_tokens=3
    )
    assert [choice.message.content for choice in found.choices] == [one.text for one in expected.candidates]
    reasons = ["stop" if one.finished else "length" for one in expected.candidates]
    assert [choice.finish_reason for choice in found.choices] == reasons


@pytest.mark.parametrize("text", [TEXT, LINES[2], "", "\n"])
def test_a_stream_is_the_answer_in_parts(client: openai.OpenAI, text: str) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": text}]
    whole = client.chat.completions.create(model="en-de", messages=messages)
    stream = client.chat.completions.create(
        model="en-de", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_bad_requests(client: openai.OpenAI) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="no message has the role 'user'"):
        create(model="en-de", messages=[])
    with pytest.raises(openai.BadRequestError, match="available: toy"):
        create(model="gpt-9", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="a stream has one"):
        create(model="toy", messages=[{"role": "user", "content": "a"}], n=2, stream=True)
    with pytest.raises(openai.BadRequestError, match="at most 16"):
        create(model="toy", messages=[{"role": "user", "content": "a"}], n=17)
