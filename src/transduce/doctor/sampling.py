"""A sample of the data that settings name: blocks of lines from several places of each corpus, and the held-out sets.

Reading is bounded in time and memory for any size of corpus. Nothing is cleaned. Lines that cannot be read are
collected as faults instead of raising.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

from transduce.config import Corpus, DataSettings, Settings
from transduce.data.corpus import FORMATS, Pair, columns_of, corpus_files, corpus_name, json_pair, read_pairs, tsv_pair
from transduce.data.labelled import Labelled, labelled_row
from transduce.data.lines import bare_suffix, decode_line, open_bytes
from transduce.data.sources import MemorySource
from transduce.demo.corpus import demo_pairs
from transduce.doctor.scanning import BLOCK, MOST_BLOCKS, Scan, scan
from transduce.errors import DataError
from transduce.tasks.base import Form
from transduce.tasks.registry import find_task

Row = tuple[str, ...]  # (source, target), (line,), or (label, text[, text])
Parser = Callable[[list[str], int], Row | None]
"""Turns the lines of each file with this number into a row, or None for a header. Raises `ValueError`."""

WINDOW = 200  # consecutive lines that are examined together
MOST_CHARACTERS = 2_000_000  # of rows that are encoded or trained on
MOST_HELD = 20_000  # rows of a held-out set
_MOST_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows. `numbers`: line number of each row, from 1."""

    rows: tuple[Row, ...]
    numbers: tuple[int, ...]
    from_end: bool = False
    """Whether lines were counted from the end of both files, so that numbers are estimates."""

    @property
    def first(self) -> int:
        """Line number of the first row."""
        return self.numbers[0]

    def windows(self, n: int = WINDOW) -> Iterator[Block]:
        """Pieces of at most `n` rows."""
        cuts = (slice(begin, begin + n) for begin in range(0, len(self.rows), n))
        return (Block(self.rows[cut], self.numbers[cut], self.from_end) for cut in cuts)


@dataclass(frozen=True, slots=True)
class Part:
    """What was read of one corpus.

    `counts`: lines of each file. `total`: rows. `counted`: whether these are exact. `how`: how the sample was drawn.
    """

    name: str
    files: tuple[str, ...]
    counts: tuple[int, ...]
    total: int
    counted: bool
    how: str
    blocks: tuple[Block, ...]
    reread: Callable[[int, int], list[Row]] | None = None
    """Reads so many rows from a line on: (line from 1, n)."""

    @property
    def n_rows(self) -> int:
        """Rows in the sample."""
        return sum(len(block.rows) for block in self.blocks)

    def rows(self) -> Iterator[Row]:
        """All rows of the sample."""
        return chain.from_iterable(block.rows for block in self.blocks)

    def source(self, windows: Sequence[Block], form: Form) -> MemorySource[Any]:
        """Some windows as a source that a task reads; records name their file and line."""
        records: list[Any] = []
        file = (*self.files, self.name)[0]
        for window in windows:
            for row, number in zip(window.rows, window.numbers, strict=True):
                if form == "pairs":
                    records.append(Pair(row[0], row[1], (file, number)))
                else:
                    records.append(row[0] if form == "text" else Labelled(row[0], row[1:], (file, number)))
        return MemorySource(self.name, records, tuple(Path(name).name for name in self.files))


@dataclass(frozen=True, slots=True)
class Sample:
    """What the checks examine: training corpora, held-out sets and messages for lines that cannot be read."""

    form: Form
    settings: Settings
    parts: tuple[Part, ...]
    held: tuple[Part, ...]
    faults: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Number of training rows."""
        return sum(part.total for part in self.parts)

    @property
    def n_rows(self) -> int:
        """Training rows in the sample."""
        return sum(part.n_rows for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether the sample is the whole corpus."""
        return all(part.counted and part.n_rows >= part.total for part in self.parts)

    def rows(self) -> Iterator[Row]:
        """All training rows."""
        return chain.from_iterable(part.rows() for part in self.parts)

    def some(self, n: int) -> list[Row]:
        """About `n` rows: whole windows from everywhere, of each corpus in proportion to its size."""
        return [row for windows in select(self.parts, n) for window in windows for row in window.rows]


