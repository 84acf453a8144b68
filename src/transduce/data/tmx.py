"""Read translation memories (TMX 1.1 to 1.4) unit by unit.

The DTD that most files name is not loaded. External entities are refused, and expat (2.4 and later) limits the
expansion of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from transduce.data.lines import format_path, one_line, open_bytes
from transduce.errors import DataError
from transduce.text.languages import base_language

_CHUNK = 1 << 16
_CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})
"""Elements inside a segment that contain markup of the original document, not text."""


Unit = tuple[int, dict[str, str]]
"""One `<tu>`: its line, and its segments by language code as written (`en-US`)."""


class _Units:
    """Collects finished units from the parser's events."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: list[Unit] = []
        self._root = ""
        self._unit: Unit = (0, {})
        self._language = ""
        self._text: list[str] | None = None  # the segment being read
        self._codes = 0  # open elements of markup
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.ExternalEntityRefHandler = self._refuse

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._root:
            self._root = name
            if name != "tmx":
                raise DataError(f"{self.path}: the root element is <{name}>, not <tmx>")
        if name == "tu":
            self._unit = (self.parser.CurrentLineNumber, {})
        elif name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang") or ""
        elif name == "seg":
            self._text, self._codes = [], 0
        elif name in _CODES:
            self._codes += 1

    def _characters(self, content: str) -> None:
        if self._text is not None and not self._codes:
            self._text.append(content)

    def _end(self, name: str) -> None:
        if name == "tu":
            self.done.append(self._unit)
        elif name == "seg" and self._text is not None:
            self._unit[1].setdefault(self._language, "".join(self._text))
            self._text = None
        elif name in _CODES:
            self._codes -= 1

    def _refuse(self, *_: object) -> int:
        line = self.parser.CurrentLineNumber
        raise DataError(f"{self.path}, line {line}: the text contains an external XML entity, which is not loaded")


def read_units(path: Path) -> Iterator[Unit]:
    """Yield the translation units of a TMX file. Malformed XML is a `DataError` with file and line."""
    units = _Units(path)
    with open_bytes(path) as (file, _):
        try:
            while chunk := file.read(_CHUNK):
                units.parser.Parse(chunk)
                yield from units.done
                units.done.clear()
            units.parser.Parse(b"", True)
        except (LookupError, ValueError) as error:  # an unknown encoding, or one that expat cannot read
            raise DataError(f"{format_path(path)}, line 1: not valid TMX: {error}") from None
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise DataError(f"{format_path(path)}, line {error.lineno}: not valid TMX: {reason}") from None
    yield from units.done


def read_tmx(path: Path, src_lang: str, tgt_lang: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, source and target of each unit. A missing side is empty, so that cleaning counts it."""
    known, n_pairs = set[str](), 0
    for line, segments in read_units(path):
        known |= segments.keys()
        for_src = {code for code in segments if _comparable(code) != _comparable(tgt_lang)}
        src_code = choose_language(src_lang, for_src)
        codes = [src_code, choose_language(tgt_lang, segments.keys() - {src_code})]
        src, tgt = ("" if code is None else one_line(segments[code]) for code in codes)
        n_pairs += None not in codes
        if codes != [None, None]:
            yield line, src, tgt
    if known and not n_pairs:
        languages = ", ".join(sorted(known))
        missing = f"no unit has both '{src_lang}' and '{tgt_lang}'; languages in the file: {languages}"
        raise DataError(f"{format_path(path)}: {missing}")


def choose_language(wanted: str, known: set[str]) -> str | None:
    """The code in `known` that matches `wanted`: the same code, or else one of the same language (`en`, `en-US`).

    >>> choose_language("en", {"EN-us", "de"})
    'EN-us'
    """
    wanted = _comparable(wanted)
    by_code = {_comparable(code): code for code in sorted(known, reverse=True)}
    if wanted in by_code:
        return by_code[wanted]
    return next((by_code[code] for code in sorted(by_code) if base_language(code) == base_language(wanted)), None)


def _comparable(code: str) -> str:
    return code.lower().replace("_", "-")
