"""A sample of the data that settings name: blocks of lines from several places of each corpus, and the held-out sets.

What is read is bounded in time and in memory, whatever the size of the corpus. Nothing is cleaned, and lines that
cannot be read are told, not raised.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from transduce.config import Corpus, DataSettings, Settings
from transduce.data.corpus import FORMATS, columns_of, corpus_files, corpus_name, json_pair, read_pairs, tsv_pair
from transduce.data.labelled import labelled_row
from transduce.data.lines import bare_suffix, decode_line, open_bytes
from transduce.demo.corpus import demo_pairs
from transduce.doctor.scanning import BLOCK, MOST_BLOCKS, Scan, rank, scan
from transduce.errors import DataError
from transduce.tasks.base import Form
from transduce.tasks.registry import find_task

Row = tuple[str, ...]  # (source, target), (line,), or (label, text[, text])
Parser = Callable[[list[str], int], Row | None]
"""The row of the lines of each file with this number, none of a header; a `ValueError` says what is wrong with them."""

WINDOW = 200  # lines that are looked at together
MOST_CHARACTERS = 2_000_000  # of rows that are worked with, however long they are
MOST_HELD = 20_000  # rows of a held-out set


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that cannot be read: training would refuse the file."""

    place: str
    why: str


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow one another; `first` is the number of the first one's line, from 1."""

    first: int
    rows: tuple[Row, ...]
    numbers: tuple[int, ...]  # of each row's line
    from_end: bool = False
    """Whether it was counted from the end of both files: its number is a guess."""

    def windows(self, n: int = WINDOW) -> Iterator[Block]:
        """Itself in pieces of at most `n` rows."""
        for begin in range(0, len(self.rows), n):
            cut = slice(begin, begin + n)
            yield Block(self.numbers[begin], self.rows[cut], self.numbers[cut], self.from_end)


