"""Sentence pairs, and their file formats: two text files, TSV, JSON lines, parquet and translation memories.

Translation memories (TMX 1.1 to 1.4) are read unit by unit. The DTD that most files name is not loaded, and entities
that a file declares are undefined in its units.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from html.entities import html5
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast
from xml.etree import ElementTree
from xml.parsers import expat

from transduce.config.settings import Corpus, DataSettings
from transduce.data.lines import (
    COMPRESSIONS,
    Unreadable,
    aligned,
    bare_suffix,
    format_path,
    n_bytes,
    one_line,
    open_bytes,
    read_records,
    too_long,
)
from transduce.errors import DataError, SettingsError, needing
from transduce.text.languages import LETTER, base_language, is_language, match_language, normalize_code
from transduce.text.special import characters

_CHUNK, _TAG = 1 << 16, 8  # bytes read at once; at least the longest beginning of a tag that `_PART` matches
_PAIRED, _ALONE = frozenset({"bpt", "ept"}), frozenset({"it", "ph", "ut"})
"""TMX elements that contain markup of the original document, not text: in pairs around text, and standing alone."""
_MOST_SEGMENTS = 64  # limit for the length of a unit, as a multiple of the limit for a segment
_UNITS_SEEN = 1000  # number of units to infer the languages from

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w.-]+)""")
_END = b"</body"
_PART = re.compile(rb"(?=<tu[\s/>]|%b)" % _END)
_GAP = re.compile(r"(?<![ \t\n])[ \t\n]*\0[ \t\n\0]*")  # the lookbehind makes the search linear
_LETTER = re.compile(LETTER)

Unit = tuple[int, dict[str, str] | Unreadable]
"""The line of a TMX unit, and its segments by language code as written (`en-US`), or the reason why it is left out."""


class Memory:
    """A TMX file. `srclang`: the source language in its header; empty until `units` has read the header."""

    def __init__(self, path: Path, max_record: int) -> None:
        """`max_record`: limit for the bytes of a segment."""
        self.path, self.srclang, self._max_record = path, "", max_record

    def units(self) -> Iterator[Unit]:
        """Yield all units. Each is parsed alone, so that a malformed unit does not affect other units.

        Raises `DataError` if the file is malformed before its first unit.
        """
        most = _MOST_SEGMENTS * self._max_record
        with open_bytes(self.path) as (file, _), closing(_parts(cast(io.BufferedReader, file), most)) as parts:
            try:
                head = next(parts, b"")
                self._read_header(head)
                line, part = 1 + head.count(b"\n"), b""
                for part in parts:
                    if part.startswith(b"<tu"):
                        yield self._unit(part, line)
                    line += part.count(b"\n")
                if not part.startswith(_END) and _END not in head:
                    yield line, Unreadable("not valid TMX", ": no element found")
            except (LookupError, ValueError) as error:  # unknown encoding, or text that is invalid in its encoding
                raise DataError(f"{format_path(self.path)}, line 1: not valid TMX: {error}") from None

    def _read_header(self, head: bytes) -> None:
        elements = dict[str, dict[str, str]]()
        parser = _parser()
        parser.StartElementHandler = elements.setdefault
        try:
            parser.Parse(head, not head)
        except expat.ExpatError as error:
            problem = f"not valid TMX: {expat.ErrorString(error.code)}"
            raise DataError(f"{format_path(self.path)}, line {error.lineno}: {problem}") from None
        if (root := next(iter(elements), "tmx")) != "tmx":
            raise DataError(f"{self.path}: the root element is <{root}>, not <tmx>")
        self.srclang = elements.get("header", {}).get("srclang", "")

    def _unit(self, part: bytes, line: int) -> Unit:
        """Parse the unit `part`, which begins on this line of the file."""
        if len(part) > _MOST_SEGMENTS * self._max_record:
            return line, too_long(self._max_record)
        parser, builder = _parser(), ElementTree.TreeBuilder()
        parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
        parser.CharacterDataHandler = builder.data

        def skip_entity(name: str, is_parameter: bool) -> None:
            """Replace an undefined entity, such as `&nbsp;`, by its character in HTML."""
            if f"{name};" not in html5:
                raise ValueError(f"undefined entity &{name};")
            builder.data(html5[f"{name};"])

        parser.SkippedEntityHandler = skip_entity
        try:
            parser.Parse(part, True)
            variants = [(tuv, _text(seg)) for tuv in builder.close().iter("tuv") for seg in tuv.iter("seg")]
        except expat.ExpatError as error:
            fault = Unreadable("not valid TMX", f": {expat.ErrorString(error.code)}")
            return line + error.lineno - 1, fault
        except (ValueError, RecursionError) as error:
            return line + parser.CurrentLineNumber - 1, Unreadable("not valid TMX", f": {error}")
        segments = dict[str, str]()
        for tuv, text in variants:
            if n_bytes(text) >= self._max_record:
                return line, too_long(self._max_record)
            language = tuv.get("xml:lang") or tuv.get("lang") or ""
            if not segments.get(language, "").strip():
                segments[language] = one_line(_GAP.sub(_filled, text) if "\0" in text else text)
        return line, segments or Unreadable("<tu> without <seg>", has_text=False)