def select(parts: Sequence[Part], n: int) -> list[list[Block]]:
    """Windows of each part, about `n` rows together, in proportion to the sizes of the parts."""
    rows = [row for part in parts for row in part.rows()]
    n_characters = sum(len(text) for row in rows for text in row) / max(1, len(rows))
    n = min(n, round(MOST_CHARACTERS / max(1.0, n_characters)))
    length = min(WINDOW, max(20, n // max(1, len(parts))))
    total, chosen = max(1, sum(part.total for part in parts)), []
    for part in parts:
        windows = [window for block in part.blocks for window in block.windows(length)]
        wanted = max(1, round(n / length * part.total / total))
        step = max(1.0, len(windows) / wanted)
        chosen.append([windows[int(i * step)] for i in range(min(len(windows), wanted))])
    return chosen


def take_sample(settings: Settings, *, seconds: float = 5.0, most_blocks: int = MOST_BLOCKS) -> Sample:
    """Sample all text that the settings name, in about `seconds`. A missing file raises `DataError`."""
    data, form = settings.data, find_task(settings.task).reads
    if data.demo:
        pairs = demo_pairs("train", min(data.demo, 10 * BLOCK), seed=settings.training.seed)
        rows = tuple((pair.src, pair.tgt) for pair in pairs)
        block = Block(rows, tuple(range(1, len(rows) + 1)))
        part = Part("built-in corpus", (), (data.demo,), data.demo, True, "generated", (block,))
        return Sample(form, settings, (part,), ())
    reader = _Reader(form, data)
    each = seconds / max(1, len(data.train))
    parts = tuple(reader.part(corpus, each, most_blocks) for corpus in data.train)
    most, corpora = -(-MOST_HELD // BLOCK), (*data.valid, *data.test)
    each = min(1.0, 0.5 * seconds / max(1, len(corpora)))
    held = tuple(reader.part(corpus, each, most) for corpus in corpora) if most_blocks >= most else ()
    return Sample(form, settings, parts, held, tuple(reader.faults))


class _Reader:
    """Reads samples of corpora, and collects faults."""

    def __init__(self, form: Form, data: DataSettings) -> None:
        self.form, self.data = form, data
        self.faults: list[str] = []

    def part(self, corpus: Corpus, seconds: float, most_blocks: int) -> Part:
        files = corpus_files(corpus)
        if self.form == "pairs" and corpus.path is not None:
            if bare_suffix(corpus.path) == ".tmx":
                return self._tmx(corpus, seconds, most_blocks * BLOCK)
            if bare_suffix(corpus.path) not in FORMATS:
                read_pairs(corpus, src_lang="src", tgt_lang="tgt")  # raises for an unknown format
        until = time.monotonic() + seconds
        scans = [scan(path, seconds=0.6 * seconds / len(files)) for path in files]
        self.faults += [found.fault for found in scans if found.fault]
        counts, whole = tuple(found.total for found in scans), all(found.whole for found in scans)
        parse, headers = self._parser(scans[0], len(scans))
        blocks, numbers = dict[int, Block](), _numbers(scans, most_blocks)
        for n in sorted(numbers, key=lambda n: n and Random(n).random()):  # in random order, as time may run out
            blocks[n] = self._block(scans, [found.block(n) for found in scans], n * BLOCK + 1, parse)
            if time.monotonic() > until:
                break
        ordered = [blocks[n] for n in sorted(blocks)]
        if not whole and len(scans) == 2 and not any(found.is_compressed for found in scans):
            tails = [found.tail(BLOCK) for found in scans]
            n = min(map(len, tails))
            end = self._block(scans, [lines[len(lines) - n :] for lines in tails], min(counts) - n + 1, parse)
            ordered.append(replace(end, from_end=True))

        def reread(first: int, n: int) -> list[Row]:
            return list(self._block(scans, [found.read(first - 1, n) for found in scans], first, parse).rows)

        return Part(
            name=corpus_name(corpus),
            files=tuple(map(str, files)),
            counts=counts,
            total=max(0, min(counts) - headers),
            counted=whole,
            how=_how(scans, len(blocks)),
            blocks=tuple(block for block in ordered if block.rows),
            reread=reread,
        )

    def _block(self, scans: Sequence[Scan], sides: list[list[bytes]], first: int, parse: Parser) -> Block:
        """The rows of lines with the same number."""
        rows, numbers = list[Row](), list[int]()
        for number, raw in enumerate(zip(*sides, strict=False), first):
            texts, file = list[str](), scans[0].path
            try:
                for found, line in zip(scans, raw, strict=True):
                    file = found.path
                    texts.append(decode_line(line + b"\n", first=number == 1))
                row = parse(texts, number)
            except ValueError as error:
                if len(self.faults) < _MOST_FAULTS:
                    self.faults.append(f"{file}, line {number}: {error}")
                continue
            if row is not None:
                rows.append(row)
                numbers.append(number)
        return Block(tuple(rows), tuple(numbers))

    def _parser(self, first: Scan, n_files: int) -> tuple[Parser, int]:
        """The function that turns lines into rows, as training does, and the number of header lines."""
        if self.form == "text" or n_files == 2:
            return lambda texts, number: tuple(texts), 0
        line = next(iter(first.block(0, n=1)), b"").decode("utf-8", errors="replace").removeprefix("\ufeff")
        if self.form == "labelled":
            n_texts = line.count("\t")
            return lambda texts, number: labelled_row(texts[0], n_texts if number > 1 and n_texts in (1, 2) else 0), 0
        langs = self.data.src_lang, self.data.tgt_lang
        if bare_suffix(first.path) == ".jsonl":
            return lambda texts, number: json_pair(texts[0], *langs), 0
        columns = None
        with contextlib.suppress(ValueError):
            columns = columns_of(line, *langs)

        def tsv(texts: list[str], number: int) -> Row | None:
            known = columns or columns_of(texts[0], *langs)
            return None if number == 1 and known.named else tsv_pair(texts[0], known)

        return tsv, int(columns is not None and columns.named)

    def _tmx(self, corpus: Corpus, seconds: float, most: int) -> Part:
        """Translation units from the beginning of a TMX file. Their number is counted by their tags."""
        assert corpus.path is not None
        until, n_units, counted = time.monotonic() + seconds / 2, 0, True
        with open_bytes(corpus.path) as file:
            rest = b""
            while counted and (chunk := file.read(1 << 20)):
                rest = rest[-4:] + chunk
                n_units += rest.count(b"<tu>") + rest.count(b"<tu ")
                counted = time.monotonic() <= until
        rows, numbers, whole = list[Row](), list[int](), False
        until = time.monotonic() + seconds / 2
        try:
            for pair in islice(read_pairs(corpus, src_lang=self.data.src_lang, tgt_lang=self.data.tgt_lang), most):
                rows.append((pair.src, pair.tgt))
                numbers.append(pair.place[1])
                if time.monotonic() > until:
                    break
            else:
                whole = len(rows) < most
        except DataError as error:
            self.faults.append(str(error))
        total = len(rows) if whole else max(n_units, len(rows))
        how = "read completely" if whole else f"{len(rows):,} units from the beginning"
        blocks = (Block(tuple(rows), tuple(numbers)),) if rows else ()
        return Part(corpus_name(corpus), (str(corpus.path),), (total,), total, counted and whole, how, blocks)


def _numbers(scans: Sequence[Scan], most: int) -> list[int]:
    """Numbers of at most so many blocks that all files have, evenly spaced, with the first and the last."""
    have = sorted(set[int].intersection(*(set(found.kept) for found in scans)))
    if len(have) <= most:
        return have
    return sorted({have[round(i * (len(have) - 1) / max(1, most - 1))] for i in range(most)})


def _how(scans: Sequence[Scan], n_blocks: int) -> str:
    """How the sample was drawn."""
    if all(found.whole for found in scans):
        n = -(-min(found.n_lines for found in scans) // BLOCK)
        return "read completely" if n_blocks >= n else f"all lines counted, {n_blocks} places examined"
    share = min(found.share for found in scans if not found.whole)
    end = "" if any(found.is_compressed for found in scans) else " and the end"
    return f"{n_blocks} places in the first {share:.0%}{end} examined; number of lines estimated"
