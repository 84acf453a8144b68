"""A sample of the data that settings name: blocks of lines from several places of each corpus, and the held-out sets.

What is read is bounded in time and in memory, whatever the size of the corpus. Nothing is cleaned, and lines that
cannot be read are told, not raised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from transduce.config import Corpus, DataSettings, Settings
from transduce.data.corpus import FORMATS, corpus_files, corpus_name, json_sides, read_pairs
from transduce.data.demo import demo_pairs
from transduce.data.lines import bare_suffix, open_bytes
from transduce.diagnosis.scanning import BLOCK, MOST_BLOCKS, Scan, scan
from transduce.errors import DataError

Kind = Literal["pairs", "text", "labelled"]
Row = tuple[str, ...]  # (source, target), (line,), or (label, text[, text])

KINDS: dict[str, Kind] = {"causal": "text", "masked": "text", "classification": "labelled"}
"""What tasks read; pairs, where it is not said."""
WINDOW = 200  # lines that are looked at together
MOST_HELD = 20_000  # rows of a held-out set
_BOM = b"\xef\xbb\xbf"


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

    def windows(self) -> Iterator[Block]:
        """Itself in pieces of at most WINDOW rows."""
        for begin in range(0, len(self.rows), WINDOW):
            cut = slice(begin, begin + WINDOW)
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


@dataclass(frozen=True, slots=True)
class Sample:
    """What the checks look at."""

    kind: Kind
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
        return chain.from_iterable(block.rows for part in self.parts for block in part.blocks)

    def some(self, n: int) -> list[Row]:
        """About `n` rows at most: whole windows from everywhere, of each corpus as many as its size asks for."""
        chosen = list[Row]()
        for part in self.parts:
            windows = [window for block in part.blocks for window in block.windows()]
            wanted = max(1, round(n / WINDOW * part.total / max(1, self.total)))
            step = max(1.0, len(windows) / wanted)
            for i in range(min(len(windows), wanted)):
                chosen += windows[int(i * step)].rows
        return chosen


def take_sample(settings: Settings, *, seconds: float = 5.0, most_blocks: int = MOST_BLOCKS) -> Sample:
    """A sample of all text that the settings name, read in about `seconds`. A missing file is a `DataError`."""
    began, data = time.monotonic(), settings.data
    kind = KINDS.get(settings.task, "pairs")
    if data.demo:
        return Sample(kind, settings, (_demo(data.demo, settings.training.seed),), ())
    look = _Look(kind, data)
    each = seconds / max(1, len(data.train))
    parts = tuple(look.part(corpus, each, most_blocks) for corpus in data.train)
    most = -(-MOST_HELD // BLOCK)
    held = tuple(look.part(c, 1.0, most) for c in (*data.valid, *data.test)) if most_blocks >= most else ()
    return Sample(kind, settings, parts, held, tuple(look.faults), time.monotonic() - began)


class _Look:
    """Reads corpora of one kind, and collects their faults."""

    def __init__(self, kind: Kind, data: DataSettings) -> None:
        self.kind, self.data = kind, data
        self.faults: list[Fault] = []

    def part(self, corpus: Corpus, seconds: float, most_blocks: int) -> Part:
        files = corpus_files(corpus)
        if self.kind == "pairs" and corpus.path is not None:
            if bare_suffix(corpus.path) == ".tmx":
                return self._tmx(corpus, seconds, most_blocks * BLOCK)
            if bare_suffix(corpus.path) not in FORMATS:
                read_pairs(corpus, src_lang="src", tgt_lang="tgt")  # raises what is to be said of it
        scans = [scan(path, seconds=seconds / len(files)) for path in files]
        self.faults += [Fault(str(found.path), found.fault) for found in scans if found.fault]
        counts, whole = tuple(found.total for found in scans), all(found.whole for found in scans)
        numbers = _numbers(scans, most_blocks)
        columns = self._columns(scans[0])
        blocks = [self._block(scans, [found.block(n) for found in scans], n * BLOCK + 1, columns) for n in numbers]
        seekable = all(found.seekable for found in scans)
        if seekable and not whole and len(scans) == 2:
            tails = [found.tail(BLOCK) for found in scans]
            n = min(map(len, tails))
            end = self._block(scans, [lines[len(lines) - n :] for lines in tails], min(counts) - n + 1, columns)
            blocks.append(Block(end.first, end.rows, end.numbers, from_end=True))

        def reread(first: int, n: int) -> list[Row]:
            return list(self._block(scans, [found.read(first - 1, n) for found in scans], first, columns).rows)

        return Part(
            name=corpus_name(corpus),
            files=tuple(str(path) for path in files),
            counts=counts,
            total=min(counts),
            counted=whole,
            how=_how(scans, len(numbers)),
            blocks=tuple(block for block in blocks if block.rows),
            n_bytes=sum(round(found.n_bytes / (found.share or 1)) for found in scans),
            reread=reread if seekable else None,
        )

    def _block(self, scans: Sequence[Scan], sides: list[list[bytes]], first: int, columns: tuple[int, int]) -> Block:
        """The rows of lines that stand beside each other."""
        rows, numbers = list[Row](), list[int]()
        for number, raw in enumerate(zip(*sides, strict=False), first):
            try:
                texts = [_decoded(line, number) for line in raw]
                row = self._row(texts, columns, number)
            except ValueError as error:
                if len(self.faults) < 20:
                    at = next((i for i, line in enumerate(raw) if not _is_text(line)), 0)
                    self.faults.append(Fault(f"{scans[at].path}, line {number}", str(error)))
                continue
            if row is not None:
                rows.append(row)
                numbers.append(number)
        return Block(first, tuple(rows), tuple(numbers))

    def _row(self, texts: list[str], columns: tuple[int, int], number: int) -> Row | None:
        """A row of the kind that is read; `ValueError` says what is wrong with it."""
        if self.kind == "text" or len(texts) == 2:
            return tuple(texts)
        line = texts[0]
        if self.kind == "labelled":
            fields = line.split("\t")
            if len(fields) not in (2, 3) or not all(field.strip() for field in fields):
                raise ValueError("expected label<TAB>text or label<TAB>text<TAB>text")
            return tuple(fields)
        if not line.strip():
            return "", ""
        if columns == (-1, -1):
            sides = json_sides(_json(line), self.data.src_lang, self.data.tgt_lang)
            if sides is None:
                raise ValueError('expected {"src": "...", "tgt": "..."}')
            return " ".join(sides[0].split("\n")), " ".join(sides[1].split("\n"))
        fields = line.split("\t")
        if number == 1 and self._is_header(fields):
            return None
        if len(fields) <= max(columns):
            raise ValueError(f"{len(fields)} columns; expected source<TAB>target")
        return fields[columns[0]], fields[columns[1]]

    def _is_header(self, fields: Sequence[str]) -> bool:
        names = [field.strip().lower() for field in fields]
        return self.data.src_lang.lower() in names and self.data.tgt_lang.lower() in names

    def _columns(self, found: Scan) -> tuple[int, int]:
        """Where both sides stand in a file of pairs; (-1, -1): in JSON."""
        if self.kind != "pairs" or bare_suffix(found.path) == ".jsonl":
            return -1, -1
        first = next(iter(found.block(0, n=1)), b"").decode("utf-8", errors="replace").split("\t")
        if not self._is_header(first):
            return 0, 1
        names = [field.strip().lower() for field in first]
        return names.index(self.data.src_lang.lower()), names.index(self.data.tgt_lang.lower())

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
            self.faults.append(Fault(str(corpus.path), str(error)))
        total = len(rows) if ended else max(n_units, len(rows))
        how = "read whole" if ended else f"{len(rows):,} units from the beginning"
        block = Block(1, tuple(rows), tuple(numbers))
        blocks = (block,) if rows else ()
        return Part(
            corpus_name(corpus), (str(corpus.path),), (total,), total, whole and ended, how, blocks, n_bytes=n_bytes
        )


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


def _decoded(line: bytes, number: int) -> str:
    if number == 1:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("this is UTF-16, not UTF-8; convert it, for instance with iconv -f UTF-16 -t UTF-8")
        line = line.removeprefix(_BOM)
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 (byte 0x{line[error.start]:02x} at byte {error.start + 1})") from None


def _is_text(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _json(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {getattr(error, 'msg', None) or error}") from None


def write_rows(rows: Sequence[Row], kind: Kind, folder: Path, name: str) -> Corpus:
    """Rows as files that training reads; a corpus of them."""
    sides = list(zip(*rows, strict=True)) if kind == "pairs" else [["\t".join(row) for row in rows]]
    paths = [folder / f"{name}.{side}" for side in (("src", "tgt") if kind == "pairs" else ("txt",))]
    for path, lines in zip(paths, sides or [[], []], strict=False):
        text = "".join(line.replace("\n", " ") + "\n" for line in lines)
        path.write_text(text, encoding="utf-8", newline="\n")
    return Corpus(src=paths[0], tgt=paths[1]) if kind == "pairs" else Corpus(path=paths[0])