def _parser() -> expat.XMLParserType:
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    parser.UseForeignDTD()  # pretend that there is a DTD, so that undeclared entities reach `SkippedEntityHandler`
    return parser


def _text(element: ElementTree.Element) -> str:
    """The text of a segment, without markup. A NUL, which XML excludes, marks a removed stand-alone element."""
    parts = [element.text or ""]
    for inner in element:
        text = "" if inner.tag in _PAIRED else "\0" if inner.tag in _ALONE else _text(inner) or "\0"
        parts += [text, inner.tail or ""]
    return "".join(parts)


def _parts(file: io.BufferedReader, most: int) -> Generator[bytes, None, None]:
    """Yield the file in UTF-8, cut before each unit and before the end of the body.

    A unit of more than `most` bytes is shortened, but stays above this limit and keeps its line ends.
    """
    begun, size, rest = list[bytes](), 0, b""  # `begun`: the start of a long unit, which is not searched again
    for chunk in _utf8(file):
        *parts, rest = _PART.split(rest + chunk)
        for part in parts:
            if whole := b"".join([*begun, part]):
                yield whole
            begun, size = [], 0
        if len(rest) > _CHUNK:
            more, rest = rest[:-_TAG], rest[-_TAG:]
            begun.append(more if size <= most else b"\n" * more.count(b"\n"))
            size += len(more)
    if begun or rest:
        yield b"".join([*begun, rest])


