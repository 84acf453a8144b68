"""Limits of a service, which no request can exceed, and the errors of requests that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from transduce.config.decoding import DecodingOptions
from transduce.errors import SettingsError, TransduceError
from transduce.process import n_cores


class OverloadedError(TransduceError):
    """Too much is waiting. `retry_after`: seconds after which the client may try again."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(TransduceError):
    """The service is shutting down and takes no more requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests that a service accepts.

    Attributes:
        max_requests: Most requests that wait or are being translated; further requests get an `OverloadedError`. A core
            decodes about 24 sentences with 5 beams at a time; a few more wait to be next.
        max_tokens: Most tokens of all these requests: tokens of sources or prompts, and the tokens that outputs may
            have, each counted once per beam. A single request with more tokens is refused.
        seconds: Deadline of a request; a request may ask for a shorter one.
        max_texts: Texts per request.
        max_characters: Characters of all texts of a request.
        max_translations: Translations in a response.
        max_beam: Beams, and translations per sentence.
        max_length: Tokens that a request may ask for as the longest output.
        max_body: Bytes of a request's body.
        body_seconds: Time in which the headers, and then the body, must have arrived.
        drain_seconds: Time that running requests get at a shutdown.
    """

    max_requests: int = field(default_factory=lambda: 32 * n_cores())
    max_tokens: int = 200_000
    seconds: float = 10.0
    max_texts: int = 128
    max_characters: int = 20_000
    max_translations: int = 10_000
    max_beam: int = 16
    max_length: int = 1024
    max_body: int = 1 << 20
    body_seconds: float = 10.0
    drain_seconds: float = 25.0

    def check_texts(self, texts: list[str]) -> None:
        if len(texts) > self.max_texts:
            raise SettingsError(f"{len(texts):,} texts; at most {self.max_texts:,} are allowed; send several requests")
        n = sum(map(len, texts))
        if n > self.max_characters:
            raise SettingsError(f"{n:,} characters; at most {self.max_characters:,} are allowed; send several requests")

    def check_options(self, options: DecodingOptions) -> None:
        most = {"beam": self.max_beam, "n_best": self.max_beam, "max_length": self.max_length}
        for name in most.keys() & options.model_fields_set:
            check_at_most(name, getattr(options, name), most[name])


def check_at_most(name: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise SettingsError(f"{name} = {value}: must be at most {most}")


class Admission:
    """Counts the tokens of open requests, and refuses requests beyond the limits.

    Used from the thread of the event loop only.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.n_tokens = 0

    @contextmanager
    def tokens(self, n: int, *, refuse: bool = True) -> Iterator[None]:
        """Count a request's tokens until the block ends: see `Limits`.

        Raises `SettingsError` or `OverloadedError`, unless `refuse` is False, for further work of a request of which a
        part has been done.
        """
        most = self._limits.max_tokens
        if refuse and n > most:
            advice = "send less text, or ask for fewer beams or a smaller max_length"
            raise SettingsError(f"up to {n:,} tokens would be computed; at most {most:,} are allowed; {advice}")
        if refuse and self.n_tokens + n > most:
            raise OverloadedError("too much text is waiting; try again later")
        self.n_tokens += n
        try:
            yield
        finally:
            self.n_tokens -= n
