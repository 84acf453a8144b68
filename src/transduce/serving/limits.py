"""Limits of a service, which no request can exceed, and the errors of requests that are refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from transduce.decoding.options import TranslationOptions
from transduce.errors import SettingsError, TransduceError
from transduce.process import n_cores

_TEXTS = 4  # generation has a batch with one part in so many: a slow model must end a batch before the deadline
_MEASURED = 0.5  # seconds with full batches from which the speed is estimated


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
        max_requests: Requests that wait or are being translated, at most; more get an `OverloadedError`. A core decodes
            about 24 sentences with 5 beams at a time; a few more wait to be next.
        max_tokens: Source tokens of all these requests, at most, each counted once per beam.
        batch_tokens: The same in one batch with which the engine is about as fast as it gets.
        max_wait: Seconds that what waits or runs may take, as estimated from the recent speed; more requests are
            refused. Two batches are never too much: one that runs, and one that waits.
        seconds: Deadline of a request; a request may ask for a shorter one.
        max_texts: Texts per request.
        max_characters: Characters of all texts of a request.
        max_beam: Beams, and translations per sentence.
        max_length: Tokens that a request may ask for as the longest output.
        max_body: Bytes of a request's body.
        body_seconds: Time in which the headers, and then the body, must have arrived.
        drain_seconds: Time that running requests get at a shutdown.
    """

    max_requests: int = field(default_factory=lambda: 32 * n_cores())
    max_tokens: int = 500_000
    batch_tokens: int = field(default_factory=lambda: 2000 * n_cores())
    max_wait: float = 1.0
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
        check_at_most("beam", options.beam, self.max_beam)
        check_at_most("n_best", options.n_best, self.max_beam)
        check_at_most("max_length", options.max_length, self.max_length)


def check_at_most(name: str, value: int | None, most: int) -> None:
    """Raise `SettingsError` if a value is above its limit."""
    if value is not None and value > most:
        raise SettingsError(f"{name} = {value}: must be at most {most}")


class Work:
    """Tokens that wait or run, and the time that they should take.

    The speed is that of ended work: its tokens, and the part of the time that it had, by its part of all tokens then.
    Work that has not ended counts for neither, so that the estimate does not depend on when work ends.
    """

    def __init__(self, batch_tokens: float, clock: Callable[[], float]) -> None:
        """`batch_tokens`: see `Limits`; only time with so many tokens counts: a few take nearly as long as many."""
        self._batch_tokens, self._clock = batch_tokens, clock
        self.n_tokens = 0
        self._rate = 0.0  # tokens per second with full batches, recently; 0: nothing is known yet
        self._last = clock()
        self._full, self._share = 0.0, 0.0  # seconds with full batches so far, and a token's part of them
        self._done, self._spent = 0.0, 0.0  # tokens that ended since the last estimate, and their part of the time

    @property
    def is_full(self) -> bool:
        """Whether the engine has enough to do to be as fast as it gets."""
        return self.n_tokens >= self._batch_tokens

    @contextmanager
    def add(self, n: int) -> Iterator[None]:
        """Count tokens until the block ends."""
        start = self._advance()
        full, share, part = self._full, self._share, 0.0
        self.n_tokens += n
        try:
            yield
            part = 1.0
        except ExpiredError:
            part = 0.5  # done; nobody knows, but without it a service whose requests all expire would learn nothing
            raise
        finally:
            seconds = self._advance() - start
            self.n_tokens -= n
            if part and self._full > full:
                self._learn(part * n * (self._full - full) / seconds, n * (self._share - share))

    def seconds(self, more: int = 0) -> float:
        """The time that what waits or runs now should take, and so many tokens more; 0 while nothing is known."""
        return (self.n_tokens + more) / self._rate if self._rate else 0.0

    def _advance(self) -> float:
        """Count the time since the last change; returns the time now."""
        now = self._clock()
        if self.is_full:
            self._full += now - self._last
            self._share += (now - self._last) / self.n_tokens
        self._last = now
        return now

    def _learn(self, done: float, spent: float) -> None:
        self._done += done
        self._spent += spent
        if self._spent >= _MEASURED:
            rate = self._done / self._spent
            self._rate = (self._rate + rate) / 2 if self._rate else rate
            self._done, self._spent = 0.0, 0.0


class Admission:
    """Counts the requests that have not ended and their tokens, and refuses more than the limits allow.

    Used from one thread, that of the event loop.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self.n_requests = limits, 0
        self._translation = Work(limits.batch_tokens, clock)
        self._generation = Work(limits.batch_tokens / _TEXTS, clock)

    @property
    def n_tokens(self) -> int:
        """Tokens that wait or run."""
        return self._translation.n_tokens + self._generation.n_tokens

    def refusal(self, n_coming: int = 0) -> OverloadedError | None:
        """The error of a request that arrives now, after `n_coming` that are not counted yet; None: it has a place."""
        if self.n_requests + n_coming >= self._limits.max_requests:
            return self.overloaded("too many requests are waiting")
        work = self._translation
        if work.n_tokens >= 2 * self._limits.batch_tokens and work.seconds() > self._limits.max_wait:
            return self.overloaded("what waits takes too long")
        return None

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request until the block ends; raises `OverloadedError`."""
        if (error := self.refusal()) is not None:
            raise error
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1

    @contextmanager
    def tokens(self, n: int, *, refuse: bool = True) -> Iterator[None]:
        """Count a request's tokens until the block ends: of its sources times its beams, or of what it scores.

        Raises `OverloadedError`, unless `refuse` is False: for more work of a request of which some has been done.
        """
        if refuse:
            self._check_tokens(n)
        with self._translation.add(n):
            yield

    @contextmanager
    def generation(self, n: int, *, seconds: float) -> Iterator[None]:
        """Count tokens of prompts, and those that may continue them, until the block ends.

        Texts do not wait for others to end: all advance together. Raises `OverloadedError` also where they would not
        be complete in so many seconds, but always takes what it measures the speed with.
        """
        self._check_tokens(n)
        if self._generation.is_full and self._generation.seconds(n) > seconds:
            raise self.overloaded("what is being generated takes too long")
        with self._generation.add(n):
            yield

    def _check_tokens(self, n: int) -> None:
        if self.n_tokens and self.n_tokens + n > self._limits.max_tokens:
            raise self.overloaded("too much text is waiting")

    def overloaded(self, reason: str) -> OverloadedError:
        """The error of a refused request, with the time in which what waits now should be done."""
        seconds = max(self._translation.seconds(), self._generation.seconds())
        return OverloadedError(f"{reason}; try again later", retry_after=min(max(seconds, 1.0), 60.0))
