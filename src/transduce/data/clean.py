"""Cleaning of training text, with a report of what was dropped and why, and the search for held-out text in it."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from transduce.config import DataSettings
from transduce.data.corpus import Pair
from transduce.errors import DataError

N_SAMPLES = 5
"""Examples kept of each reason."""

_SHOWN = 200  # characters of an example
_SHORT = 10  # tokens up to which the ratio of lengths says nothing
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(slots=True)
class Tally:
    """How often something was found, and the first few examples."""

    count: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)

    def add(self, pair: Pair) -> None:
        """Count one more."""
        self.count += 1
        if len(self.samples) < N_SAMPLES:
            place = f"{pair.place[0]}:{pair.place[1]}"
            self.samples.append({"src": _shown(pair.src), "tgt": _shown(pair.tgt), "place": place})


@dataclass(slots=True)
class CleanReport:
    """What cleaning did: pairs dropped by reason, and pairs kept but changed. Grows while pairs are drawn."""

    read: int = 0
    dropped: dict[str, Tally] = field(default_factory=dict)
    changed: dict[str, Tally] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Pairs that passed."""
        return self.read - sum(tally.count for tally in self.dropped.values())

    def drop(self, reason: str, pair: Pair) -> None:
        """Count a pair that is left out."""
        self.dropped.setdefault(reason, Tally()).add(pair)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "read": self.read,
            "kept": self.kept,
            "dropped": _tallies(self.dropped),
            "changed": _tallies(self.changed),
        }

    def require_pairs(self, settings: DataSettings, name: str) -> None:
        """Raise a `DataError` that says why, where no pair is left."""
        if not self.read:
            raise DataError(f"{name}: there is no text, not one sentence pair")
        if self.kept:
            return
        reasons = ", ".join(f"{tally.count:,} {reason}" for reason, tally in self.dropped.items())
        advice = {TOO_LONG: f"; raise data.max_length ({settings.max_length} tokens) or cut the text into sentences"}
        most = max(self.dropped, key=lambda reason: self.dropped[reason].count)
        raise DataError(f"{name}: no sentence pair is left of {self.read:,}: {reasons}{advice.get(most, '')}")


def told(report: Mapping[str, Any]) -> list[str]:
    """Lines for people of what `CleanReport.to_json` gave: how much is left, and each reason with its first example."""
    nothing = "" if report["dropped"] else "; nothing dropped"
    lines = [f"cleaning: {report['read']:,} pairs read, {report['kept']:,} kept{nothing}"]
    for verb in ("dropped", "changed"):
        for tally in report[verb]:
            first = next((f", as {s['place']}: {s['src']!r} | {s['tgt']!r}" for s in tally["samples"]), "")
            lines.append(f"  {verb} {tally['count']:,}, {tally['reason']}{first}")
    return lines


EMPTY, COPY, DUPLICATE, TOO_LONG, RATIO = "empty", "copy", "duplicate", "too long", "ratio of lengths"
CONTROLS = "control characters removed"


class Cleaner:
    """The rules of `settings`, applied to one stream after another, with one report and one memory of duplicates."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self.report = CleanReport()
        self._seen: set[bytes] = set()
        self._rules: list[tuple[str, Callable[[Pair], bool]]] = [(EMPTY, _is_empty)]
        if settings.drop_copies:
            self._rules.append((COPY, _is_copy))
        if settings.deduplicate:
            self._rules.append((DUPLICATE, self._was_seen))

    def texts(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the pairs that the rules on text let pass, without control characters. Reports as it goes."""
        report = self.report
        for pair in pairs:
            report.read += 1
            if _CONTROLS.search(pair.src) or _CONTROLS.search(pair.tgt):
                report.changed.setdefault(CONTROLS, Tally()).add(pair)
                pair = Pair(_CONTROLS.sub(_space, pair.src), _CONTROLS.sub(_space, pair.tgt), pair.place)
            for reason, applies in self._rules:
                if applies(pair):
                    report.drop(reason, pair)
                    break
            else:
                yield pair

    def lengths_fit(self, pair: Pair, n_src: int, n_tgt: int) -> bool:
        """Whether a pair of so many tokens (without EOS) stays; reports it where not."""
        shorter, longer = (n_src, n_tgt) if n_src < n_tgt else (n_tgt, n_src)
        if not shorter:
            self.report.drop(EMPTY, pair)  # nothing but characters that normalization removes
        elif longer > self.settings.max_length:
            self.report.drop(TOO_LONG, pair)
        elif longer > _SHORT and longer > self.settings.max_ratio * shorter:
            self.report.drop(RATIO, pair)
        else:
            return True
        return False

    def _was_seen(self, pair: Pair) -> bool:
        key = blake2b(f"{pair.src}\0{pair.tgt}".encode(), digest_size=16).digest()
        if key in self._seen:  # NUL separates: it is a control character, so no side holds it
            return True
        self._seen.add(key)
        return False


def clean(pairs: Iterable[Pair], settings: DataSettings) -> tuple[Iterator[Pair], CleanReport]:
    """The pairs that the rules on text let pass, and a report that is complete when they are used up.

    The rules on length need tokens: `Cleaner.lengths_fit`, which the token store applies.
    """
    cleaner = Cleaner(settings)
    return cleaner.texts(pairs), cleaner.report


