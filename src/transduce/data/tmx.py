"""Read translation memories (TMX 1.1 to 1.4) unit by unit.

The DTD that most files name is not loaded. External entities are refused, and expat (2.4 and later) limits the
expansion of others.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import cache
from html.entities import html5
from itertools import islice
from pathlib import Path
from typing import cast
from xml.parsers import expat

from transduce.config.settings import DataSettings
from transduce.data.lines import Unreadable, format_path, n_bytes, one_line, open_bytes, too_long
from transduce.errors import DataError
from transduce.text.languages import base_language, match_language, normalize_code
from transduce.text.scripts import LETTER

_CHUNK, _TAG = 1 << 16, 8  # bytes read at once; at least the longest beginning of a tag that `_PART` matches
_PAIRED, _ALONE = frozenset({"bpt", "ept"}), frozenset({"it", "ph", "ut"})
"""Elements inside a segment that contain markup of the original document, not text: in pairs around text, and alone."""
_MARKUP = _PAIRED | _ALONE
_UNITS_SEEN = 1000  # number of units from which languages are inferred

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w.-]+)""")
_PART = re.compile(rb"(?=<tu[\s>]|</body)")
_GAP = re.compile(r"(?<![ \t\n])[ \t\n]*\0[ \t\n\0]*")  # the lookbehind makes the search linear
_LETTER = re.compile(LETTER)

Unit = tuple[int, dict[str, str] | Unreadable]
"""The line of a `<tu>`, and its segments by language code as written (`en-US`), or the reason that it is left out."""


class _Malformed(Exception):
    """A unit that is well-formed XML but not TMX."""


class Memory:
    """A TMX file. `srclang`: the source language that its header names; empty before `units` has passed the header."""

    def __init__(self, path: Path, max_record: int) -> None:
        """`max_record`: bytes of the longest segment that is read."""
        self.path, self.srclang = path, ""
        self._max_record = max_record
        self._done = list[Unit]()
        self._root = ""
        self._start_parser()

    def units(self) -> Iterator[Unit]:
        """Yield all units. A file that is malformed before its first unit is a `DataError`."""
        n_lines, has_units, skips = 0, False, False
        with open_bytes(self.path) as (file, _):
            try:
                for part in _parts(cast(io.BufferedReader, file)):
                    is_whole = _PART.match(part) is not None
                    has_units |= is_whole
                    if is_whole or not skips:  # otherwise: the rest of a malformed unit
                        skips = not self._parse(part, n_lines, may_skip=has_units, is_whole=is_whole)
                    yield from self._done
                    self._done.clear()
                    n_lines += part.count(b"\n")
                self._parse(b"", n_lines, may_skip=has_units)
            except (LookupError, ValueError) as error:  # unknown encoding, or text that is invalid in its encoding
                raise DataError(f"{format_path(self.path)}, line 1: not valid TMX: {error}") from None
        yield from self._done

    def _start_parser(self) -> None:
        self._n_lines: int | None = None  # lines before the text that the parser reads
        self._unit_line, self._language = 0, ""
        self._segments, self._is_too_long = dict[str, str](), False
        self._text: list[str] | None = None  # the segment being read
        # bytes of the segment so far; open markup elements; pieces of text before the last element
        self._size = self._codes = self._opened = 0
        self._parser = expat.ParserCreate("utf-8")
        self._parser.buffer_text = True
        self._parser.UseForeignDTD()  # entities that are not declared reach `_skip_entity`, as if there were a DTD
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.SkippedEntityHandler = self._skip_entity
        self._parser.ExternalEntityRefHandler = self._refuse

    @property
    def _line(self) -> int:
        return (self._n_lines or 0) + self._parser.CurrentLineNumber

    def _parse(self, part: bytes, n_lines: int, *, may_skip: bool, is_whole: bool = False) -> bool:
        """Whether a part of the file is well-formed. If not, a new parser reads the next part.

        is_whole: the part starts with a unit. If the unit before it has no end, only that unit is left out.
        """
        was_open = bool(self._unit_line)
        if self._n_lines is None:
            self._n_lines = n_lines
        try:
            self._parser.Parse(part, not part)
            return True
        except _Malformed as error:
            fault = Unreadable("not valid TMX", str(error))
        except expat.ExpatError as error:
            fault = Unreadable("not valid TMX", f": {expat.ErrorString(error.code)}")
        if not may_skip:
            raise DataError(f"{format_path(self.path)}, line {self._line}: {fault}")
        self._done.append((self._line, fault))
        self._start_parser()
        self._parser.Parse(b"<tmx><body>")
        return was_open and is_whole and self._parse(part, n_lines, may_skip=True)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._root:
            self._root = name
            if name != "tmx":
                raise DataError(f"{self.path}: the root element is <{name}>, not <tmx>")
        if self._text is not None:
            self._codes += name in _MARKUP
            self._opened = len(self._text)
        elif name == "header":
            self.srclang = attributes.get("srclang", "")
        elif name == "tu":
            if self._unit_line:
                raise _Malformed(": <tu> inside another one")
            self._unit_line, self._segments, self._is_too_long = self._line, {}, False
        elif name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang") or ""
            if not self._unit_line:
                self._done.append((self._line, Unreadable("<tuv> outside a <tu>", has_text=False)))
        elif name == "seg" and self._unit_line:
            self._text, self._size, self._codes = [], 0, 0

    def _characters(self, content: str) -> None:
        if self._text is None or self._codes:
            return
        self._size += n_bytes(content)
        if self._size < self._max_record:
            self._text.append(content)

    def _end(self, name: str) -> None:
        if name == "tu":
            self._done.append((self._unit_line, self._finished_unit()))
            self._unit_line = 0
        elif self._text is None:
            return
        elif name == "seg":
            text = "".join(self._text)
            text = one_line(_GAP.sub(_filled, text) if "\0" in text else text)
            if not self._segments.get(self._language, "").strip():
                self._segments[self._language] = text
            self._is_too_long |= self._size >= self._max_record
            self._text = None
        else:
            self._codes -= name in _MARKUP
            if not self._codes and (name in _ALONE or (name not in _PAIRED and self._opened == len(self._text))):
                self._text.append("\0")  # which XML cannot contain

    def _finished_unit(self) -> dict[str, str] | Unreadable:
        if self._is_too_long:
            return too_long(self._max_record)
        return self._segments or Unreadable("<tu> without <seg>", has_text=False)

    def _skip_entity(self, name: str, is_parameter: bool) -> None:
        """Read an entity that is not declared in the file, such as `&nbsp;`, as HTML does."""
        if not is_parameter:
            if f"{name};" not in html5:
                raise _Malformed(f": undefined entity &{name};")
            self._characters(html5[f"{name};"])

    def _refuse(self, *_: object) -> int:
        raise DataError(
            f"{self.path}, line {self._line}: the text contains an external XML entity, which is not loaded"
        )


def _parts(file: io.BufferedReader) -> Iterator[bytes]:
    """The file in UTF-8, cut before each unit and before the end of the body. A long unit yields several parts."""
    rest = b""
    for chunk in _utf8(file):
        *parts, rest = _PART.split(rest + chunk)
        yield from filter(None, parts)
        if len(rest) > _CHUNK:
            yield rest[:-_TAG]
            rest = rest[-_TAG:]
    if rest:
        yield rest


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
    """The codes of source and target, which are never the same.

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
