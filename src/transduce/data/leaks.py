"""Find leaks: held-out examples that also occur in the training text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

T = TypeVar("T")

N_SAMPLES = 5
"""Maximum number of examples in a report."""
SHORTEST = 20
"""Minimum characters of a line or text that is searched for. Shorter texts may occur anywhere by chance."""

_SHOWN = 200  # maximum characters of an example in a report


class LeakCheck:
    """Examples of a held-out set that `watch` finds in the training text. Case and white space are ignored.

    An example is `(source, target)` or `(text,)`. It leaks if all of it occurs in one training example. For pairs,
    sources that occur with another target are counted too.
    """

    def __init__(
        self, name: str, held_out: Iterable[tuple[str, ...]], *, unit: str = "pairs", places: Sequence[str] = ()
    ) -> None:
        """`unit`: the name of the examples in the report, in the plural. `places`: file and line of each example."""
        self.name, self.unit, self.n, self._places = name, unit, 0, places
        self._examples: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[bytes, list[int]] = {}
        self._met: dict[int, str] = {}  # file and line of the first training example with the source of each example
        self._leaked: set[int] = set()  # examples whose target occurs in that training example too
        for number, example in enumerate(held_out):
            key = key_of(example)
            self.n += bool(key) or len(example) > 1
            if key:
                self._examples[number] = example
                self._waiting.setdefault(key, []).append(number)

    @property
    def leaked(self) -> int:
        """Number of examples that occur in the training text."""
        return len(self._leaked)

    @property
    def met(self) -> int:
        """Number of examples whose source occurs in the training text, with any target."""
        return len(self._met)

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys (`key_of`) of the examples that have not leaked so far."""
        return frozenset(self._waiting)

    def note(self, key: bytes, example: tuple[str, ...], place: str) -> None:
        """Record a training example with this key (`key_of`). `place`: its file and line."""
        for number in self._waiting.pop(key, ()):
            held = self._examples[number]
            if len(held) == 1 or comparable(held[1]) == comparable(example[1]):
                self._leaked.add(number)
                self._met[number] = place
            else:
                self._met.setdefault(number, place)
                self._waiting.setdefault(key, []).append(number)

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {"name": self.name, "unit": self.unit, "pairs": self.n, "leaked": self.leaked}
        samples = []
        for number in sorted(self._met, key=lambda number: number not in self._leaked)[:N_SAMPLES]:
            example = [shortened(text) for text in self._examples[number]]
            if len(example) == 1:
                samples.append({"text": example[0].strip()})
            else:
                place = self._places[number] if self._places else ""
                samples.append({"src": example[0], "tgt": example[1], "place": place, "train": self._met[number]})
        return report | ({"sources": self.met} if self.unit == "pairs" else {}) | {"samples": samples}

    def warning(self) -> str:
        """A one-line warning; empty if no source or text was found in the training text."""
        if not self._met:
            return ""
        first, others, parts = self.to_json()["samples"][0], self.met - self.leaked, []
        if self.leaked:
            parts.append(f"{self.leaked:,} of {self.n:,} {self.unit} also occur in the training text")
        if others:
            parts.append(f"{others:,} of {self.n:,} sources occur in the training text with another translation")
        where = f"{first['place']} = {first['train']}" if "place" in first else repr(first["text"][:60])
        limit = "" if self.unit == "pairs" else f" ({self.unit} of {SHORTEST} characters or more are compared)"
        return f"{self.name}: {', and '.join(parts)}{limit}; scores on this set will be too high. First: {where}"


def watch(
    records: Iterable[T],
    example_of: Callable[[T], tuple[str, ...]],
    checks: Sequence[LeakCheck],
    place_of: Callable[[T], str] = lambda _: "",
) -> Iterator[T]:
    """Yield training records unchanged, and compare each with all held-out sets."""
    for record in records:
        if checks and (key := key_of(example := example_of(record))):
            for check in checks:
                check.note(key, example, place_of(record))
        yield record


def comparable(text: str) -> str:
    """Return the text in lower case, with single spaces.

    >>> comparable(" Guten  Tag")
    'guten tag'
    """
    text = text.casefold()
    if text.isprintable() and "  " not in text:  # fast path: most lines have only single spaces
        return text.strip(" ")
    return " ".join(text.split())


def shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def key_of(example: tuple[str, ...]) -> bytes:
    """Hash the source or the text of an example. Empty if the text is too short, or the source empty."""
    text = comparable(example[0])
    return b"" if len(text) < (SHORTEST if len(example) == 1 else 1) else hash_of(text)


def hash_of(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
