"""Cut HTML and XML into segments to translate and all else, which stays as it is, byte for byte.

Elements inside running text, such as <b>, are part of their segment; all others end it. Entities are only replaced by
the characters of the standard names: nothing is read from a document type, and nothing is loaded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal
from xml.parsers import expat

from transduce.errors import SettingsError
from transduce.serving.tags.transfer import Element

DEEPEST = 100
"""Elements inside each other."""

MOST_ELEMENTS = 200
"""Elements in a segment; with more, each ends it."""

_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())  # noqa: SIM905
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img input ins kbd label mark q s samp small span "  # noqa: SIM905
    "strike strong sub sup time tt u var wbr".split()
)
_KEPT = frozenset("code kbd math noscript pre samp script style svg template textarea var".split())  # noqa: SIM905
_RAW = frozenset(("script", "style", "textarea"))  # in which < is a character
# As in browsers, only a quote after = starts a value; any other is a mistake inside the tag. Nothing is tried again.
_TAG = re.compile(r"""<(/?)((?:[^\W\d]|:)[^\s/<>"'=]*+)((?:=\s*+(?:"[^"]*"|'[^']*')|[^<>])*+)>""")
_NO_TRANSLATION = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*["'][^"']*\bnotranslate\b""", re.IGNORECASE)
_OPAQUE = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>"), ("<!", ">"))
_SUBSET = re.compile(r"<!DOCTYPE[^<>\[]*\[", re.IGNORECASE)  # declarations of a document type, which end with ]>
_PROLOG = re.compile(r"<!DOCTYPE\b|\A<\?xml\b")
_TEXTS = ("#text", "#entity")
_SPACES = " \t\r\n\f"
_SPACE = re.compile(r"[ \t\r\n\f]+")
_LONG_NUMBER = re.compile(r"&#(\d{8,});?")
_ENTITY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9A-Fa-f]+);)[A-Za-z_][\w.-]*;")  # of a document type


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkupRules:
    """Rules for tags.

    kind: html or xml. ignore: names of elements whose text stays. splitting: of elements that end a sentence.
    non_splitting: of elements that do not. outline: elements of XML are inside a sentence only if text is beside them.
    """

    kind: Literal["html", "xml"]
    ignore: frozenset[str] = frozenset()
    splitting: frozenset[str] = frozenset()
    non_splitting: frozenset[str] = frozenset()
    outline: bool = True


@dataclass(slots=True)
class Segment:
    """Running text, without tags, its elements, and the white space of the document around it."""

    text: str
    root: Element
    spaces: tuple[str, str] = ("", "")


@dataclass(slots=True, eq=False)
class _Node:
    """An element, or else #text, #entity, #stray (a tag that closes nothing) or #other (such as comments).

    inside, stop: Where its content begins and ends; stop is -1 for an element that is not closed.
    """

    name: str
    start: int
    end: int = -1
    inside: int = -1
    stop: int = -1
    children: list[_Node] = field(default_factory=list)
    is_inline: bool = False
    n_elements: int = 1


def parse_markup(text: str, rules: MarkupRules) -> list[str | Segment]:
    """The document as markup that stays and segments, in order.

    Raises `SettingsError`: XML that is not well-formed, or elements that are nested too deeply.
    """
    return _Segments(text, rules).cut(_parse(text, is_xml=rules.kind == "xml"))


