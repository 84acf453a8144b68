"""Clean sentence pairs in worker processes, count dropped pairs by reason, and choose source sentences to hold out."""

from __future__ import annotations

import heapq
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, pairwise
from pathlib import PurePath
from typing import Any

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.leaks import N_SAMPLES, comparable, shortened
from transduce.data.pairs import Pair
from transduce.data.word_links import n_words
from transduce.data.workers import Arrays, ResultFile, compressed, compute, decompressed
from transduce.errors import DataError
from transduce.text.training import Reservoir

_SHORT = 10  # up to this number of tokens, the ratio of the lengths does not matter
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(slots=True)
class Tally:
    """A number of pairs, and the first few of them as examples."""

    count: int = 0
    samples: list[dict[str, str]] = field(default_factory=list)

    def add(self, pair: Pair) -> None:
        self.count += 1
        if len(self.samples) < N_SAMPLES:
            self.samples.append({"src": shortened(pair.src), "tgt": shortened(pair.tgt), "place": pair.where})


@dataclass(slots=True)
class CleanReport:
    """Counts and examples of dropped and of changed pairs, by reason. It grows while pairs are read."""

    read: int = 0
    held_out: int = 0
    dropped: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    changed: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    @property
    def kept(self) -> int:
        return self.read - self.held_out - sum(tally.count for tally in self.dropped.values())

    def include(self, later: Mapping[str, Any]) -> None:
        """Add the report of later pairs, in the form of `to_json`."""
        self.read += later["read"]
        for tallies, counted in ((self.dropped, later["dropped"]), (self.changed, later["changed"])):
            for more in counted:
                tally = tallies[more["reason"]]
                tally.count += more["count"]
                tally.samples += more["samples"][: N_SAMPLES - len(tally.samples)]

    def to_json(self) -> dict[str, Any]:
        dropped, changed = (
            [{"reason": reason, **asdict(tally)} for reason, tally in tallies.items()]
            for tallies in (self.dropped, self.changed)
        )
        return {"read": self.read, "kept": self.kept, "held_out": self.held_out, "dropped": dropped, "changed": changed}

    def require_pairs(self, settings: DataSettings, name: str) -> None:
        """Raise a `DataError` with the reasons if no pair of the text `name` is left."""
        if self.kept:
            return
        if not self.read:
            raise DataError(f"{name}: no sentence pair found")
        if not self.dropped:
            raise DataError(f"{name}: all {self.read:,} sentence pairs have the same source, which is held out")
        reasons = ", ".join(f"{tally.count:,} {reason}" for reason, tally in self.dropped.items())
        advice = {TOO_LONG: f"; raise data.max_length ({settings.max_length} tokens) or cut the text into sentences"}
        most = max(self.dropped, key=lambda reason: self.dropped[reason].count)
        raise DataError(f"{name}: no sentence pair of {self.read:,} is left: {reasons}{advice.get(most, '')}")


def format_cleaning(report: Mapping[str, Any]) -> list[str]:
    """Format `CleanReport.to_json` as lines: counts of pairs, and each reason for a drop or change with an example."""
    held_out = f", {n:,} held out" if (n := report.get("held_out", 0)) else ""
    nothing = "" if report["dropped"] else "; nothing dropped"
    lines = [f"cleaning: {report['read']:,} pairs read, {report['kept']:,} kept{held_out}{nothing}"]
    for verb in ("dropped", "changed"):
        for tally in report[verb]:
            first = tally["samples"][:1]
            texts = "".join(f": {s['src']!r} | {s['tgt']!r}" for s in first if s["src"] or s["tgt"])
            example = "".join(f", e.g. {s['place']}{texts}" for s in first)
            lines.append(f"  {verb} {tally['count']:,}: {tally['reason']}{example}")
    return lines


EMPTY, COPY, DUPLICATE, TOO_LONG, RATIO = "empty", "copy", "duplicate", "too long", "ratio of lengths"
CONTROLS = "control characters removed"


