"""Clean sentence pairs in worker processes, and keep them, compressed, until they are encoded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import zstandard

from transduce.config.settings import DataSettings
from transduce.data.clean import DUPLICATE, Cleaner, CleanReport, HeldOutSources, SeenHashes, draws_of, hashes_of
from transduce.data.corpus import Pair
from transduce.data.leaks import comparable
from transduce.data.workers import Arrays, ResultFile, Workers, compute
from transduce.text.training import Reservoir

CHUNK = 10_000
"""Pairs that a worker process gets at once."""

VECTOR_CHUNK = 50
"""The same where the sources are sequences of vectors."""

_SEPARATOR = "\0"  # a control character, which cleaning removes


class PairChunk(NamedTuple):
    """Pairs of one file as they were read, in columns, which are sent faster than objects."""

    corpus: int
    file: str
    lines: list[int]
    src: list[str]
    tgt: list[str]
    links: list[str]

    def pair(self, i: int) -> Pair:
        """One of the pairs."""
        return Pair(self.src[i], self.tgt[i], (self.file, self.lines[i]), self.links[i])


def chunks_of(pairs: Iterable[Pair], n: int = CHUNK, *, corpus: int = 0) -> Iterator[PairChunk]:
    """The pairs of one corpus, all of whose places name the same file, in chunks."""
    pairs = iter(pairs)
    while some := list(islice(pairs, n)):
        rows = zip(*((pair.place[1], pair.src, pair.tgt, pair.links) for pair in some), strict=True)
        yield PairChunk(corpus, some[0].place[0], *map(list, rows))


def pack_pairs(pairs: Iterable[Pair], n: int = CHUNK, *, corpus: int = 0) -> Iterator[Arrays]:
    """Pairs as `CleanedPairs.records` has them, for pairs in memory."""
    for chunk in chunks_of(pairs, n, corpus=corpus):
        yield _packed(chunk, range(len(chunk.src)))


def unpack_pairs(record: Arrays) -> list[Pair]:
    """The pairs of a record, without duplicates."""
    text = zstandard.ZstdDecompressor().decompress(record["text"].tobytes())
    columns, n = text.decode("utf-8", "surrogatepass").split(_SEPARATOR), n_pairs(record)
    file, lines = record["file"].tobytes().decode("utf-8", "surrogatepass"), record["lines"].tolist()
    src, tgt, links = (columns[i : i + n] for i in range(0, 3 * n, n))
    return [Pair(src[i], tgt[i], (file, lines[i]), links[i]) for i in record["new"].nonzero()[0].tolist()]


def n_pairs(record: Arrays) -> int:
    """The pairs of a record, with duplicates."""
    return len(record["lines"])


def _packed(chunk: PairChunk, places: Iterable[int]) -> Arrays:
    """Some pairs of a chunk. `new`: which of them are no duplicates; at first all."""
    places = list(places)
    columns = chain.from_iterable([column[i] for i in places] for column in (chunk.src, chunk.tgt, chunk.links))
    text = _SEPARATOR.join(columns).encode("utf-8", "surrogatepass")
    return {
        "text": as_bytes(zstandard.ZstdCompressor(level=1).compress(text)),
        "file": as_bytes(chunk.file.encode("utf-8", "surrogatepass")),
        "lines": np.array([chunk.lines[i] for i in places], dtype=np.int64),
        "corpus": np.array([chunk.corpus]),
        "new": np.ones(len(places), dtype=bool),
    }


@dataclass(frozen=True, slots=True)
class CleanPairs:
    """Applies the rules to a chunk, and hashes what passes. `seed`: None if nothing will be held out."""

    settings: DataSettings
    seed: int | None

    def key(self, chunk: PairChunk) -> bytes:
        """See `ChunkFunction`."""
        rules = (self.settings.deduplicate, self.settings.drop_copies, self.seed)
        return digest_of(rules, *(_SEPARATOR.join(map(str, column)) for column in chunk[1:]), chunk.corpus)

    def __call__(self, chunk: PairChunk) -> Arrays:
        cleaner, kept, places, changed = Cleaner(self.settings), list[Pair](), list[int](), list[tuple[Any, ...]]()
        key = self.key(chunk)
        for i in range(len(chunk.src)):
            if (pair := cleaner.by_rules(chunk.pair(i))) is not None:
                places.append(i)
                kept.append(pair)
                if (pair.src, pair.tgt) != (chunk.src[i], chunk.tgt[i]):
                    changed.append((i, pair.src, pair.tgt, pair.links))
        _apply(chunk, changed)
        facts = {"report": cleaner.report.to_json(), "changed": changed}
        result = _packed(chunk, places)
        result |= {"key": as_bytes(key), "facts": as_bytes(json.dumps(facts).encode()), "places": np.array(places, int)}
        if self.settings.deduplicate:
            result["hashes"] = hashes_of(kept)
        if self.seed is not None:
            result["draws"] = draws_of(kept, seed=self.seed)
        return result


@dataclass(frozen=True, slots=True)
class CleanedPairs:
    """The cleaned pairs of one corpus in a file. `without`: sources (`comparable`) that are held out."""

    file: ResultFile
    numbers: range  # of its results in the file
    without: Collection[str] = ()

    def records(self) -> Iterator[Arrays]:
        """The pairs in chunks, packed, with those that are held out."""
        for record in self.file.read(self.numbers):
            yield {name: record[name] for name in ("text", "file", "lines", "corpus", "new")}

    def __call__(self) -> Iterator[Pair]:
        """The pairs, from the first one at each call."""
        for record in self.records():
            for pair in unpack_pairs(record):
                if not self.without or comparable(pair.src) not in self.without:
                    yield pair


@dataclass
class PairCleaning:
    """The cleaning of all training pairs: report, sample for the vocabulary, and what may be held out."""

    settings: DataSettings
    seed: int
    sample: Reservoir[tuple[str, str]]
    held_out: HeldOutSources | None
    report: CleanReport = field(default_factory=CleanReport)

    def clean(
        self, corpora: Iterable[Iterable[Pair]], file: ResultFile, workers: Workers, *, n: int
    ) -> list[CleanedPairs]:
        """Read and clean all corpora, `n` pairs at a time."""
        function = CleanPairs(self.settings, None if self.held_out is None else self.seed)
        seen, counts = SeenHashes(), list[int]()

        def chunks() -> Iterator[PairChunk]:
            for corpus, pairs in enumerate(corpora):
                counts.append(0)
                yield from chunks_of(pairs, n, corpus=corpus)

        for chunk, result in compute(function, chunks(), workers, file):
            self._see(chunk, result, seen)
            counts[chunk.corpus] += 1
        ends = list(accumulate(counts, initial=0))
        return [CleanedPairs(file, range(start, end)) for start, end in pairwise(ends)]

    def _see(self, chunk: PairChunk, result: Arrays, seen: SeenHashes) -> None:
        """Take note of the next chunk and its result, and mark duplicates in that."""
        facts = json.loads(result["facts"].tobytes())
        self.report.include(facts["report"])
        _apply(chunk, facts["changed"])
        places = result["places"]
        if self.settings.deduplicate:
            result["new"] = new = seen.add(result["hashes"])
            for i in places[~new].tolist():
                self.report.drop(DUPLICATE, chunk.pair(i))
            places = places[new]
        kept = places.tolist()
        self.sample.add_some(len(kept), lambda i: (chunk.src[kept[i]], chunk.tgt[kept[i]]))
        if self.held_out is not None:
            self.held_out.see(result["draws"][result["new"]], lambda i: chunk.pair(kept[i]))


def _apply(chunk: PairChunk, changed: Iterable[Iterable[Any]]) -> None:
    """Replace the texts that cleaning has changed."""
    for i, src, tgt, links in changed:
        chunk.src[i], chunk.tgt[i], chunk.links[i] = src, tgt, links


def digest_of(*parts: object) -> bytes:
    """A key of `ChunkFunction`: 16 bytes."""
    found = blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()


def as_bytes(data: bytes) -> np.ndarray:
    """Bytes as an array."""
    return np.frombuffer(data, np.uint8)