def _parse(text: str, *, is_xml: bool) -> _Node:
    """The root, which is no element. HTML may have any mistakes; a tag that closes nothing is markup."""
    root = _Node("", 0, len(text), 0, len(text))
    stack, place = [root], 0
    for start, end, found in _markup(text, is_xml=is_xml):
        if place < start:
            stack[-1].children.append(_Node("#text", place, start, n_elements=0))
        place = end
        if isinstance(found, str):
            stack[-1].children.append(_Node(found, start, end))
            continue
        name = found[2] if is_xml else found[2].lower()
        if found[1]:
            _close(stack, name, start, end)
        elif found[3].endswith("/") if is_xml else name in _VOID:
            stack[-1].children.append(_Node(name, start, end, end, end))
        elif len(stack) > DEEPEST:
            raise SettingsError(f"elements are nested more than {DEEPEST} deep; flatten the document")
        else:
            stack[-1].children.append(_Node(name, start, inside=end))
            stack.append(stack[-1].children[-1])
    if place < len(text):
        stack[-1].children.append(_Node("#text", place, len(text), n_elements=0))
    if is_xml:
        _check_xml(text, root)
    for unclosed in stack[1:]:
        unclosed.end = len(text)
    return root


def _markup(text: str, *, is_xml: bool) -> Iterator[tuple[int, int, str | re.Match[str]]]:
    """The places of tags, with their match, and of entities, comments and the like, with the name of their node."""
    begin, place, missing = re.compile(f"<|{_ENTITY.pattern}" if is_xml else "<"), 0, set[str]()
    while (found := begin.search(text, place)) is not None:
        place, end = found.start(), found.end()
        if found[0] != "<":
            yield place, end, "#entity"
        elif (tag := _TAG.match(text, place)) is not None:
            end = tag.end()
            yield place, end, tag
            if not is_xml and not tag[1] and tag[2].lower() in _RAW:
                closing = re.compile(rf"</{tag[2]}\b", re.IGNORECASE).search(text, end)
                end = len(text) if closing is None else closing.start()
        else:
            for first, last in _OPAQUE if not _SUBSET.match(text, place) else (("<!", "]>"),):
                if text.startswith(first, place) and last not in missing:
                    stop = text.find(last, place + len(first))
                    if stop >= 0:
                        end = stop + len(last)
                        yield place, end, "#other"
                        break
                    missing.add(last)
        place = end


def _close(stack: list[_Node], name: str, start: int, end: int) -> None:
    place = next((i for i in range(len(stack) - 1, 0, -1) if stack[i].name == name), 0)
    if not place:
        stack[-1].children.append(_Node("#stray", start, end))
        return
    stack[place].stop, stack[place].end = start, end
    for unclosed in stack[place + 1 :]:
        unclosed.end = start
    del stack[place:]


def _check_xml(text: str, root: _Node) -> None:
    """Let expat read it, as content of one element, without the document type and its entities."""
    for node in root.children:
        if node.name == "#other" and _PROLOG.match(text, node.start):
            text = text[: node.start] + re.sub(r"[^\n]", " ", text[node.start : node.end]) + text[node.end :]
    text = _ENTITY.sub(lambda entity: "x" * len(entity[0]), text)
    try:
        expat.ParserCreate("utf-8").Parse(f"<_>\n{text}</_>".encode(errors="replace"), True)
    except expat.ExpatError as error:
        place = f"line {error.lineno - 1}, column {error.offset + 1}"
        raise SettingsError(f"not well-formed XML: {expat.ErrorString(error.code)} at {place}") from None