@dataclass(frozen=True, slots=True)
class LeakReport:
    """How much of a held-out set stands in the training text, case and white space aside."""

    pairs: int
    leaked: int  # pairs that stand there with their translation
    sources: int  # pairs whose source stands there, whatever its translation; `leaked` ones included
    samples: list[dict[str, str]]

    def to_json(self, name: str) -> dict[str, Any]:
        """The report as plain values, under the name of the held-out set."""
        return {
            "name": name,
            "pairs": self.pairs,
            "leaked": self.leaked,
            "sources": self.sources,
            "samples": self.samples,
        }

    def warning(self, name: str) -> str:
        """One line for people, or nothing where nothing leaked."""
        if not self.sources:
            return ""
        first, others = self.samples[0], self.sources - self.leaked
        told = []
        if self.leaked:
            pairs = f"{self.leaked:,} of {self.pairs:,} pairs {'stands' if self.leaked == 1 else 'stand'}"
            told.append(f"{pairs} in the training text too")
        if others:
            sources = f"more {'source' if others == 1 else 'sources'}"
            if not self.leaked:
                sources = f"of {self.pairs:,} sources {'stands' if others == 1 else 'stand'} in the training text too,"
            told.append(f"{others:,} {sources} with another translation")
        return f"{name}: {', and '.join(told)}; scores on it flatter. First: {first['place']} = {first['train']}"


class LeakCheck:
    """Looks for the pairs of one held-out set in a stream of training pairs that flows through `watch`."""

    def __init__(self, held_out: Iterable[Pair]) -> None:
        self._pairs = list(held_out)
        self._by_source: dict[str, list[int]] = {}
        self._by_pair: dict[tuple[str, str], list[int]] = {}
        for i, pair in enumerate(self._pairs):
            if key := comparable(pair.src):
                self._by_source.setdefault(key, []).append(i)
                self._by_pair.setdefault((key, comparable(pair.tgt)), []).append(i)
        self._sources: dict[int, Pair] = {}  # held-out pair -> the first training pair with its source
        self._leaked: dict[int, Pair] = {}  # the same with its translation too

    def watch(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yield the training pairs unchanged, noting which held-out ones are among them."""
        sources, whole = dict(self._by_source), dict(self._by_pair)  # those that were not met yet
        for pair in pairs:
            if (key := comparable(pair.src)) in self._by_source:
                for i in sources.pop(key, ()):
                    self._sources.setdefault(i, pair)
                for i in whole.pop((key, comparable(pair.tgt)), ()):
                    self._leaked.setdefault(i, pair)
            yield pair

    @property
    def report(self) -> LeakReport:
        """What was found so far; whole pairs come first among the samples."""
        found = self._leaked | {i: pair for i, pair in self._sources.items() if i not in self._leaked}
        samples = []
        for i, train in list(found.items())[:N_SAMPLES]:
            held = self._pairs[i]
            samples.append(
                {
                    "src": _shown(held.src),
                    "tgt": _shown(held.tgt),
                    "place": f"{held.place[0]}:{held.place[1]}",
                    "train": f"{train.place[0]}:{train.place[1]}",
                }
            )
        return LeakReport(len(self._pairs), len(self._leaked), len(self._sources), samples)


def leaks(train: Iterable[Pair], test: Iterable[Pair]) -> LeakReport:
    """How much of `test` stands in `train`."""
    check = LeakCheck(test)
    for _ in check.watch(train):
        pass
    return check.report


def comparable(text: str) -> str:
    """A text without differences of case and white space.

    >>> comparable(" Guten  Tag")
    'guten tag'
    """
    return " ".join(text.casefold().split())


def choose_held_out(pairs: Iterable[Pair], n: int, *, seed: int) -> frozenset[str]:
    """The sources, as `comparable` gives them, to hold out from training: `n` random ones, by (text, seed).

    All pairs with one of these sources belong to the held-out set, so that none of them leaks. One pass, `n` in memory.
    """
    if n <= 0:
        return frozenset()
    keys = (comparable(pair.src) for pair in pairs)
    drawn = ((blake2b(f"{seed}\n{key}".encode(), digest_size=8).digest(), key) for key in keys if key)
    lowest: set[str] = set()  # the distinct sources with the lowest hashes
    worst: list[tuple[int, str]] = []  # the same as a heap, the highest hash first
    for digest, key in drawn:
        rank = -int.from_bytes(digest, "big")
        if key in lowest or (len(worst) >= n and rank <= worst[0][0]):
            continue
        lowest.add(key)
        heapq.heappush(worst, (rank, key))
        if len(worst) > n:
            lowest.remove(heapq.heappop(worst)[1])
    return frozenset(lowest)


def _is_empty(pair: Pair) -> bool:
    return not pair.src or not pair.tgt or pair.src.isspace() or pair.tgt.isspace()


def _is_copy(pair: Pair) -> bool:
    return pair.src == pair.tgt or comparable(pair.src) == comparable(pair.tgt)


def _space(match: re.Match[str]) -> str:
    """Control characters that separate become a space, the others nothing."""
    return " " if match[0].isspace() else ""


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _tallies(tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    return [{"reason": reason, "count": tally.count, "samples": tally.samples} for reason, tally in tallies.items()]