class Cleaner:
    """Applies the cleaning rules of `settings` and reports dropped pairs. `SeenHashes` finds the duplicates."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings, self.report = settings, CleanReport()

    def by_rules(self, pair: Pair) -> Pair | None:
        """Return the pair without control characters, or None if it breaks a rule that needs no vocabulary.

        The rules on length need tokens. `lengths_fit` applies them when the pairs are encoded.
        """
        report = self.report
        report.read += 1
        if pair.fault:
            report.dropped[pair.fault.kind].add(pair)
            return None
        if (cleaned := without_controls(pair)) is not pair:
            report.changed[CONTROLS].add(pair)
            pair = cleaned
        if not pair.src or not pair.tgt or pair.src.isspace() or pair.tgt.isspace():
            report.dropped[EMPTY].add(pair)
        elif self.settings.drop_copies and comparable(pair.src) == comparable(pair.tgt):
            report.dropped[COPY].add(pair)
        else:
            return pair
        return None

    def lengths_fit(self, pair: Pair, n_src: int, n_tgt: int) -> bool:
        """Whether to keep a pair with `n_src` and `n_tgt` tokens (without EOS). Dropped pairs are reported."""
        shorter, longer = (n_src, n_tgt) if n_src < n_tgt else (n_tgt, n_src)
        if not shorter:
            self.report.dropped[EMPTY].add(pair)  # only characters that normalization removes
        elif longer > self.settings.max_length:
            self.report.dropped[TOO_LONG].add(pair)
        elif longer > _SHORT and longer > self.settings.max_ratio * shorter:
            self.report.dropped[RATIO].add(pair)
        else:
            return True
        return False


def hashes_of(pairs: Iterable[Pair]) -> np.ndarray:
    # NUL separates the sides. It is a control character, which neither side contains.
    return np.frombuffer(_digests(f"{pair.src}\0{pair.tgt}" for pair in pairs), np.uint64)


def draws_of(pairs: Sequence[Pair], *, seed: int) -> np.ndarray:
    """Hash (seed, source) of each pair of a file, uint64 [N]. `HeldOutSources` chooses by these hashes.

    If the sources are names of sequences in a file of vectors, the folder of the file does not count.
    """
    file = pairs[0].file if pairs else ""
    folder = file.removesuffix(PurePath(file).name)
    keys = (comparable(pair.src.removeprefix(folder)) for pair in pairs)
    return np.frombuffer(_digests(keys, f"{seed}\n"), ">u8").astype(np.uint64)


def _digests(texts: Iterable[str], prefix: str = "") -> bytes:
    """Hash each text, after the prefix, and concatenate the hashes of 8 bytes each."""
    empty = blake2b(prefix.encode(), digest_size=8)  # copying a hash object is faster than making a new one

    def digest(text: str) -> bytes:
        hashed = empty.copy()
        hashed.update(text.encode("utf-8", "surrogatepass"))
        return hashed.digest()

    return b"".join(map(digest, texts))


@dataclass(slots=True)
class HeldOut:
    """A source that may be held out: its hash, its first pair, that pair's corpus, and the number of its pairs."""

    draw: int
    pair: Pair
    corpus: int
    n_pairs: int = 0


class HeldOutSources:
    """Chooses source sentences to hold out for validation, while the training pairs are read.

    The sources with the lowest hash of (seed, source) are chosen. The choice depends neither on the order of the pairs
    nor on the number of pairs per source. All pairs with a chosen source are removed from the training text, so that
    none leaks.
    """

    def __init__(self, most: int) -> None:
        """`most`: the maximum number of sources to choose. It limits the memory."""
        self._most, self._last = most, int(np.iinfo(np.uint64).max)
        self._candidates = dict[str, HeldOut]()  # by source

    def see(self, draws: np.ndarray, pair_of: Callable[[int], Pair], corpus: int = 0) -> None:
        """Consider the next pairs of a corpus. `draws`: their hashes (`draws_of`). `pair_of`: gets a pair by index."""
        for i in (draws <= self._last).nonzero()[0].tolist():
            pair = pair_of(i)
            self._candidates.setdefault(comparable(pair.src), HeldOut(int(draws[i]), pair, corpus)).n_pairs += 1
        if len(self._candidates) > 2 * self._most:
            lowest = self._lowest(self._most)
            self._candidates = {key: held for key, held in self._candidates.items() if key in lowest}
            self._last = max(held.draw for held in lowest.values())

    def choose(self, n: int, most_pairs: int) -> tuple[dict[str, HeldOut], int]:
        """Choose up to `n` sources. Returns them in order of appearance, and the number of their pairs.

        Sources that would raise the number of pairs above `most_pairs` are skipped, unless no other source is left.
        """
        lowest, chosen, n_pairs = self._lowest(n), set[str](), 0
        for key, held in lowest.items():
            if n_pairs + held.n_pairs <= most_pairs:
                chosen.add(key)
                n_pairs += held.n_pairs
        if not chosen and (first := next(iter(lowest), None)) is not None:
            chosen, n_pairs = {first}, lowest[first].n_pairs
        return {key: held for key, held in self._candidates.items() if key in chosen}, n_pairs

    def _lowest(self, n: int) -> dict[str, HeldOut]:
        """The `n` sources with the lowest hashes, in the order of the hashes."""
        return dict(heapq.nsmallest(n, self._candidates.items(), key=lambda item: (item[1].draw, item[0])))