class _Segments:
    """Cuts the tree into segments."""

    def __init__(self, text: str, rules: MarkupRules) -> None:
        self._text, self._rules = text, rules
        self._found: list[str | Segment] = []
        self._begin()

    def _begin(self) -> None:
        self._parts: list[str] = []
        self._length = self._n_elements = 0
        self._open = [Element(0, 0)]
        self._first = -1  # of the segment in the document

    def cut(self, root: _Node) -> list[str | Segment]:
        self._mark(root)
        self._walk(root.children)
        self._flush(len(self._text))
        return self._found

    def _mark(self, node: _Node) -> bool:
        """Find out which elements are inside sentences; true if this one may be."""
        beside_text = any(self._text[c.start : c.end].strip() for c in node.children if c.name in _TEXTS)
        for child in node.children:
            if child.name.startswith("#"):
                child.is_inline = child.name != "#stray"
            else:
                child.is_inline = self._mark(child) and self._may_be_inline(child.name, beside_text=beside_text)
        node.n_elements += sum(child.n_elements for child in node.children)
        small = node.n_elements <= MOST_ELEMENTS
        return node.stop >= 0 and small and (self._is_kept(node) or all(child.is_inline for child in node.children))

    def _may_be_inline(self, name: str, *, beside_text: bool) -> bool:
        rules = self._rules
        if name in rules.splitting or name in rules.non_splitting:
            return name not in rules.splitting
        return name in _INLINE if rules.kind == "html" else beside_text or not rules.outline

    def _is_kept(self, node: _Node) -> bool:
        if node.name in self._rules.ignore or self._rules.kind == "xml":
            return node.name in self._rules.ignore
        return node.name in _KEPT or _NO_TRANSLATION.search(self._text, node.start, node.inside) is not None

    def _walk(self, children: Sequence[_Node]) -> None:
        for node in children:
            if not node.is_inline:
                self._flush(node.start)
                self._add_block(node)
                continue
            if len(self._open) == 1:
                if self._n_elements + node.n_elements > MOST_ELEMENTS:
                    self._flush(node.start)
                self._n_elements += node.n_elements
            if self._first < 0:
                self._first = node.start
            self._add_inline(node)

    def _add_block(self, node: _Node) -> None:
        if node.inside < 0 or self._is_kept(node):
            self._found.append(self._text[node.start : node.end])
            return
        stop = node.stop if node.stop >= 0 else node.end
        self._found.append(self._text[node.start : node.inside])
        self._walk(node.children)
        self._flush(stop)
        self._found.append(self._text[stop : node.end])

    def _add_inline(self, node: _Node) -> None:
        start, whole = self._length, self._text[node.start : node.end]
        if node.name == "#text":
            self._add_text(whole)
        elif node.name == "#entity":
            self._add_kept(whole, whole)
        elif node.inside < 0:
            self._open[-1].children.append(Element(start, start, before=whole))
        elif self._is_kept(node):
            self._add_kept(_plain("".join(self._text[one.start : one.end] for one in _texts(node))), whole)
        else:
            element = Element(start, start, self._text[node.start : node.inside], self._text[node.stop : node.end])
            self._open[-1].children.append(element)
            self._open.append(element)
            self._walk(node.children)
            self._open.pop()
            element.end = self._length

    def _add_text(self, text: str) -> None:
        self._parts.append(_plain(text))
        self._length += len(self._parts[-1])

    def _add_kept(self, copy: str, verbatim: str) -> None:
        start, self._length = self._length, self._length + len(copy)
        self._parts.append(copy)
        self._open[-1].children.append(Element(start, self._length, verbatim=verbatim, copy=copy))

    def _flush(self, end: int) -> None:
        """End the segment, at this place of the document."""
        if self._first < 0:
            return
        text, (root,) = "".join(self._parts), self._open
        root.end = len(text)
        raw = self._text[self._first : end]
        around = (text[: leaf.start] + text[leaf.end :] for leaf in root.leaves() if leaf.start < leaf.end)
        if any(map(str.isalnum, text)) and all(map(str.strip, around)):
            n_before, n_after = (len(raw) - len(strip(_SPACES)) for strip in (raw.lstrip, raw.rstrip))
            self._found.append(Segment(text, root, (raw[:n_before], raw[len(raw) - n_after :])))
        else:
            self._found.append(raw)
        self._begin()


def _plain(raw: str) -> str:
    """Text of a document as plain text."""
    # Eight digits are beyond Unicode already, and Python refuses thousands of them.
    raw = _LONG_NUMBER.sub(lambda found: f"&#{found[1].lstrip('0')[:8] or 0};", raw)
    return _SPACE.sub(" ", html.unescape(raw))


def _texts(node: _Node) -> Iterator[_Node]:
    """The text inside an element."""
    if node.name in _TEXTS:
        yield node
    for child in node.children:
        yield from _texts(child)
