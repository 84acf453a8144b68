"""Limits of a service, which no request can exceed, and the errors of requests that are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transduce.decoding.options import TranslationOptions
from transduce.errors import SettingsError, TransduceError


class OverloadedError(TransduceError):
    """Too much is waiting. `retry_after`: seconds after which the client may try again."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ExpiredError(TransduceError):
    """The deadline of a request passed before its translation was ready."""


class DrainingError(TransduceError):
    """The service is shutting down and takes no more requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a service accepts.

    Attributes:
        max_requests: Requests that wait or are being translated, at most; more get an `OverloadedError`.
        max_tokens: Source tokens of all these requests, at most, each counted once per beam.
        seconds: Deadline of a request; a request may ask for a shorter one.
        max_texts: Texts per request.
        max_characters: Characters of all texts of a request.
        max_beam: Beams, and translations per sentence.
        max_length: Tokens that a request may ask for as the longest output.
        max_body: Bytes of a request's body.
        body_seconds: Time in which the headers, and then the body, must have arrived.
        drain_seconds: Time that running requests get at a shutdown.
    """

    max_requests: int = 512
    max_tokens: int = 500_000
    seconds: float = 10.0
    max_texts: int = 128
    max_characters: int = 20_000
    max_beam: int = 16
    max_length: int = 1024
    max_body: int = 1 << 20
    body_seconds: float = 10.0
    drain_seconds: float = 25.0

    def check_texts(self, texts: list[str]) -> None:
        """Refuse texts that are too many or too long."""
        if len(texts) > self.max_texts:
            raise SettingsError(f"{len(texts):,} texts; at most {self.max_texts:,} are allowed; send several requests")
        n = sum(map(len, texts))
        if n > self.max_characters:
            raise SettingsError(f"{n:,} characters; at most {self.max_characters:,} are allowed; send several requests")

    def check_options(self, options: TranslationOptions) -> None:
        """Refuse searches that are too expensive."""
        for name, most in (("beam", self.max_beam), ("n_best", self.max_beam), ("max_length", self.max_length)):
            value = getattr(options, name)
            if value is not None and value > most:
                raise SettingsError(f"{name} = {value}: must be at most {most}")


class Admission:
    """Counts the requests that have not ended and their tokens, and refuses more than the limits allow.

    Used from one thread, that of the event loop.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self.n_requests = self.n_tokens = 0
        self._rate = 0.0  # tokens per second, recently
        self._since, self._ended = clock(), 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request until the block ends; raises `OverloadedError`."""
        if self.n_requests >= self._limits.max_requests:
            raise self.overloaded(f"{self.n_requests} requests are waiting")
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1

    @contextmanager
    def tokens(self, n: int) -> Iterator[None]:
        """Count a request's source tokens times its beams until the block ends; raises `OverloadedError`."""
        if self.n_tokens and self.n_tokens + n > self._limits.max_tokens:
            raise self.overloaded(f"{self.n_tokens:,} tokens are waiting")
        self.n_tokens += n
        try:
            yield
        finally:
            self.n_tokens -= n
            self._ended += n

    def overloaded(self, reason: str) -> OverloadedError:
        """The error of a refused request, with the time in which what waits now should have been translated."""
        seconds = self.n_tokens / self.tokens_per_second() if self.n_tokens and self.tokens_per_second() else 1.0
        return OverloadedError(f"{reason}; try again later", retry_after=min(max(seconds, 1.0), 60.0))

    def tokens_per_second(self) -> float:
        """Source tokens times beams per second, of requests that ended in the last two seconds or so; 0 at first."""
        now = self._clock()
        if now - self._since >= 1.0:
            rate = self._ended / (now - self._since)
            self._rate = rate if not self._rate else (self._rate + rate) / 2
            self._since, self._ended = now, 0
        return self._rate
