"""Read translation memories (TMX 1.1 to 1.4) unit by unit.

The DTD that most files name is not loaded, and entities that a file declares are not known to its units.
"""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import cache
from html.entities import html5
from itertools import islice
from pathlib import Path
from typing import cast
from xml.etree import ElementTree
from xml.parsers import expat

from transduce.config.settings import DataSettings
from transduce.data.lines import Unreadable, format_path, n_bytes, one_line, open_bytes, too_long
from transduce.errors import DataError
from transduce.text.languages import base_language, match_language, normalize_code
from transduce.text.scripts import LETTER

_CHUNK, _TAG = 1 << 16, 8  # bytes read at once; at least the longest beginning of a tag that `_PART` matches
_PAIRED, _ALONE = frozenset({"bpt", "ept"}), frozenset({"it", "ph", "ut"})
"""Elements inside a segment that contain markup of the original document, not text: in pairs around text, and alone."""
_MOST_SEGMENTS = 64  # length of the longest unit that is read, relative to the longest segment
_UNITS_SEEN = 1000  # number of units from which languages are inferred

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w.-]+)""")
_END = b"</body"
_PART = re.compile(rb"(?=<tu[\s/>]|%b)" % _END)
_GAP = re.compile(r"(?<![ \t\n])[ \t\n]*\0[ \t\n\0]*")  # the lookbehind makes the search linear
_LETTER = re.compile(LETTER)

Unit = tuple[int, dict[str, str] | Unreadable]
"""The line of a `<tu>`, and its segments by language code as written (`en-US`), or the reason that it is left out."""


class Memory:
    """A TMX file. `srclang`: the source language that its header names; empty before `units` has passed the header."""

    def __init__(self, path: Path, max_record: int) -> None:
        """`max_record`: bytes of the longest segment that is read."""
        self.path, self.srclang, self._max_record = path, "", max_record

    def units(self) -> Iterator[Unit]:
        """Yield all units, each parsed alone, so that a malformed one does not affect others.

        A file that is malformed before its first unit is a `DataError`.
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
        """Parse the unit that begins on this line."""
        if len(part) > _MOST_SEGMENTS * self._max_record:
            return line, too_long(self._max_record)
        parser, builder = _parser(), ElementTree.TreeBuilder()
        parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
        parser.CharacterDataHandler = builder.data

        def skip_entity(name: str, is_parameter: bool) -> None:
            """Read an entity that the file does not define, such as `&nbsp;`, as HTML does."""
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
    parser.UseForeignDTD()  # entities that are not declared reach `SkippedEntityHandler`, as if there were a DTD
    return parser


def _text(element: ElementTree.Element) -> str:
    """The text of a segment, without markup of the original document; NUL, which XML cannot contain, for an element."""
    parts = [element.text or ""]
    for inner in element:
        text = "" if inner.tag in _PAIRED else "\0" if inner.tag in _ALONE else _text(inner) or "\0"
        parts += [text, inner.tail or ""]
    return "".join(parts)


def _parts(file: io.BufferedReader, most: int) -> Generator[bytes, None, None]:
    """The file in UTF-8, cut before each unit and before the end of the body.

    Of a unit of more than `most` bytes, only a beginning that is longer too is kept, and the line ends.
    """
    begun, size, rest = list[bytes](), 0, b""  # of a long unit, whose end alone is searched
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
    """The file in UTF-8. Bytes that are not valid in its encoding become bytes that are not valid in UTF-8."""
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
    """The replacement of an inline element: a space between two words or spaces, nothing at the edge of a segment."""
    before, after = gap.string[max(0, gap.start() - 1) : gap.start()], gap.string[gap.end() : gap.end() + 1]
    if not before or not after or before.isspace() or after.isspace():
        return ""
    has_space = gap[0].strip("\0") or (_LETTER.match(before) and _LETTER.match(after))
    return " " if has_space else ""


@cache
def sides_of(codes: frozenset[str], src_lang: str, tgt_lang: str, srclang: str) -> tuple[str | None, str | None]:
    """The codes of source and target, which always differ.

    Of equally good codes, such as en-GB and en-US for en, the header's `srclang` counts, else the alphabet.
    """
    ordered = sorted(codes, key=lambda code: (normalize_code(code) != normalize_code(srclang), code))
    src = match_language(src_lang, [code for code in ordered if normalize_code(code) != normalize_code(tgt_lang)])
    return src, match_language(tgt_lang, [code for code in ordered if code != src])


def infer_languages(path: Path, settings: DataSettings) -> tuple[str, str]:
    """The two languages of a TMX file, ordered by a given code, by `srclang` of the header, or as in the first unit.

    Raises `DataError` for other numbers of languages.
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