class SeenHashes:
    """A growing set of 64-bit hashes. Each takes 8 bytes of memory, and up to 16 while the set grows.

    In a corpus of 100 million pairs, the chance that any new pair is mistaken for a known pair is 3 in 10,000.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []  # sorted arrays, each at least 8 times as long as the next

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Add hashes, uint64 [N]. Returns whether each is new, bool [N]. Of equal hashes, only the first is new."""
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
        is_new = np.zeros(len(hashes), dtype=bool)
        is_new[first[new]] = True
        return is_new


def without_controls(pair: Pair) -> Pair:
    """Remove control characters from a pair. Control characters that are white space become spaces.

    The word links of the pair are dropped if the number of words changes.
    """
    # Printable text has no control characters, and `isprintable` is faster than a search for them.
    if (pair.src.isprintable() and pair.tgt.isprintable()) or not any(map(_CONTROLS.search, pair[:2])):
        return pair
    src, tgt = (_CONTROLS.sub(lambda match: " " if match[0].isspace() else "", side) for side in pair[:2])
    same = all(n_words(a) == n_words(b) for a, b in ((src, pair.src), (tgt, pair.tgt)))
    return Pair(src, tgt, pair.file, pair.line, pair.links if same else "")


def reverse_pair(pair: Pair) -> Pair:
    """Exchange the sides of a pair, and drop its word links."""
    return pair._replace(src=pair.tgt, tgt=pair.src, links="")


CHUNK = 10_000
"""Number of pairs that are cleaned at once."""

_CHUNK_CHARACTERS = 1 << 25
_SEPARATOR = "\0"  # a control character: cleaning removes it


@dataclass(frozen=True)
class PairChunk:
    """Consecutive pairs of a file, and the number of their corpus. Pickled as columns, which is ten times as fast."""

    corpus: int
    pairs: Sequence[Pair]

    def __reduce__(self) -> tuple[Any, ...]:
        return _chunk_of_columns, (self.corpus, *zip(*self.pairs, strict=True))


def _chunk_of_columns(corpus: int, *columns: Sequence[Any]) -> PairChunk:
    return PairChunk(corpus, list(map(Pair, *columns)))


def chunks_of(corpus: int, pairs: Iterable[Pair], n: int) -> Iterator[PairChunk]:
    """Gather the pairs of a corpus, `n` at a time, or fewer if they are long, so that memory is bounded."""
    chunk, n_characters = list[Pair](), 0
    for pair in pairs:
        chunk.append(pair)
        n_characters += len(pair.src) + len(pair.tgt)
        if len(chunk) == n or n_characters >= _CHUNK_CHARACTERS:
            yield PairChunk(corpus, chunk)
            chunk, n_characters = [], 0
    if chunk:
        yield PairChunk(corpus, chunk)


def pack_pairs(pairs: Iterable[Pair], n: int = CHUNK, *, corpus: int = 0) -> Iterator[Arrays]:
    """Pack pairs that are in memory into records, as `CleanedPairs.records` yields them."""
    return (_packed(corpus, chunk.pairs) for chunk in chunks_of(corpus, pairs, n))


def unpack_pairs(record: Arrays) -> list[Pair]:
    """Return the pairs of a record that `pack_pairs` made, except those that it marks as duplicates."""
    (file, *texts), lines = decompressed(record["text"]).split(_SEPARATOR), record["lines"].tolist()
    src, tgt, links = (texts[i * len(lines) : (i + 1) * len(lines)] for i in range(3))
    return [Pair(src[i], tgt[i], file, lines[i], links[i]) for i in record["new"].nonzero()[0].tolist()]


def split_record(record: Arrays, n: int) -> Iterator[Arrays]:
    """Divide a record into records of at most `n` pairs. If it is divided, its duplicates are left out."""
    if n_pairs(record) <= n:
        yield record
    else:
        yield from pack_pairs(unpack_pairs(record), n, corpus=int(record["corpus"][0]))


def n_pairs(record: Arrays) -> int:
    """The number of pairs of a record, duplicates included."""
    return len(record["lines"])


