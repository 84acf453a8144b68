"""Clean sentence pairs in worker processes, and keep them, compressed, until they are encoded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import zstandard

import transduce
from transduce.config.settings import DataSettings
from transduce.data.check_sample import Windows
from transduce.data.clean import DUPLICATE, Cleaner, CleanReport, HeldOutSources, SeenHashes, draws_of, hashes_of
from transduce.data.corpus import CHUNK, Pair, RawPairs
from transduce.data.leaks import comparable
from transduce.data.sources import Source
from transduce.data.workers import Arrays, ResultFile, Workers, compute
from transduce.text.training import Reservoir

VECTOR_CHUNK = 200
"""Pairs that are cleaned and encoded at once where the sources are sequences of vectors."""

_SEPARATOR = "\0"  # a control character: cleaning removes it


@dataclass(frozen=True, slots=True)
class Columns:
    """Pairs of one file in columns, which are sent to other processes faster than objects."""

    file: str
    lines: list[int]
    src: list[str]
    tgt: list[str]
    links: list[str]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Columns:
        """At least one pair; the places of all name the same file."""
        rows = ((pair.place[1], pair.src, pair.tgt, pair.links) for pair in pairs)
        lines, src, tgt, links = map(list, zip(*rows, strict=True))
        return cls(pairs[0].place[0], lines, src, tgt, links)

    def __len__(self) -> int:
        return len(self.src)

    def __getitem__(self, i: int) -> Pair:
        return Pair(self.src[i], self.tgt[i], (self.file, self.lines[i]), self.links[i])

    def pairs(self) -> Iterator[Pair]:
        """All pairs."""
        return map(self.__getitem__, range(len(self)))

    def content(self) -> bytes:
        """All that the pairs depend on."""
        columns = (self.file, *map(str, self.lines), *self.src, *self.tgt, *self.links)
        return _SEPARATOR.join(columns).encode("utf-8", "surrogatepass")


class PairChunk(NamedTuple):
    """Consecutive pairs of a corpus as they were read."""

    corpus: int
    block: RawPairs | Columns


def read_chunks(corpus: int, source: Source[Pair], windows: Windows[Pair], n: int) -> Iterator[PairChunk]:
    """The pairs of a corpus, not decoded where possible, `n` at a time."""
    if source.read_raw is None:
        pairs = windows.watch(source.read())
        while some := list(islice(pairs, n)):
            yield PairChunk(corpus, Columns.of(some))
        return
    for block in source.read_raw(n):
        windows.see(len(block), block.__getitem__)
        yield PairChunk(corpus, block)


def pack_pairs(pairs: Iterable[Pair], n: int = CHUNK, *, corpus: int = 0) -> Iterator[Arrays]:
    """Pairs as `CleanedPairs.records` has them, for pairs in memory."""
    pairs = iter(pairs)
    while some := list(islice(pairs, n)):
        yield _packed(corpus, some)


def unpack_pairs(record: Arrays) -> list[Pair]:
    """The pairs of a record, without duplicates."""
    text = zstandard.ZstdDecompressor().decompress(record["text"].tobytes())
    columns, n = text.decode("utf-8", "surrogatepass").split(_SEPARATOR), n_pairs(record)
    file, lines = record["file"].tobytes().decode("utf-8", "surrogatepass"), record["lines"].tolist()
    src, tgt, links = (columns[i * n : (i + 1) * n] for i in range(3))
    return [Pair(src[i], tgt[i], (file, lines[i]), links[i]) for i in record["new"].nonzero()[0].tolist()]


def n_pairs(record: Arrays) -> int:
    """The pairs of a record, with duplicates."""
    return len(record["lines"])


def _packed(corpus: int, pairs: Sequence[Pair]) -> Arrays:
    """`new`: which of the pairs are no duplicates; at first all."""
    columns = ([pair.src for pair in pairs], [pair.tgt for pair in pairs], [pair.links for pair in pairs])
    text = _SEPARATOR.join(chain.from_iterable(columns)).encode("utf-8", "surrogatepass")
    file = pairs[0].place[0] if pairs else ""
    return {
        "text": as_bytes(zstandard.ZstdCompressor(level=1).compress(text)),
        "file": as_bytes(file.encode("utf-8", "surrogatepass")),
        "lines": np.array([pair.place[1] for pair in pairs], dtype=np.int64),
        "corpus": np.array([corpus]),
        "new": np.ones(len(pairs), dtype=bool),
    }


@dataclass(frozen=True, slots=True)
class CleanPairs:
    """Applies the rules to a chunk, and hashes what passes. `seed`: None if nothing will be held out."""

    settings: DataSettings
    seed: int | None

    def key(self, chunk: PairChunk) -> bytes:
        """See `ChunkFunction`."""
        rules = (self.settings.deduplicate, self.settings.drop_copies, self.seed)
        return digest_of(rules, chunk.corpus, chunk.block.content())

    def __call__(self, chunk: PairChunk) -> Arrays:
        cleaner, kept, places, changed = Cleaner(self.settings), list[Pair](), list[int](), list[tuple[Any, ...]]()
        for i, pair in enumerate(chunk.block.pairs()):
            if (found := cleaner.by_rules(pair)) is not None:
                places.append(i)
                kept.append(found)
                if found is not pair:
                    changed.append((i, found.src, found.tgt, found.links))
        facts = {"report": cleaner.report.to_json(), "changed": changed}
        result = {"key": as_bytes(self.key(chunk)), "facts": as_bytes(json.dumps(facts).encode())}
        result |= {**_packed(chunk.corpus, kept), "places": np.array(places, np.int64)}
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
        self, chunks: Iterable[PairChunk], n_corpora: int, file: ResultFile, workers: Workers
    ) -> list[CleanedPairs]:
        """Clean the chunks of all corpora."""
        function = CleanPairs(self.settings, None if self.held_out is None else self.seed)
        seen, counts = SeenHashes(), [0] * n_corpora
        for chunk, result in compute(function, chunks, workers, file):
            self._see(chunk, result, seen)
            counts[chunk.corpus] += 1
        ends = accumulate(counts, initial=0)
        return [CleanedPairs(file, range(start, end)) for start, end in pairwise(ends)]

    def _see(self, chunk: PairChunk, result: Arrays, seen: SeenHashes) -> None:
        """Take note of the next chunk and its result, and mark duplicates in that."""
        facts = json.loads(result["facts"].tobytes())
        self.report.include(facts["report"])
        changed, places = {i: texts for i, *texts in facts["changed"]}, result["places"]

        def pair_of(i: int) -> Pair:
            pair = chunk.block[i]
            src, tgt, links = changed.get(i, (pair.src, pair.tgt, pair.links))
            return Pair(src, tgt, pair.place, links)

        if self.settings.deduplicate:
            result["new"] = new = seen.add(result["hashes"])
            for i in places[~new].tolist():
                self.report.drop(DUPLICATE, pair_of(i))
            places = places[new]
        kept = places.tolist()

        def sides_of(i: int) -> tuple[str, str]:
            pair = pair_of(kept[i])
            return pair.src, pair.tgt

        self.sample.add_some(len(kept), sides_of)
        if self.held_out is not None:
            self.held_out.see(result["draws"][result["new"]], lambda i: pair_of(kept[i]))


def digest_of(*parts: object) -> bytes:
    """A key of `ChunkFunction`: 16 bytes. Results of another version are not used again."""
    found = blake2b(transduce.__version__.encode(), digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()


def as_bytes(data: bytes) -> np.ndarray:
    """Bytes as an array."""
    return np.frombuffer(data, np.uint8)
