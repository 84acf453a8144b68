"""Clean sentence pairs, report what was dropped and why, and choose which sources to hold out."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.corpus import Pair
from transduce.data.leaks import N_SAMPLES, comparable, shortened
from transduce.errors import DataError
from transduce.text.vectors import without_folder

_SHORT = 10  # tokens up to which the ratio of the lengths does not matter
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(slots=True)
class Tally:
    """A count, and the first few examples."""

    count: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)

    def add(self, pair: Pair) -> None:
        """Count one more."""
        self.count += 1
        if len(self.samples) < N_SAMPLES:
            self.samples.append({"src": shortened(pair.src), "tgt": shortened(pair.tgt), "place": pair.where})


@dataclass(slots=True)
class CleanReport:
    """Pairs dropped by reason, and pairs kept but changed. Grows while pairs are read."""

    read: int = 0
    held_out: int = 0
    dropped: dict[str, Tally] = field(default_factory=dict)
    changed: dict[str, Tally] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Pairs to train on."""
        return self.read - self.held_out - sum(tally.count for tally in self.dropped.values())

    def drop(self, reason: str, pair: Pair) -> None:
        """Count a pair that is left out."""
        self.dropped.setdefault(reason, Tally()).add(pair)

    def include(self, later: Mapping[str, Any]) -> None:
        """Add the report, as `to_json` has it, of pairs that follow."""
        self.read += later["read"]
        for tallies, more in ((self.dropped, later["dropped"]), (self.changed, later["changed"])):
            for one in more:
                tally = tallies.setdefault(one["reason"], Tally())
                tally.count += one["count"]
                tally.samples += one["samples"][: N_SAMPLES - len(tally.samples)]

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "read": self.read,
            "kept": self.kept,
            "held_out": self.held_out,
            "dropped": _tallies(self.dropped),
            "changed": _tallies(self.changed),
        }

    def require_pairs(self, settings: DataSettings, name: str) -> None:
        """Raise a `DataError` with the reasons if no pair is left."""
        if not self.read:
            raise DataError(f"{name}: no sentence pair found")
        if self.kept:
            return
        if not self.dropped:
            raise DataError(f"{name}: all {self.read:,} sentence pairs have the same source, which is held out")
        reasons = ", ".join(f"{tally.count:,} {reason}" for reason, tally in self.dropped.items())
        advice = {TOO_LONG: f"; raise data.max_length ({settings.max_length} tokens) or cut the text into sentences"}
        most = max(self.dropped, key=lambda reason: self.dropped[reason].count)
        raise DataError(f"{name}: no sentence pair of {self.read:,} is left: {reasons}{advice.get(most, '')}")


def format_cleaning(report: Mapping[str, Any]) -> list[str]:
    """Lines for people from `CleanReport.to_json`: how much is left, and each reason with its first example."""
    held_out = f", {n:,} held out" if (n := report.get("held_out", 0)) else ""
    nothing = "" if report["dropped"] else "; nothing dropped"
    lines = [f"cleaning: {report['read']:,} pairs read, {report['kept']:,} kept{held_out}{nothing}"]
    for verb in ("dropped", "changed"):
        for tally in report[verb]:
            first = next((f", e.g. {s['place']}: {s['src']!r} | {s['tgt']!r}" for s in tally["samples"]), "")
            lines.append(f"  {verb} {tally['count']:,}: {tally['reason']}{first}")
    return lines


EMPTY, COPY, DUPLICATE, TOO_LONG, RATIO = "empty", "copy", "duplicate", "too long", "ratio of lengths"
CONTROLS = "control characters removed"


