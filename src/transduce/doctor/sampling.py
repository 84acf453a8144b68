"""A sample of the text that settings name: blocks of lines from several places of each corpus, and the held-out sets.

The files of a corpus are read together from their beginning until time runs out. Every 2^k-th block of lines is kept,
so memory is bounded too. Nothing is cleaned. Lines that cannot be read are collected as faults instead of raising.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, takewhile, zip_longest
from pathlib import Path
from typing import Any

from transduce.config import Corpus, DataSettings, Settings
from transduce.data.corpus import LINE_FORMATS, Labelled, Pair, corpus_files, corpus_name, labelled_parser, read_pairs
from transduce.data.lines import (
    COMPRESSIONS,
    MAX_LINE,
    TOO_LONG,
    LineParser,
    bare_suffix,
    check_is_text,
    decode_line,
    open_bytes,
    open_watched,
)
from transduce.data.sources import Source, memory_source
from transduce.demo.corpus import demo_pairs
from transduce.errors import DataError
from transduce.tasks.base import Form
from transduce.tasks.registry import find_task

Row = tuple[str, ...]  # (source, target), (line,), or (label, text[, text])

BLOCK = 2_000  # lines
MOST_BLOCKS = 100  # kept of one corpus
MOST_BYTES = 1 << 22  # of one block of a file; only the first lines of a longer one are used
_AT_ONCE = 50  # lines that are read before their size is known
WINDOW = 200  # consecutive lines that are examined together
MOST_CHARACTERS = 2_000_000  # of rows that are encoded or trained on
MOST_HELD = 10  # blocks of a held-out set


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
    reread: Callable[[int, int], tuple[Row, ...]] | None = None
    """Reads so many rows from a line on: (line from 1, n)."""

    @property
    def n_rows(self) -> int:
        """Rows in the sample."""
        return sum(len(block.rows) for block in self.blocks)

    def rows(self) -> Iterator[Row]:
        """All rows of the sample."""
        return chain.from_iterable(block.rows for block in self.blocks)

    def source(self, windows: Sequence[Block], form: Form) -> Source[Any]:
        """Some windows as a source that a task reads; records name their file and line."""
        file = (*self.files, self.name)[0]
        make: dict[Form, Callable[[Row, int], Any]] = {
            "pairs": lambda row, number: Pair(row[0], row[1], (file, number)),
            "text": lambda row, number: row[0],
            "labelled": lambda row, number: Labelled(row[0], row[1:], (file, number)),
        }
        records = [record for window in windows for record in map(make[form], window.rows, window.numbers)]
        return memory_source(self.name, records, tuple(Path(name).name for name in self.files))


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
    parts = tuple(reader.part(corpus, seconds / len(data.train), most_blocks) for corpus in data.train)
    held = () if most_blocks < MOST_HELD else (*data.valid, *data.test)  # not for a quick look
    held_parts = tuple(reader.part(corpus, min(1.0, 0.5 * seconds / len(held)), MOST_HELD) for corpus in held)
    return Sample(form, settings, parts, held_parts, tuple(reader.faults))


@dataclass(slots=True)
class _File:
    """A file, and how far it has been read. `share`: of its bytes."""

    path: Path
    n_lines: int = 0
    share: float = 0.0
    ended: bool = False

    def blocks(self) -> Iterator[list[bytes]]:
        """Blocks of BLOCK lines; of each, the first that have together about MOST_BYTES."""
        with open_watched(self.path) as (file, position):
            n_bytes, lines = max(1, self.path.stat().st_size), iter(partial(file.readline, MAX_LINE), b"")
            while not self.ended:
                kept, n, size = list[bytes](), 0, 0
                while n < BLOCK and (some := list(islice(lines, _AT_ONCE))):
                    lengths = list(map(len, some))
                    if MAX_LINE in lengths:
                        number = self.n_lines + n + lengths.index(MAX_LINE) + 1
                        raise DataError(f"{self.path}, line {number}: {TOO_LONG}")
                    kept += some if size < MOST_BYTES else []
                    n, size = n + len(some), size + sum(lengths)
                self.n_lines, self.ended, self.share = self.n_lines + n, n < BLOCK, min(1.0, position() / n_bytes)
                yield kept

    def total(self) -> int:
        """Number of lines, estimated unless the whole file was read."""
        return self.n_lines if self.ended or not self.share else round(self.n_lines / self.share)

    def lines(self, first: int, n: int) -> list[bytes]:
        """`n` lines from line `first` (counted from 1)."""
        with open_bytes(self.path) as file:
            return list(islice(file, first - 1, first - 1 + n))

    def tail(self) -> list[bytes]:
        """The last BLOCK lines, or fewer if they are long."""
        with self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - MOST_BYTES))
            return io.BytesIO(file.read(MOST_BYTES)).readlines()[1:][-BLOCK:]


@dataclass(slots=True)
class _Reader:
    """Reads samples of corpora, and collects faults."""

    form: Form
    data: DataSettings
    faults: list[str] = field(default_factory=list)

    def part(self, corpus: Corpus, seconds: float, most: int) -> Part:
        langs, parse = (self.data.src_lang, self.data.tgt_lang), None
        if self.form == "labelled":
            parse = labelled_parser()
        elif self.form == "pairs" and corpus.path is not None:
            if (suffix := bare_suffix(corpus.path)) not in LINE_FORMATS:
                pairs = read_pairs(corpus, src_lang=langs[0], tgt_lang=langs[1])
                return self._units(corpus.path, pairs, seconds, most * BLOCK)
            parse = LINE_FORMATS[suffix](*langs)
        files = [_File(path) for path in corpus_files(corpus)]
        for file in files:
            check_is_text(file.path)
        sides = self._scan(files, time.monotonic() + 0.8 * seconds, most)
        block = partial(self._block, [file.path for file in files], parse)
        blocks = [block(lines, number * BLOCK + 1) for number, lines in sides.items()]
        first = blocks[0].numbers[:1] if blocks else ()  # after the header, if there is one
        counts, whole = tuple(file.total() for file in files), all(file.ended for file in files)
        is_plain = not any(file.path.suffix.lower() in COMPRESSIONS for file in files)
        if whole:
            is_complete = len(blocks) * BLOCK >= min(counts)
            how = "read completely" if is_complete else f"all lines counted, {len(blocks)} places examined"
        else:
            share = min(file.share for file in files if not file.ended)
            end = " and the end" if is_plain else ""
            how = f"{len(blocks)} places in the first {share:.0%}{end} examined; number of lines estimated"
        if not whole and is_plain and len(files) == 2:
            tails = [file.tail() for file in files]
            n = min(map(len, tails))
            end_block = block([lines[len(lines) - n :] for lines in tails], min(counts) - n + 1)
            blocks.append(replace(end_block, from_end=True))
        return Part(
            name=corpus_name(corpus),
            files=tuple(str(file.path) for file in files),
            counts=counts,
            total=max(0, min(counts) - sum(first) + len(first)),
            counted=whole,
            how=how,
            blocks=tuple(block for block in blocks if block.rows),
            reread=lambda line, n: block([file.lines(line, n) for file in files], line).rows,
        )

    def _scan(self, files: list[_File], until: float, most: int) -> dict[int, tuple[list[bytes], ...]]:
        """Blocks by number: about `most`, evenly spaced, and the last that was read."""
        kept, every = dict[int, tuple[list[bytes], ...]](), 1
        try:
            for number, sides in enumerate(zip_longest(*(file.blocks() for file in files), fillvalue=[])):
                if all(sides):
                    kept = {n: block for n, block in kept.items() if n % every == 0}
                    every *= 2 if len(kept) > most else 1
                    kept[number] = sides
                if time.monotonic() > until:
                    break
        except DataError as error:
            if not all(file.path.exists() for file in files):
                raise
            self.faults.append(str(error))
        return kept

    def _block(self, paths: list[Path], parse: LineParser | None, sides: Sequence[list[bytes]], first: int) -> Block:
        """The rows of lines with the same number, which begin with `first`."""
        rows, numbers = list[Row](), list[int]()
        for number, raw in enumerate(zip(*sides, strict=False), first):
            texts = list[str]()
            try:
                for line in raw:
                    texts.append(decode_line(line, first=number == 1))
                row = tuple(texts) if parse is None else parse(texts[0], number)
            except ValueError as error:
                path = paths[min(len(texts), len(paths) - 1)]  # of the line that cannot be decoded or parsed
                self.faults.append(f"{path}, line {number}: {error}")
                continue
            if row is not None:
                rows.append(row)
                numbers.append(number)
        return Block(tuple(rows), tuple(numbers))

    def _units(self, path: Path, pairs: Iterator[Pair], seconds: float, most: int) -> Part:
        """Translation units from the beginning of a TMX file. Their number is estimated by counting their tags."""
        found, whole, until = list[Pair](), False, time.monotonic() + seconds / 2
        try:
            for pair in islice(pairs, most):
                found.append(pair)
                if time.monotonic() > until:
                    break
            else:
                whole = len(found) < most
        except DataError as error:
            self.faults.append(str(error))
        total, until = len(found), time.monotonic() + seconds / 2
        if not whole:
            with open_bytes(path) as file:
                chunks = takewhile(lambda _: time.monotonic() <= until, iter(partial(file.read, 1 << 20), b""))
                total = max(total, sum(chunk.count(b"<tu>") + chunk.count(b"<tu ") for chunk in chunks))
        how = "read completely" if whole else f"{len(found):,} units from the beginning"
        block = Block(tuple((pair.src, pair.tgt) for pair in found), tuple(pair.place[1] for pair in found))
        return Part(path.name, (str(path),), (total,), total, whole, how, (block,) if found else ())
