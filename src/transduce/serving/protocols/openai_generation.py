"""Prompts that a language model continues, in OpenAI's form."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response

from transduce.config.section import MAX_SEED
from transduce.decoding.options import GenerationOptions, Sampling
from transduce.errors import SettingsError
from transduce.serving.async_generator import AsyncTextGenerator, Completions
from transduce.serving.http import Call, Items, json_response, refuse_unsupported
from transduce.serving.limits import Limits, check_at_most
from transduce.serving.protocols.openai_format import (
    Chat,
    Count,
    OpenAIRequest,
    Plain,
    choice,
    chunk,
    stream_chunks,
    usage,
)

_MAX_STOPS, _MAX_STOP = 4, 256
_UNSUPPORTED = (
    *("echo", "frequency_penalty", "functions", "logit_bias", "logprobs", "presence_penalty", "repetition_penalty"),
    *("response_format", "suffix", "tools", "top_logprobs"),
)
_NO_CHANGE: dict[str, Any] = {"repetition_penalty": 1, "response_format": {"type": "text"}}


class GenerationRequest(OpenAIRequest, extra="allow"):
    """How to sample; without a seed, each request draws anew. `_UNSUPPORTED` are refused, other fields are ignored.

    Extensions of the protocol: top_k; cut_prompt: cut the beginning off a prompt that is longer than the context.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    cut_prompt: bool = False
    best_of: Count | None = None

    def refuse_unsupported(self, *more: str) -> None:
        """Raises `SettingsError` for options that would change the answer, and are not supported; `more`: others."""
        asked = [name for name in (*_UNSUPPORTED, *more) if getattr(self, name, None) != _NO_CHANGE.get(name)]
        refuse_unsupported(self, asked)

    def sampling(self, default_length: int, limits: Limits) -> GenerationOptions:
        """The options, within limits. Raises `SettingsError`: they are beyond, or not supported."""
        self.refuse_unsupported()
        n, length = self.n or 1, self.max_length or min(default_length, limits.max_length)
        if self.best_of not in (None, n):
            raise SettingsError(f"best_of = {self.best_of}: must be n = {n}; leave it out")
        check_at_most("n", n, limits.max_beam)
        check_at_most("max_tokens", length, limits.max_length)
        return GenerationOptions(
            max_length=length,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_k=self.top_k or 0,
                top_p=1.0 if self.top_p is None else self.top_p,
            ),
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed,
            n_samples=n,
            cut_prompt=self.cut_prompt,
        )

    def stops(self) -> list[str]:
        """The strings before which a text ends."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > _MAX_STOPS or not all(0 < len(one) <= _MAX_STOP for one in stops):
            raise SettingsError(f"stop: must be at most {_MAX_STOPS} strings of 1 to {_MAX_STOP} characters")
        return stops


async def generate(
    call: Call, asked: GenerationRequest, generator: AsyncTextGenerator, prompts: Sequence[str], *, is_chat: bool
) -> Response:
    """Answer with `n` texts for each prompt, or with their parts as server-sent events."""
    limits = call.service.limits
    call.take_texts(list(prompts))
    options, stops = asked.sampling(generator.generator.settings.decoding.max_length, limits), asked.stops()
    if len(prompts) * options.n_samples > limits.max_texts:
        raise SettingsError(f"{len(prompts)} prompts, n = {options.n_samples}: more than {limits.max_texts} texts")
    form, seconds = Chat() if is_chat else Plain(), call.seconds()
    head = asked.head(form.kind)
    if asked.stream:
        parts = generator.stream(prompts, options, stop=stops, seconds=seconds)
        chunks = _chunks(parts, form, with_usage=asked.usage_in_stream)
        return await stream_chunks({**head, "object": form.chunk_object}, chunks)
    found = await generator.generate(prompts, options, stop=stops, seconds=seconds)
    choices = [choice(place, form.text(one.text), finished=one.finished) for place, one in enumerate(found.texts)]
    return json_response({**head, "object": form.object, "choices": choices, "usage": _usage(found)})


async def _chunks(
    parts: AsyncIterator[tuple[int, str] | Completions], form: Plain | Chat, *, with_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    async for part in parts:
        if isinstance(part, tuple):
            place, text = part
            yield chunk(place, form.part(text))
            continue
        for place, one in enumerate(part.texts):
            yield chunk(place, form.part(""), finished=one.finished)
        if with_usage:
            yield {"choices": [], "usage": _usage(part)}


def _usage(found: Completions) -> dict[str, int]:
    return usage(found.n_prompt, found.n_new)
