"""What the endpoints of OpenAI's protocol share: requests, server-sent events, errors."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from transduce.serving.http import Items, stream_response

_numbers = itertools.count(1)

Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A part of a message: only text."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat."""

    role: str
    content: str | Items[Part] | None = None

    def text(self) -> str:
        """The text, of all parts."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(BaseModel):
    """Whether the stream ends with the number of tokens."""

    include_usage: bool = False


class OpenAIRequest(BaseModel):
    """The fields that all endpoints have. model: the name of a run, or languages such as en-de. n: outputs."""

    model: str
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def max_length(self) -> int | None:
        """The most new tokens, if given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def head(self, kind: str) -> dict[str, Any]:
        """How all answers start, and all chunks of a stream. kind: chatcmpl, cmpl."""
        return {"id": f"{kind}-{next(_numbers)}", "created": int(time.time()), "model": self.model}


def usage(n_prompt: int, n_new: int) -> dict[str, int]:
    """Numbers of tokens."""
    return {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}


class Plain:
    """The form of a completion."""

    kind, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def text(self, text: str) -> dict[str, Any]:
        """A whole text."""
        return {"text": text}

    def part(self, text: str) -> dict[str, Any]:
        """A part of a text."""
        return {"text": text}


class Chat:
    """The form of a message in a chat."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def text(self, text: str) -> dict[str, Any]:
        """A whole text."""
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str) -> dict[str, Any]:
        """A part of a text."""
        return {"delta": {"role": "assistant", "content": text} if text else {}}


def choice(place: int, content: dict[str, Any], *, finished: bool | None = None) -> dict[str, Any]:
    """A text, or a part of one. finished: whether it is complete, not cut off; None: more parts follow."""
    reason = None if finished is None else "stop" if finished else "length"
    return {"index": place, **content, "logprobs": None, "finish_reason": reason}


def chunk(place: int, part: dict[str, Any], *, finished: bool | None = None) -> dict[str, Any]:
    """What a stream sends of one text."""
    return {"choices": [choice(place, part, finished=finished)]}


async def stream_chunks(head: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]) -> Response:
    """Chunks as server-sent events."""
    return await stream_response(({**head, **one} async for one in chunks), format_error, last="[DONE]")


def format_error(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