@dataclass(frozen=True, slots=True)
class Part:
    """What was seen of one corpus. `counts`: lines of each file; `total`: rows in all; `counted`: it is no estimate."""

    name: str
    files: tuple[str, ...]
    counts: tuple[int, ...]
    total: int
    counted: bool
    how: str
    blocks: tuple[Block, ...]
    n_bytes: int = 0
    reread: Callable[[int, int], list[Row]] | None = None
    """Rows from a line (from 1) on, where files can be read anywhere."""

    @property
    def n_rows(self) -> int:
        """Rows in the sample."""
        return sum(len(block.rows) for block in self.blocks)

    def rows(self) -> Iterator[Row]:
        """All rows of the sample."""
        return chain.from_iterable(block.rows for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the checks look at."""

    form: Form
    settings: Settings
    parts: tuple[Part, ...]
    held: tuple[Part, ...]
    faults: tuple[Fault, ...] = ()
    seconds: float = 0.0
    looked_at: int = 0
    """Rows that were there, where the text itself is not kept."""

    @property
    def total(self) -> int:
        """Training rows in all."""
        return sum(part.total for part in self.parts)

    @property
    def n_rows(self) -> int:
        """Training rows in the sample."""
        return self.looked_at or sum(part.n_rows for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether the sample is all there is."""
        return all(part.counted and part.n_rows >= part.total for part in self.parts)

    def rows(self) -> Iterator[Row]:
        """All training rows."""
        return chain.from_iterable(part.rows() for part in self.parts)

    def some(self, n: int) -> list[Row]:
        """About `n` rows at most: whole windows from everywhere, of each corpus as many as its size asks for."""
        return [row for windows in drawn(self.parts, n) for window in windows for row in window.rows]


def drawn(parts: Sequence[Part], n: int) -> list[list[Block]]:
    """Of each part windows from everywhere, about `n` rows of all together: as many as its size asks for."""
    rows = [row for part in parts for row in part.rows()]
    n_characters = sum(len(text) for row in rows for text in row) / max(1, len(rows))
    n = min(n, round(MOST_CHARACTERS / max(1.0, n_characters)))
    total, most = max(1, sum(part.total for part in parts)), max(20, n // max(1, len(parts)))
    chosen = list[list[Block]]()
    for part in parts:
        windows = [window for block in part.blocks for window in block.windows(min(WINDOW, most))]
        wanted = max(1, round(n / min(WINDOW, most) * part.total / total))
        step = max(1.0, len(windows) / wanted)
        chosen.append([windows[int(i * step)] for i in range(min(len(windows), wanted))])
    return chosen


def take_sample(settings: Settings, *, seconds: float = 5.0, most_blocks: int = MOST_BLOCKS) -> Sample:
    """A sample of all text that the settings name, read in about `seconds`. A missing file is a `DataError`."""
    began, data = time.monotonic(), settings.data
    form = find_task(settings.task).reads
    if data.demo:
        return Sample(form, settings, (_demo(data.demo, settings.training.seed),), ())
    look = _Look(form, data)
    each = seconds / max(1, len(data.train))
    parts = tuple(look.part(corpus, each, most_blocks) for corpus in data.train)
    most, corpora = -(-MOST_HELD // BLOCK), (*data.valid, *data.test)
    each = min(1.0, 0.5 * seconds / max(1, len(corpora)))
    held = tuple(look.part(corpus, each, most) for corpus in corpora) if most_blocks >= most else ()
    return Sample(form, settings, parts, held, tuple(look.faults), time.monotonic() - began)


class _Look:
    """Reads corpora of one form, and collects their faults."""

    def __init__(self, form: Form, data: DataSettings) -> None:
        self.form, self.data = form, data
        self.faults: list[Fault] = []

    def part(self, corpus: Corpus, seconds: float, most_blocks: int) -> Part:
        files = corpus_files(corpus)
        if self.form == "pairs" and corpus.path is not None:
            if bare_suffix(corpus.path) == ".tmx":
                return self._tmx(corpus, seconds, most_blocks * BLOCK)
            if bare_suffix(corpus.path) not in FORMATS:
                read_pairs(corpus, src_lang="src", tgt_lang="tgt")  # raises what is to be said of it
        until = time.monotonic() + seconds
        scans = [scan(path, seconds=0.6 * seconds / len(files)) for path in files]
        self.faults += [_fault(found.path, found.fault) for found in scans if found.fault]
        counts, whole = tuple(found.total for found in scans), all(found.whole for found in scans)
        numbers = _numbers(scans, most_blocks)
        parse, headers = self._parser(scans[0], len(scans))
        blocks = list[Block]()
        for n in sorted(numbers, key=rank):  # the first one first, the others as if drawn: time may not suffice for all
            blocks.append(self._block(scans, [found.block(n) for found in scans], n * BLOCK + 1, parse))
            if time.monotonic() > until:
                break
        blocks.sort(key=lambda block: block.first)
        n_looked_at = len(blocks)
        seekable = all(found.seekable for found in scans)
        if seekable and not whole and len(scans) == 2:
            tails = [found.tail(BLOCK) for found in scans]
            n = min(map(len, tails))
            end = self._block(scans, [lines[len(lines) - n :] for lines in tails], min(counts) - n + 1, parse)
            blocks.append(Block(end.first, end.rows, end.numbers, from_end=True))

        def reread(first: int, n: int) -> list[Row]:
            return list(self._block(scans, [found.read(first - 1, n) for found in scans], first, parse).rows)

        return Part(
            name=corpus_name(corpus),
            files=tuple(str(path) for path in files),
            counts=counts,
            total=max(0, min(counts) - headers),
            counted=whole,
            how=_how(scans, n_looked_at),
            blocks=tuple(block for block in blocks if block.rows),
            n_bytes=sum(round(found.n_bytes / (found.share or 1)) for found in scans),
            reread=reread if seekable else None,
        )

    def _block(self, scans: Sequence[Scan], sides: list[list[bytes]], first: int, parse: Parser) -> Block:
        """The rows of lines that stand beside each other."""
        rows, numbers = list[Row](), list[int]()
        for number, raw in enumerate(zip(*sides, strict=False), first):
            texts, file = list[str](), scans[0].path
            try:
                for found, line in zip(scans, raw, strict=True):
                    file = found.path
                    texts.append(decode_line(line + b"\n", first=number == 1))
                row = parse(texts, number)
            except ValueError as error:
                if len(self.faults) < 20:
                    self.faults.append(Fault(f"{file}, line {number}", str(error)))
                continue
            if row is not None:
                rows.append(row)
                numbers.append(number)
        return Block(first, tuple(rows), tuple(numbers))

    def _parser(self, first: Scan, n_files: int) -> tuple[Parser, int]:
        """What makes rows of the lines of a corpus, as training does; and the number of lines that make none."""
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
        """Translation units from the beginning; how many there are is counted by their tags."""
        assert corpus.path is not None
        until, n_units, n_bytes, whole = time.monotonic() + seconds / 2, 0, 0, True
        with open_bytes(corpus.path) as file:
            rest = b""
            while chunk := file.read(1 << 20):
                n_bytes += len(chunk)
                rest = rest[-4:] + chunk
                n_units += rest.count(b"<tu>") + rest.count(b"<tu ")
                if time.monotonic() > until:
                    whole = False
                    break
        rows, numbers, ended = list[Row](), list[int](), False
        until = time.monotonic() + seconds / 2
        pairs = read_pairs(corpus, src_lang=self.data.src_lang, tgt_lang=self.data.tgt_lang)
        try:
            for pair in islice(pairs, most):
                rows.append((pair.src, pair.tgt))
                numbers.append(pair.place[1])
                if time.monotonic() > until:
                    break
            else:
                ended = len(rows) < most
        except DataError as error:
            self.faults.append(_fault(corpus.path, str(error)))
        total = len(rows) if ended else max(n_units, len(rows))
        how = "read whole" if ended else f"{len(rows):,} units from the beginning"
        block = Block(1, tuple(rows), tuple(numbers))
        blocks = (block,) if rows else ()
        return Part(
            corpus_name(corpus), (str(corpus.path),), (total,), total, whole and ended, how, blocks, n_bytes=n_bytes
        )


def _fault(path: Path, told: str) -> Fault:
    """What an error says of a file, which it names first, maybe with a line."""
    behind, _, why = told.removeprefix(str(path)).partition(": ")
    return Fault(f"{path}{behind}", why) if told.startswith(str(path)) else Fault(str(path), told)


def _numbers(scans: Sequence[Scan], most: int) -> list[int]:
    """The blocks that all files have, evenly over them, the first and the last among them."""
    n = -(-min(found.n_lines for found in scans) // BLOCK)
    packed = [found for found in scans if not found.seekable]
    known = sorted(packed[0].kept) if packed else range(n)
    have = [number for number in known if number < n and all(found.has(number) for found in scans)]
    if len(have) <= most:
        return have
    return sorted({have[round(i * (len(have) - 1) / max(1, most - 1))] for i in range(most)})


def _how(scans: Sequence[Scan], n_blocks: int) -> str:
    """How the sample was drawn."""
    if all(found.whole for found in scans):
        n = -(-min(found.n_lines for found in scans) // BLOCK)
        return "read whole" if n_blocks >= n else f"lines counted, {n_blocks} places looked at"
    share = min(found.share for found in scans if not found.whole)
    if all(found.seekable for found in scans):
        return f"{n_blocks} places in the first {share:.0%}, and the end; lines estimated"
    return f"{n_blocks} places in the first {share:.0%}, as compressed text is read from its beginning; lines estimated"


def _demo(n: int, seed: int) -> Part:
    rows = tuple((pair.src, pair.tgt) for pair in demo_pairs("train", min(n, 10 * BLOCK), seed=seed))
    block = Block(1, rows, tuple(range(1, len(rows) + 1)))
    return Part("built-in corpus", (), (n,), n, True, "made as it is needed", (block,))