class Cleaner:
    """Applies the rules of `settings`, with one report. Duplicates are found elsewhere (`SeenHashes`)."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings, self.report = settings, CleanReport()

    def by_rules(self, pair: Pair) -> Pair | None:
        """The pair without control characters, or None if it does not pass the rules on its text alone.

        The rules on length need tokens; `lengths_fit` applies them when the pairs are encoded.
        """
        report = self.report
        report.read += 1
        if (cleaned := without_controls(pair)) is not pair:
            report.changed.setdefault(CONTROLS, Tally()).add(pair)
            pair = cleaned
        if not pair.src or not pair.tgt or pair.src.isspace() or pair.tgt.isspace():
            report.drop(EMPTY, pair)
        elif self.settings.drop_copies and comparable(pair.src) == comparable(pair.tgt):
            report.drop(COPY, pair)
        else:
            return pair
        return None

    def lengths_fit(self, pair: Pair, n_src: int, n_tgt: int) -> bool:
        """Whether to keep a pair with so many tokens (without EOS). Reports it if not."""
        shorter, longer = (n_src, n_tgt) if n_src < n_tgt else (n_tgt, n_src)
        if not shorter:
            self.report.drop(EMPTY, pair)  # only characters that normalization removes
        elif longer > self.settings.max_length:
            self.report.drop(TOO_LONG, pair)
        elif longer > _SHORT and longer > self.settings.max_ratio * shorter:
            self.report.drop(RATIO, pair)
        else:
            return True
        return False


def hashes_of(pairs: Iterable[Pair]) -> np.ndarray:
    """uint64 [N]: of both sides of each pair, to find duplicates."""
    # NUL separates the sides: it is a control character, which none of them contains.
    return np.frombuffer(_digests(f"{pair.src}\0{pair.tgt}" for pair in pairs), np.uint64)


def draws_of(pairs: Iterable[Pair], *, seed: int) -> np.ndarray:
    """uint64 [N]: the hash of (seed, source) of each pair, by which `HeldOutSources` chooses."""
    keys = (without_folder(comparable(pair.src)) for pair in pairs)
    return np.frombuffer(_digests(keys, f"{seed}\n"), ">u8").astype(np.uint64)


def _digests(texts: Iterable[str], prefix: str = "") -> bytes:
    """The 8 bytes of each text's hash, after a prefix."""
    empty = blake2b(prefix.encode(), digest_size=8)  # a copy is faster than a new hash

    def digest(text: str) -> bytes:
        one = empty.copy()
        one.update(text.encode("utf-8", "surrogatepass"))
        return one.digest()

    return b"".join(map(digest, texts))


class HeldOutSources:
    """Chooses the source sentences to hold out for validation while the training pairs are read.

    Chosen are those with the lowest hash of (seed, source): the choice depends neither on the order of the pairs nor on
    how many of them have the same source, nor on the folder of a file of vectors. All pairs with a chosen source leave
    the training text, so that none leaks.
    """

    def __init__(self, most: int) -> None:
        """`most`: sources that can be asked for at the end, which bounds the memory."""
        self._most, self._last = most, int(np.iinfo(np.uint64).max)
        self._found: dict[str, list[Any]] = {}  # for each source: its hash, the first of its pairs, their number

    def see(self, draws: np.ndarray, pair_of: Callable[[int], Pair]) -> None:
        """Consider the next pairs by their `draws_of`; `pair_of` gives the pair of a draw that may be low enough."""
        for i in (draws <= self._last).nonzero()[0].tolist():
            pair = pair_of(i)
            self._found.setdefault(comparable(pair.src), [int(draws[i]), pair, 0])[2] += 1
        if len(self._found) > 2 * self._most:
            self._found = self._lowest(self._most)
            self._last = max(draw for draw, _, _ in self._found.values())

    def choose(self, n: int) -> tuple[dict[str, Pair], int]:
        """The first pair of each of `n` sources, in order of appearance; and how many pairs have these sources."""
        chosen = self._lowest(n)
        return {key: pair for key, (_, pair, _) in chosen.items()}, sum(count for _, _, count in chosen.values())

    def _lowest(self, n: int) -> dict[str, list[Any]]:
        keys = {*heapq.nsmallest(n, self._found, key=lambda key: (self._found[key][0], key))}
        return {key: entry for key, entry in self._found.items() if key in keys}


class SeenHashes:
    """A growing set of 64-bit hashes that takes 8 bytes for each, and up to 16 while it grows.

    The chance that a new element is mistaken for a known one is 3 in 10,000 for a whole corpus of 100 million.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []  # sorted, each at least 8 times as long as the next

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add uint64 [N]; bool [N]: whether each is new. Of equal ones, the first is new."""
        unique, first = np.unique(hashes, return_index=True)
        new = np.ones(len(unique), dtype=bool)
        for run in self._runs:
            new &= run.take(np.searchsorted(run, unique), mode="clip") != unique
        if new.any():
            self._runs.append(unique[new])
        while len(self._runs) > 1 and len(self._runs[-2]) < 8 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")  # merges the two
            self._runs.append(merged)
        found = np.zeros(len(hashes), dtype=bool)
        found[first[new]] = True
        return found


def without_controls(pair: Pair) -> Pair:
    """The pair without control characters. Its links are left out if it has other words then."""
    # Printable text has no control characters, and is found faster than they are.
    if (pair.src.isprintable() and pair.tgt.isprintable()) or not any(map(_CONTROLS.search, pair[:2])):
        return pair
    src, tgt = (_CONTROLS.sub(_space, side) for side in (pair.src, pair.tgt))
    same = all(len(a.split()) == len(b.split()) for a, b in ((src, pair.src), (tgt, pair.tgt)))
    return Pair(src, tgt, pair.file, pair.line, pair.links if same else "")


def _space(match: re.Match[str]) -> str:
    """Replace control characters that are white space by a space, and remove the others."""
    return " " if match[0].isspace() else ""


def _tallies(tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    return [{"reason": reason, **asdict(tally)} for reason, tally in tallies.items()]
