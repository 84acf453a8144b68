"""API keys: random secrets, each with a name and a rate limit; a file contains only their sha256."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transduce.data.lines import read_lines
from transduce.errors import SettingsError, TransduceError, UserError
from transduce.logging import Log
from transduce.serving.limits import OverloadedError

_LINE = re.compile(r"\A(\S+)\s+([0-9a-fA-F]{64})(?:\s+([1-9]\d{0,8}))?")


class UnauthorizedError(TransduceError):
    """The API key is missing or unknown."""


class ApiKey(NamedTuple):
    """An API key. `per_minute`: limit of requests per minute, and of requests at once; None: no limit."""

    name: str
    per_minute: int | None = None


class ApiKeys:
    """The keys that a service accepts, from the current content of a file. Without a file, no key is needed."""

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
        """Count a request; return the name of its key, or an empty string if no key is needed.

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
        """Count a request; raises `OverloadedError` if there were too many."""
        now = self._clock()
        left, since = self._left.get(digest, (per_minute, now))
        left = min(per_minute, left + (now - since) * per_minute / 60)
        self._left[digest] = left - (left >= 1), now
        if left < 1:
            seconds = (1 - left) * 60 / per_minute
            raise OverloadedError(f"more than {per_minute} requests per minute", retry_after=seconds)


def _changed(path: Path) -> int:
    """Time of the last change of a file; 0 if it does not exist."""
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
"""Lets everybody in."""


def new_key(name: str) -> tuple[str, str]:
    """A new secret, and the line for the file of keys."""
    if not name or any(c.isspace() for c in name) or name.startswith("#"):
        raise SettingsError(f"key name '{name}': must be one word")
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()}"
