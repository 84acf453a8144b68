"""The search for held-out text in training text where text is not pairs: lines, or labelled texts. As `LeakCheck`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

from transduce.data.clean import N_SAMPLES, comparable

LEAST_CHARACTERS = 20
"""Shorter texts are not looked for: they may stand anywhere by chance."""

_SHOWN = 200
T = TypeVar("T")


class SeenCheck:
    """The texts of one held-out set, and which of them `watch` has found, case and white space aside."""

    def __init__(self, name: str, held_out: Iterable[str], *, unit: str) -> None:
        """`unit`: what one of them is called, in the plural."""
        self.name, self.unit, self.n = name, unit, 0
        self._held: dict[bytes, list[str]] = {}
        for text in held_out:
            if key := _key(text):
                self.n += 1
                self._held.setdefault(key, []).append(text.strip())
        self._seen: dict[bytes, None] = {}

    def note(self, key: bytes) -> None:
        """Take note of a training text."""
        if key in self._held:
            self._seen[key] = None

    @property
    def leaked(self) -> int:
        """Held-out texts that stand in the training text."""
        return sum(len(self._held[key]) for key in self._seen)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, in the form of `LeakReport.to_json`."""
        found = [{"text": self._held[key][0][:_SHOWN]} for key in list(self._seen)[:N_SAMPLES]]
        return {"name": self.name, "unit": self.unit, "pairs": self.n, "leaked": self.leaked, "samples": found}

    def warning(self) -> str:
        """One line for people, or nothing where nothing leaked."""
        if not self.leaked:
            return ""
        first = self._held[next(iter(self._seen))][0]
        return (
            f"{self.name}: {self.leaked:,} of {self.n:,} {self.unit} "
            f"{'stands' if self.leaked == 1 else 'stand'} in the training text too (those of "
            f"{LEAST_CHARACTERS} characters or more are looked for); scores on it flatter. First: {first[:60]!r}"
        )


def watch(items: Iterable[T], text_of: Callable[[T], str], checks: Sequence[SeenCheck]) -> Iterator[T]:
    """Yield the training text unchanged; all checks look through it on its way."""
    for item in items:
        if key := _key(text_of(item)):
            for check in checks:
                check.note(key)
        yield item


def _key(text: str) -> bytes:
    """What stands for a text; nothing for one that is too short."""
    known = comparable(text)
    return b"" if len(known) < LEAST_CHARACTERS else blake2b(known.encode(), digest_size=8).digest()
