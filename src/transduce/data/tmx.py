"""Translation memories (TMX 1.1 to 1.4): a stream of translation units, read safely and in bounded memory.

The reader never builds a tree: one unit at a time. Entities and external references are refused (defusedxml).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import AttributesImpl, Locator

from defusedxml import DefusedXmlException
from defusedxml.expatreader import DefusedExpatParser

from transduce.data.lines import MAX_LINE, open_bytes
from transduce.errors import DataError

_CHUNK = 1 << 16
_CODES = frozenset({"bpt", "ept", "it", "ph", "ut"})
"""Elements inside a segment that hold mark-up of the original document, not text."""


class Unit(NamedTuple):
    """One `<tu>`: its line and its segments by language code, as written (`en-US`)."""

    line: int
    segments: dict[str, str]


class _Handler(ContentHandler):
    """Collects finished units from the parser's events."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Unit] = []
        self.root = ""
        self.locator = Locator()
        self._unit = Unit(0, {})
        self._language = ""
        self._text: list[str] | None = None  # the segment being read
        self._codes = 0  # open elements of mark-up
        self._size = 0

    def setDocumentLocator(self, locator: Locator) -> None:
        self.locator = locator

    @property
    def line(self) -> int:
        return self.locator.getLineNumber() or 0

    def startElement(self, name: str, attrs: AttributesImpl) -> None:
        self.root = self.root or name
        if name == "tu":
            self._unit = Unit(self.line, {})
        elif name == "tuv":
            self._language = attrs.get("xml:lang") or attrs.get("lang") or ""
        elif name == "seg":
            self._text, self._codes, self._size = [], 0, 0
        elif name in _CODES:
            self._codes += 1

    def characters(self, content: str) -> None:
        if self._text is not None and not self._codes:
            self._text.append(content)
            self._size += len(content)
            if self._size > MAX_LINE:
                raise SAXParseException(f"a segment longer than {MAX_LINE >> 20} MiB", None, self.locator)

    def endElement(self, name: str) -> None:
        if name == "tu":
            self.units.append(self._unit)
        elif name == "seg" and self._text is not None:
            self._unit.segments.setdefault(self._language, "".join(self._text))
            self._text = None
        elif name in _CODES:
            self._codes -= 1

    def take(self) -> list[Unit]:
        """The units finished since the last call."""
        done, self.units = self.units, []
        return done


def read_units(path: Path) -> Iterator[Unit]:
    """Yield the translation units of a TMX file. Malformed or dangerous XML is a `DataError` with file and line."""
    parser, handler = DefusedExpatParser(), _Handler()
    parser.setContentHandler(handler)
    with open_bytes(path) as file:
        try:
            while chunk := file.read(_CHUNK):
                parser.feed(chunk)
                if handler.root not in ("", "tmx"):
                    raise DataError(f"{path}: the root element is <{handler.root}>, not <tmx>")
                yield from handler.take()
            parser.close()
        except SAXParseException as error:
            raise DataError(f"{path}, line {error.getLineNumber()}: not valid TMX: {error.getMessage()}") from None
        except DefusedXmlException as error:
            kind = type(error).__name__
            raise DataError(f"{path}, line {handler.line}: refused for safety: XML entities ({kind})") from None
    yield from handler.take()


def choose_language(wanted: str, known: set[str]) -> str | None:
    """The code among `known` that means `wanted`: the same, else one of the same language (`en` and `en-US`).

    >>> choose_language("en", {"EN-us", "de"})
    'EN-us'
    """
    wanted = wanted.lower().replace("_", "-")
    by_code = {code.lower().replace("_", "-"): code for code in sorted(known, reverse=True)}
    if wanted in by_code:
        return by_code[wanted]
    return next((by_code[code] for code in sorted(by_code) if code.split("-")[0] == wanted.split("-")[0]), None)
