"""Access to a service: API keys, limits of requests, and the errors of refused requests.

API keys are random secrets, each with a name and a rate limit. Their file contains only their SHA-256. No request can
exceed the limits.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from transduce.config.decoding import DecodingOptions
from transduce.data.lines import read_lines
from transduce.errors import SettingsError, TransduceError, UserError
from transduce.logging import Log
from transduce.process import n_cores


class OverloadedError(TransduceError):
    """The service is overloaded. `retry_after`: seconds after which the client may try again."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(TransduceError):
    """The service is shutting down and accepts no more requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the requests that a service accepts.

    Attributes:
        max_requests: Maximum open requests, waiting or running. Further requests get an `OverloadedError`. A core
            decodes about 24 sentences with 5 beams at a time; the default lets a few more wait.
        max_tokens: Maximum tokens of all open requests: tokens of sources or prompts, and the tokens that outputs may
            have, each counted once per beam. A single request with more tokens is refused.
        seconds: Time limit of a request. A request may ask for a shorter one.
        max_texts: Maximum texts per request.
        max_characters: Maximum characters of all texts of a request.
        max_translations: Maximum translations in a response.
        max_beam: Maximum beams, and translations per sentence.
        max_length: Maximum output length in tokens that a request may set.
        max_body: Maximum bytes of a request's body.
        body_seconds: Time limit for the headers, and then for the body, to arrive.
        drain_seconds: Time limit for running requests at a shutdown.
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
        """Count a request's tokens until the `with` block ends. See `Limits.max_tokens`.

        Raises `SettingsError` or `OverloadedError` beyond the limit, unless `refuse` is False, for the rest of a
        request that has begun.
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


_LINE = re.compile(r"\A(\S+)\s+([0-9a-fA-F]{64})(?:\s+([1-9]\d{0,8}))?")


class UnauthorizedError(TransduceError):
    """The API key is missing or unknown."""


class ApiKey(NamedTuple):
    """An API key. `per_minute`: limit for requests per minute, and for simultaneous requests, or None."""

    name: str
    per_minute: int | None = None


class ApiKeys:
    """The keys that a service accepts. Their file is read again if it changes. Without a file, no key is needed."""

    def __init__(self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: a file with a line NAME SHA256 [REQUESTS_PER_MINUTE] per key; it may have empty lines and # comments.

        Raises `UserError` if the file cannot be read.
        """
        self._path, self._clock = path, clock
        self._left = dict[str, tuple[float, float]]()  # by sha256 of a key: remaining requests, time of the count
        if path is not None:
            self._changed, self._keys = _changed(path), _read(path)
            if not self._keys:
                raise SettingsError(f"{path}: contains no key; make one with new_key", "new_key")

    @property
    def are_needed(self) -> bool:
        return self._path is not None

    def check(self, secret: str | None) -> str:
        """Check the key of a request and count the request. Returns the key's name; empty if no key is needed.

        Raises `UnauthorizedError` or `OverloadedError`.
        """
        if self._path is None:
            return ""
        if (changed := _changed(self._path)) != self._changed:
            self._changed = changed
            try:
                self._keys = _read(self._path)
            except UserError as error:
                Log().warn(f"the API keys stay as they were: {error}")
        if not secret:
            raise UnauthorizedError("this service needs an API key; send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
        if (key := self._keys.get(digest)) is None:
            raise UnauthorizedError("unknown API key")
        if key.per_minute is not None:
            self._count(digest, key.per_minute)
        return key.name

    def _count(self, digest: str, per_minute: int) -> None:
        """Count a request. Raises `OverloadedError` if there were too many with this key."""
        now = self._clock()
        left, since = self._left.get(digest, (per_minute, now))
        left = min(per_minute, left + (now - since) * per_minute / 60)
        self._left[digest] = left - (left >= 1), now
        if left < 1:
            seconds = (1 - left) * 60 / per_minute
            raise OverloadedError(f"more than {per_minute} requests per minute", retry_after=seconds)


def _changed(path: Path) -> int:
    """Time of the last change of a file in nanoseconds; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> dict[str, ApiKey]:
    keys = dict[str, ApiKey]()
    for number, line in enumerate(read_lines(path), 1):
        if line.strip() and not line.startswith("#"):
            if (match := _LINE.fullmatch(line.strip())) is None:
                raise SettingsError(f"{path}:{number}: not a key; a line is NAME SHA256 [REQUESTS_PER_MINUTE]")
            keys[match[2].lower()] = ApiKey(match[1], int(match[3]) if match[3] else None)
    return keys


NO_KEYS = ApiKeys()
"""Accepts all requests, without a key."""


def new_key(name: str) -> tuple[str, str]:
    """Create an API key. Returns the secret for the client, and the line for the file of keys."""
    if not name or any(c.isspace() for c in name) or name.startswith("#"):
        raise SettingsError(f"key name '{name}': must be one word")
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()}"