def _utf8(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the file in UTF-8. Bytes that are invalid in its encoding become bytes that are invalid in UTF-8."""
    start = file.peek(_CHUNK)
    declared = _DECLARED.match(start)
    encoding = declared[1].decode() if declared else "utf-8"
    if b"\0" in start[:4]:
        encoding = "utf-16-be" if start[0] == 0 else "utf-16"
    elif encoding.lower().startswith(("utf-8", "utf8", "utf-16")):  # a UTF-8 file may claim to be UTF-16
        while chunk := file.read(_CHUNK):
            yield chunk
        return
    text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="")
    try:
        while characters := text.read(_CHUNK):
            yield characters.encode("utf-8", "surrogatepass")
    finally:
        text.detach()


def _filled(gap: re.Match[str]) -> str:
    """Replace removed inline elements by a space if words or spaces need it; by nothing at the edge of a segment."""
    before, after = gap.string[max(0, gap.start() - 1) : gap.start()], gap.string[gap.end() : gap.end() + 1]
    if not before or not after or before.isspace() or after.isspace():
        return ""
    has_space = gap[0].strip("\0") or (_LETTER.match(before) and _LETTER.match(after))
    return " " if has_space else ""


@cache
def sides_of(codes: frozenset[str], src_lang: str, tgt_lang: str, srclang: str) -> tuple[str | None, str | None]:
    """Choose the codes of the source and the target among a TMX file's `codes`; None if missing. They always differ.

    Of equally good codes, such as en-GB and en-US for en, the header's `srclang` wins, or else the first by alphabet.
    """
    ordered = sorted(codes, key=lambda code: (normalize_code(code) != normalize_code(srclang), code))
    src = match_language(src_lang, [code for code in ordered if normalize_code(code) != normalize_code(tgt_lang)])
    return src, match_language(tgt_lang, [code for code in ordered if code != src])


def infer_languages(path: Path, settings: DataSettings) -> tuple[str, str]:
    """Return the two languages of a TMX file: source, target.

    A code in the settings, the header's `srclang` or the first unit decides their order. Raises `DataError` if there
    are not two languages.
    """
    memory = Memory(path, settings.max_record)
    units = (segments for _, segments in islice(memory.units(), _UNITS_SEEN) if not isinstance(segments, Unreadable))
    codes = list(dict.fromkeys(code for segments in units for code in segments if code))
    if len(codes) > 2:  # variants of a language count once
        codes = list(dict.fromkeys(map(base_language, codes)))
    if len(codes) != 2:
        languages = ", ".join(sorted(codes)) or "no language"
        raise DataError(
            f"data.src_lang and data.tgt_lang: {format_path(path)} has segments in {languages}; name two",
            *("data.src_lang", "data.tgt_lang"),
        )
    if settings.tgt_lang != "tgt":
        return codes[codes[0] == match_language(settings.tgt_lang, codes)], settings.tgt_lang
    if settings.src_lang != "src":
        return settings.src_lang, codes[codes[0] == match_language(settings.src_lang, codes)]
    src = match_language(memory.srclang, codes) or codes[0]
    return src, codes[codes[0] == src]


class Pair(NamedTuple):
    """A source sentence, its translation, and the file and line that they come from.

    links: Word links in Pharaoh format (`data.word_links`), if the run has an alignment. fault: The reason why the pair
    cannot be read. Its sides are then empty, and cleaning counts it.
    """

    src: str
    tgt: str
    file: str
    line: int
    links: str = ""
    fault: Unreadable | None = None

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


_CODE = re.compile(r"[a-z]{2,3}(?:[-_][a-z0-9]{2,8})*")
"""A language code in lower case."""
PairReader = Callable[[Path, DataSettings], Iterator[Pair]]
"""A function that reads a file of pairs, including unreadable pairs. The settings give the language codes of both sides
and the size limit of a record."""


def read_pairs(corpus: Corpus, settings: DataSettings, *, held_out: bool = False) -> Iterator[Pair]:
    """Yield the pairs of a corpus in order, including pairs with an empty side.

    The corpus's language codes select the sides of TSV, JSONL and TMX files. A pair that cannot be read has a `fault`
    if `settings.on_error` is skip or if it is too large. Otherwise, or if the corpus is `held_out`, it raises
    `DataError` with file and line. A file of an unknown format raises `SettingsError` before the first pair is read.
    """
    src_lang, tgt_lang = settings.direction_of(corpus)
    settings, suffix = settings.model_copy(update={"src_lang": src_lang, "tgt_lang": tgt_lang}), ""
    if corpus.path is None:
        assert corpus.src is not None and corpus.tgt is not None, "Corpus checks that it names either both or path"
        pairs = read_two_files(corpus.src, corpus.tgt, settings)
    else:
        suffix = bare_suffix(corpus.path)
        if suffix not in PAIR_FORMATS:
            known, packed = ", ".join(PAIR_FORMATS), ", ".join(COMPRESSIONS)
            raise SettingsError(
                f"{format_path(corpus.path)}: unknown format; known: {known} (also {packed}), or two files src and tgt"
            )
        pairs = PAIR_FORMATS[suffix](corpus.path, settings)
    unit = "row" if suffix == ".parquet" else "line"
    stops, advice = settings.on_error == "stop", "; data.on_error = 'skip' leaves out records that cannot be read"

    def checked() -> Iterator[Pair]:
        for pair in pairs:
            if (fault := pair.fault) is not None:
                if fault.has_text if held_out else stops and fault.stops:
                    raise DataError(
                        f"{pair.file}, {unit} {pair.line}: {fault}{'' if held_out else advice}", *fault.names
                    )
                if held_out:
                    continue
            yield pair

    return checked()


def corpus_files(corpus: Corpus) -> list[Path]:
    return [path for path in (corpus.src, corpus.tgt, corpus.path) if path is not None]


def read_two_files(src: Path, tgt: Path, settings: DataSettings) -> Iterator[Pair]:
    """Yield the pairs of two parallel files. The `file` of an unreadable pair is the file that has the fault."""
    names, limit = (format_path(src), format_path(tgt)), settings.max_record
    for line, source, target in aligned(read_records(src, limit), read_records(tgt, limit), names):
        if isinstance(source, Unreadable):
            yield _unreadable(names[0], line, source)
        elif isinstance(target, Unreadable):
            yield _unreadable(names[1], line, target)
        else:
            yield Pair(source, target, names[0], line)


def _unreadable(file: str, line: int, fault: Unreadable) -> Pair:
    return Pair("", "", file, line, fault=fault)


def read_tsv(path: Path, settings: DataSettings) -> Iterator[Pair]:
    """Yield two columns of each line: by a header of language codes or of src and tgt, or else the first two columns.

    Quotation marks have no special meaning. A blank line is a pair with two empty sides.
    """
    headers = (settings.src_lang, settings.tgt_lang), ("src", "tgt")
    file = format_path(path)
    n, first, src, tgt = 0, 0, 0, 1
    for number, line in enumerate(read_records(path, settings.max_record), 1):
        if isinstance(line, Unreadable):
            yield _unreadable(file, number, line)
            continue
        if not line.strip():
            yield Pair("", "", file, number)
            continue
        fields = line.split("\t")
        if len(fields) < 2:
            yield _unreadable(file, number, Unreadable("no tab", "; expected source<TAB>target"))
            continue
        if not n:
            n, first, names = len(fields), number, [field.strip().lower() for field in fields]
            columns = ((_column(a, names), _column(b, names)) for a, b in headers)
            if header := next(((a, b) for a, b in columns if a is not None and b is not None), None):
                src, tgt = header
                continue
            _refuse_header(file, number, names, settings)
            start, _, rest = line.partition("\r")
            if "\t" in start and "\t" in rest:  # lines end in carriage returns only, as on old Macs
                n = 0
                yield _unreadable(file, number, Unreadable("lines end in \\r", "; convert their ends to \\n"))
                continue
        if len(fields) == n:
            yield Pair(fields[src], fields[tgt], file, number)
        else:
            details = f": line {first} has {n} columns, this line has {len(fields)}"
            yield _unreadable(file, number, Unreadable("another number of columns", details))


def _refuse_header(file: str, line: int, names: Sequence[str], settings: DataSettings) -> None:
    """Raise `DataError` for a header of language codes if the settings do not name the source and the target."""
    codes = [name for name in names if _CODE.fullmatch(name) and is_language(name)]
    if len({*codes}) > 1 and (settings.src_lang == "src" or settings.tgt_lang == "tgt"):
        keys = "data.src_lang", "data.tgt_lang"
        raise DataError(f"{file}, line {line}: columns {', '.join(codes[:8])}; choose with {' and '.join(keys)}", *keys)


def _column(language: str, names: Sequence[str]) -> int | None:
    """The index of a language's column in a header, which may name a variant of it, such as en-us; None if missing."""
    is_named = language.lower() in names
    name = language.lower() if is_named else match_language(language, filter(_CODE.fullmatch, names))
    return None if name is None else names.index(name)


def read_json_lines(path: Path, settings: DataSettings) -> Iterator[Pair]:
    """Yield the pair in each line of a JSON lines file; see `pair_of`. A blank line is a pair with two empty sides."""
    file = format_path(path)
    for number, line in enumerate(read_records(path, settings.max_record), 1):
        if isinstance(line, Unreadable):
            yield _unreadable(file, number, line)
        elif not line.strip():
            yield Pair("", "", file, number)
        else:
            try:
                value = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                fault = Unreadable("not valid JSON", f": {getattr(error, 'msg', error)}")
                yield _unreadable(file, number, fault)
            else:
                yield pair_of(value, file, number, settings)


def pair_of(value: Any, file: str, line: int, settings: DataSettings) -> Pair:
    """Make a pair of a JSON object with the keys `src` and `tgt` or the language codes, possibly in `translation`."""
    # Unset languages are src and tgt.
    keys = dict.fromkeys([("src", "tgt"), (settings.src_lang, settings.tgt_lang)])
    if isinstance(value, dict) and isinstance(value.get("translation"), dict):
        value = value["translation"]
    for src_key, tgt_key in keys if isinstance(value, dict) else ():
        src, tgt = value.get(src_key), value.get(tgt_key)
        if isinstance(src, str) and isinstance(tgt, str):
            if characters(src + tgt) != src + tgt:
                return _unreadable(file, line, Unreadable("half of a surrogate pair is not a character"))
            return Pair(one_line(src), one_line(tgt), file, line)
    expected = " or ".join(f'{{"{src}": "...", "{tgt}": "..."}}' for src, tgt in keys)
    given = type(value).__name__
    if isinstance(value, dict):
        given = str({key: type(item).__name__ for key, item in value.items()})[:200]
    details = f"expected {expected} (data.src_lang and data.tgt_lang name other keys), found {given}"
    names = "data.src_lang", "data.tgt_lang"
    return _unreadable(file, line, Unreadable("no source and target", f": {details}", names=names))


_ROWS, _BYTES = 1000, 1 << 25  # largest number of rows, and approximate number of bytes, in memory at once


def read_parquet(path: Path, settings: DataSettings) -> Iterator[Pair]:
    """Yield the pair in each row of a parquet file. Its columns have the names of JSON's keys; see `pair_of`."""
    wanted = ("src", "tgt", settings.src_lang, settings.tgt_lang, "translation")
    file, limit = format_path(path), settings.max_record
    for number, row in enumerate(_parquet_rows(path, wanted), 1):
        pair = pair_of(row, file, number, settings)
        is_too_long = max(n_bytes(pair.src), n_bytes(pair.tgt)) >= limit
        yield _unreadable(file, number, too_long(limit)) if is_too_long else pair


def _parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[Any]:
    """Yield the `wanted` columns of each row, or all columns if the file has none of them."""
    with needing("formats", f"{format_path(path)}: this format needs pyarrow"):
        import pyarrow
        import pyarrow.parquet
    with open_bytes(path, in_order=False) as (file, _):
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = [name for name in parquet.schema_arrow.names if name in wanted] or None
            for number in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(number)
                rows = _BYTES * max(1, group.num_rows) // max(1, group.total_byte_size)
                for batch in parquet.iter_batches(max(1, min(_ROWS, rows)), row_groups=[number], columns=columns):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:
            if "range requests" in str(error) or "Cannot seek streaming" in str(error):  # fsspec's
                reason = "its server sends no parts of files, which this format needs; download the file first"
                raise DataError(f"{format_path(path)}: {reason}") from None
            raise DataError(f"{format_path(path)}: not a valid parquet file: {error}") from None


def read_tmx(path: Path, settings: DataSettings) -> Iterator[Pair]:
    """Yield the pair in each unit of a TMX file. A missing side is empty, so that cleaning counts it.

    Units in neither language are left out. Raises `DataError` if no unit has both languages.
    """
    file, known, n_pairs = format_path(path), set[str](), 0
    memory = Memory(path, settings.max_record)

    def sides(codes: Iterable[str]) -> tuple[str | None, str | None]:
        return sides_of(frozenset(codes), settings.src_lang, settings.tgt_lang, memory.srclang)

    for line, segments in memory.units():
        if isinstance(segments, Unreadable):
            yield _unreadable(file, line, segments)
            continue
        known |= segments.keys()
        codes = sides(code for code, text in segments.items() if text.strip())
        src, tgt = ("" if code is None else segments[code] for code in codes)
        n_pairs += bool(src and tgt)
        if src or tgt or any(sides(segments)):
            yield Pair(src, tgt, file, line)
    if known and not n_pairs:
        missing = f"no unit has both '{settings.src_lang}' and '{settings.tgt_lang}'"
        raise DataError(f"{file}: {missing}; languages in the file: {', '.join(sorted(known))}")


PAIR_FORMATS: dict[str, PairReader] = {
    ".tsv": read_tsv,
    ".jsonl": read_json_lines,
    ".tmx": read_tmx,
    ".parquet": read_parquet,
}
"""The reader of each format, by the file's suffix."""
