"""API keys: random secrets of which a file holds only the sha256, each with a name and a limit of requests."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transduce.data.lines import read_lines
from transduce.errors import SettingsError, TransduceError
from transduce.serving.limits import OverloadedError

_SHA256, _LIMIT = re.compile(r"[0-9a-fA-F]{64}"), re.compile(r"[1-9]\d{0,8}")


class UnauthorizedError(TransduceError):
    """No API key, or one that is not known."""


@dataclass(slots=True)
class ApiKey:
    """A key. `per_minute`: requests that it may make, with as many at once; None: any number."""

    name: str
    sha256: str
    per_minute: int | None = None
    _left: float = field(default=0.0, init=False)
    _since: float = field(default=-1e9, init=False)

    def use(self, now: float) -> None:
        """Count a request; raises `OverloadedError` if there were too many."""
        if self.per_minute is None:
            return
        self._left = min(self.per_minute, self._left + (now - self._since) * self.per_minute / 60)
        self._since = now
        if self._left < 1:
            seconds = (1 - self._left) * 60 / self.per_minute
            raise OverloadedError(f"more than {self.per_minute} requests per minute", retry_after=seconds)
        self._left -= 1


class ApiKeys:
    """The keys that a service accepts; none: everybody is let in."""

    def __init__(self, keys: tuple[ApiKey, ...] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys, self._clock = {key.sha256: key for key in keys}, clock

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a file with a line NAME SHA256 [REQUESTS_PER_MINUTE] per key; empty lines and # comments are skipped."""
        keys = []
        for number, line in enumerate(read_lines(path), 1):
            match [] if line.startswith("#") else line.split():
                case []:
                    pass
                case [name, digest] if _SHA256.fullmatch(digest):
                    keys.append(ApiKey(name, digest.lower()))
                case [name, digest, limit] if _SHA256.fullmatch(digest) and _LIMIT.fullmatch(limit):
                    keys.append(ApiKey(name, digest.lower(), int(limit)))
                case _:
                    raise SettingsError(f"{path}:{number}: not a key; a line is NAME SHA256 [REQUESTS_PER_MINUTE]")
        if not keys:
            raise SettingsError(f"{path}: contains no key; make one with new_key")
        return cls(tuple(keys))

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    def check(self, secret: str | None) -> str:
        """The name of a key, empty if none is needed; counts a request.

        Raises `UnauthorizedError` or `OverloadedError`.
        """
        if not self._keys:
            return ""
        if not secret:
            raise UnauthorizedError("this service needs an API key; send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
        if (key := self._keys.get(digest)) is None:
            raise UnauthorizedError("unknown API key")
        key.use(self._clock())
        return key.name


NO_KEYS = ApiKeys()
"""Lets everybody in."""


def new_key(name: str) -> tuple[str, str]:
    """A new secret, and the line for the file of keys."""
    if not name or any(c.isspace() for c in name) or name.startswith("#"):
        raise SettingsError(f"key name '{name}': must be one word")
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()}"
