"""Find held-out examples that also occur in the training text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

T = TypeVar("T")

N_SAMPLES = 5
"""Examples in a report."""
SHORTEST = 20
"""Characters of the shortest line or text that is searched for: shorter ones may occur anywhere by chance."""

_SHOWN = 200  # characters of an example


class LeakCheck:
    """One held-out set, and which of its examples `watch` has met. Case and white space are ignored.

    An example is `(source, target)` or `(text,)`. It has leaked if all of it occurs in the training text. Of pairs,
    sources that occur there with another target are counted too.
    """

    def __init__(
        self, name: str, held_out: Iterable[tuple[str, ...]], *, unit: str = "pairs", places: Sequence[str] = ()
    ) -> None:
        """`unit`: what the examples are called, in the plural. `places`: file and line of each, for the report."""
        self.name, self.unit, self.n, self._places = name, unit, 0, places
        self._examples: dict[int, tuple[str, ...]] = {}
        self._waiting: dict[bytes, list[int]] = {}
        self._found: dict[int, str] = {}  # example -> the place of the first training example with its source
        self._leaked: set[int] = set()  # examples whose target is there as well, in the place in `_found`
        for number, example in enumerate(held_out):
            key = key_of(example)
            self.n += bool(key) or len(example) > 1
            if key:
                self._examples[number] = example
                self._waiting.setdefault(key, []).append(number)

    @property
    def leaked(self) -> int:
        """Examples that occur in the training text."""
        return len(self._leaked)

    @property
    def found(self) -> int:
        """Examples whose source occurs there, with any target."""
        return len(self._found)

    @property
    def keys(self) -> frozenset[bytes]:
        """The keys (`key_of`) of the examples that were not met yet."""
        return frozenset(self._waiting)

    def note(self, key: bytes, example: tuple[str, ...], place: str) -> None:
        """Take note of a training example with this key."""
        if key not in self._waiting:
            return
        target = comparable(example[1]) if len(example) > 1 else ""
        left = []
        for number in self._waiting[key]:
            held = self._examples[number]
            if len(held) == 1 or comparable(held[1]) == target:
                self._leaked.add(number)
                self._found[number] = place
            else:
                self._found.setdefault(number, place)
                left.append(number)
        if left:
            self._waiting[key] = left
        else:
            del self._waiting[key]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        report: dict[str, Any] = {"name": self.name, "unit": self.unit, "pairs": self.n, "leaked": self.leaked}
        samples = []
        for number in sorted(self._found, key=lambda number: number not in self._leaked)[:N_SAMPLES]:
            example = [shortened(text) for text in self._examples[number]]
            if len(example) == 1:
                samples.append({"text": example[0].strip()})
            else:
                place = self._places[number] if self._places else ""
                samples.append({"src": example[0], "tgt": example[1], "place": place, "train": self._found[number]})
        return report | ({"sources": self.found} if self.unit == "pairs" else {}) | {"samples": samples}

    def warning(self) -> str:
        """One line for people, or nothing where nothing was found."""
        if not self._found:
            return ""
        first, others, found = self.to_json()["samples"][0], self.found - self.leaked, []
        if self.leaked:
            found.append(f"{self.leaked:,} of {self.n:,} {self.unit} also occur in the training text")
        if others:
            found.append(f"{others:,} of {self.n:,} sources occur in the training text with another translation")
        where = f"{first['place']} = {first['train']}" if "place" in first else repr(first["text"][:60])
        limit = "" if self.unit == "pairs" else f" ({self.unit} of {SHORTEST} characters or more are compared)"
        return f"{self.name}: {', and '.join(found)}{limit}; scores on this set will be too high. First: {where}"


def watch(
    records: Iterable[T],
    example_of: Callable[[T], tuple[str, ...]],
    checks: Sequence[LeakCheck],
    place_of: Callable[[T], str] = lambda _: "",
) -> Iterator[T]:
    """Yield training records unchanged and compare each with all held-out sets."""
    for record in records:
        if checks and (key := key_of(example := example_of(record))):
            for check in checks:
                check.note(key, example, place_of(record))
        yield record


def comparable(text: str) -> str:
    """The text in lower case, with single spaces.

    >>> comparable(" Guten  Tag")
    'guten tag'
    """
    text = text.casefold()
    if text.isprintable() and "  " not in text:  # most lines: their white space is single spaces
        return text.strip(" ")
    return " ".join(text.split())


def shortened(text: str) -> str:
    """A text for a report, cut after 200 characters."""
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def key_of(example: tuple[str, ...]) -> bytes:
    """A hash of the source or the text; nothing for a text that is too short, or an empty source."""
    text = comparable(example[0])
    return b"" if len(text) < (SHORTEST if len(example) == 1 else 1) else hash_of(text)


def hash_of(text: str) -> bytes:
    """The hash of a `comparable` text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
