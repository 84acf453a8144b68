"""Clean sentence pairs in worker processes, and keep them, compressed, until they are encoded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise

import numpy as np

from transduce.config.settings import DataSettings
from transduce.data.clean import (
    DUPLICATE,
    Cleaner,
    CleanReport,
    HeldOutSources,
    SeenHashes,
    draws_of,
    hashes_of,
    without_controls,
)
from transduce.data.corpus import Pair, PairColumns
from transduce.data.leaks import comparable
from transduce.data.spool import Arrays, ResultFile, compressed, decompressed
from transduce.data.workers import Workers, compute
from transduce.text.training import Reservoir

CHUNK, VECTOR_CHUNK = 10_000, 200
"""Pairs that are cleaned and encoded at once, of text and where the sources are sequences of vectors."""

_SEPARATOR = "\0"  # a control character: cleaning removes it


@dataclass(frozen=True, slots=True)
class PairChunk:
    """Pairs as they were read, and the number of their corpus."""

    corpus: int
    pairs: PairColumns


def pack_pairs(pairs: Iterable[Pair], n: int = CHUNK) -> Iterator[Arrays]:
    """Pairs as `CleanedPairs.records` has them, for pairs in memory."""
    pairs = iter(pairs)
    while some := list(islice(pairs, n)):
        yield _packed(0, some)


def unpack_pairs(record: Arrays) -> list[Pair]:
    """The pairs of a record, without duplicates."""
    (file, *texts), n, lines = decompressed(record["text"]).split(_SEPARATOR), n_pairs(record), record["lines"].tolist()
    src, tgt, links = (texts[i * n : (i + 1) * n] for i in range(3))
    return [Pair(src[i], tgt[i], file, lines[i], links[i]) for i in record["new"].nonzero()[0].tolist()]


def n_pairs(record: Arrays) -> int:
    """The pairs of a record, with duplicates."""
    return len(record["lines"])


def _packed(corpus: int, pairs: Sequence[Pair]) -> Arrays:
    """Pairs of one file. `new`: which of them are no duplicates; at first all."""
    src, tgt, files, lines, links = zip(*pairs, strict=True) if pairs else ((),) * len(Pair._fields)
    return {
        "text": compressed(_SEPARATOR.join([*files[:1], *src, *tgt, *links])),
        "lines": np.array(lines, dtype=np.int64),
        "corpus": np.array([corpus]),
        "new": np.ones(len(pairs), dtype=bool),
    }


@dataclass(frozen=True, slots=True)
class CleanPairs:
    """Applies the rules to a chunk, and hashes what passes. `seed`: None if nothing will be held out."""

    settings: DataSettings
    seed: int | None

    def __call__(self, chunk: PairChunk) -> Arrays:
        cleaner = Cleaner(self.settings)
        found = list(map(cleaner.by_rules, chunk.pairs))
        kept = [pair for pair in found if pair is not None]
        result = {"report": compressed(json.dumps(cleaner.report.to_json())), **_packed(chunk.corpus, kept)}
        result["places"] = np.array([i for i, pair in enumerate(found) if pair is not None], np.int64)
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
            yield {name: record[name] for name in ("text", "lines", "corpus", "new")}

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

    def clean(self, corpora: Sequence[Iterable[PairColumns]], file: ResultFile, workers: Workers) -> list[CleanedPairs]:
        """Clean the pairs of all corpora."""
        chunks = (PairChunk(number, pairs) for number, some in enumerate(corpora) for pairs in some)
        function = CleanPairs(self.settings, None if self.held_out is None else self.seed)
        seen, counts = SeenHashes(), [0] * len(corpora)
        for chunk, result in compute(function, chunks, workers, file):
            self._see(chunk, result, seen)
            counts[chunk.corpus] += 1
        ends = accumulate(counts, initial=0)
        return [CleanedPairs(file, range(start, end)) for start, end in pairwise(ends)]

    def _see(self, chunk: PairChunk, result: Arrays, seen: SeenHashes) -> None:
        """Take note of the next chunk and its result, and mark duplicates in that."""
        report = json.loads(decompressed(result["report"]))
        self.report.include(report)
        cleaned = without_controls if report["changed"] else lambda pair: pair
        places = result["places"]
        if self.settings.deduplicate:
            result["new"] = new = seen.add(result["hashes"])
            for i in places[~new].tolist():
                self.report.drop(DUPLICATE, cleaned(chunk.pairs.pair(i)))
            places = places[new]

        def pair_of(i: int) -> Pair:
            return cleaned(chunk.pairs.pair(int(places[i])))

        self.sample.add_some(len(places), lambda i: pair_of(i)[:2])
        if self.held_out is not None:
            self.held_out.see(result["draws"][result["new"]], pair_of)