def _packed(corpus: int, pairs: Sequence[Pair]) -> Arrays:
    """Pack pairs of one file into a record. Its array `new` says which pairs are no duplicates; initially all."""
    src, tgt, files, lines, links, _ = zip(*pairs, strict=True) if pairs else ((),) * len(Pair._fields)
    return {
        "text": compressed(_SEPARATOR.join([*files[:1], *src, *tgt, *links])),
        "lines": np.array(lines, dtype=np.int64),
        "corpus": np.array([corpus]),
        "new": np.ones(len(pairs), dtype=bool),
    }


@dataclass(frozen=True, slots=True)
class CleanPairs:
    """Applies the cleaning rules to a chunk, and hashes the remaining pairs. `seed`: None to hold out no pairs."""

    settings: DataSettings
    seed: int | None

    def __call__(self, chunk: PairChunk) -> Arrays:
        cleaner = Cleaner(self.settings)
        cleaned = list(map(cleaner.by_rules, chunk.pairs))
        kept = [pair for pair in cleaned if pair is not None]
        result = {"report": compressed(json.dumps(cleaner.report.to_json())), **_packed(chunk.corpus, kept)}
        result["indices"] = np.array([i for i, pair in enumerate(cleaned) if pair is not None], np.int64)
        if self.settings.deduplicate:
            result["hashes"] = hashes_of(kept)
        if self.seed is not None:
            result["draws"] = draws_of(kept, seed=self.seed)
        return result


@dataclass(frozen=True, slots=True)
class CleanedPairs:
    """The cleaned pairs of one corpus, in a file. `without`: held-out sources, as `comparable` returns them."""

    file: ResultFile
    numbers: range  # positions of its results in the file
    without: Collection[str] = ()
    shift: int = 0  # added to the number of the corpus if its pairs are reversed

    def records(self) -> Iterator[Arrays]:
        """Yield all pairs, also held-out pairs, in packed records. A reversed corpus is not reversed in the records."""
        for record in self.file.read(self.numbers):
            yield {name: record[name] for name in ("text", "lines", "new")} | {"corpus": record["corpus"] + self.shift}

    def __call__(self) -> Iterator[Pair]:
        """Yield the pairs that are not held out."""
        for record in self.records():
            for pair in unpack_pairs(record):
                if not self.without or comparable(pair.src) not in self.without:
                    yield reverse_pair(pair) if self.shift else pair


@dataclass
class PairCleaning:
    """Cleans all training pairs. Collects a report, a sample for the vocabulary, and sources that may be held out."""

    settings: DataSettings
    seed: int
    sample: Reservoir[tuple[str, str]]
    held_out: HeldOutSources | None
    report: CleanReport = field(default_factory=CleanReport)

    def clean(self, corpora: Sequence[Iterable[Pair]], file: ResultFile, *, n: int = CHUNK) -> list[CleanedPairs]:
        """Clean the pairs of all corpora, `n` at a time, and write them to `file`."""
        chunks = chain.from_iterable(chunks_of(number, pairs, n) for number, pairs in enumerate(corpora))
        function = CleanPairs(self.settings, None if self.held_out is None else self.seed)
        seen, counts = SeenHashes(), [0] * len(corpora)
        for chunk, result in compute(function, chunks, file, n_workers=self.settings.workers):
            self._see(chunk, result, seen)
            counts[chunk.corpus] += 1
        ends = accumulate(counts, initial=0)
        return [CleanedPairs(file, range(start, end)) for start, end in pairwise(ends)]

    def _see(self, chunk: PairChunk, result: Arrays, seen: SeenHashes) -> None:
        """Add the next chunk to the report, the sample and the sources to hold out. Mark duplicates in its result."""
        report = json.loads(decompressed(result["report"]))
        self.report.include(report)
        cleaned = without_controls if report["changed"] else lambda pair: pair
        indices = result["indices"]
        if self.settings.deduplicate:
            result["new"] = new = seen.add(result["hashes"])
            for i in indices[~new].tolist():
                self.report.dropped[DUPLICATE].add(cleaned(chunk.pairs[i]))
            indices = indices[new]

        def pair_of(i: int) -> Pair:
            return cleaned(chunk.pairs[indices[i]])

        self.sample.add_some(len(indices), lambda i: pair_of(i)[:2])
        if self.held_out is not None:
            self.held_out.see(result["draws"][result["new"]], pair_of, chunk.corpus)
