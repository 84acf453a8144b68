"""Cut HTML and XML into segments to translate and other markup, which is preserved byte for byte.

Elements inside running text, such as <b>, are part of their segment. All other elements end it. Only entities with
standard names are replaced by characters. Nothing is read from a document type, and nothing is loaded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal
from xml.parsers import expat

from transduce.errors import SettingsError
from transduce.serving.tags.transfer import Element
from transduce.text.languages import LETTER, UNIT

DEEPEST = 100
"""Maximum depth of nested elements."""

MOST_ELEMENTS = 200
"""Maximum number of elements in a segment. Further elements begin a new segment."""

_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())  # noqa: SIM905
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img input ins kbd label mark q s samp small span "  # noqa: SIM905
    "strike strong sub sup time tt u var wbr".split()
)
_KEPT = frozenset("code kbd math noscript pre samp script style svg template textarea var".split())  # noqa: SIM905
_RAW = frozenset(("script", "style", "textarea"))  # elements in which < is an ordinary character
# As in browsers, only a quote after = starts a value. Any other quote is a mistake inside the tag. The expression does
# not backtrack.
_TAG = re.compile(r"""<(/?)((?:[^\W\d]|:)[^\s/<>"'=]*+)((?:=\s*+(?:"[^"]*"|'[^']*')|[^<>])*+)>""")
_NO_TRANSLATION = re.compile(r"""\stranslate\s*=\s*["']?no\b|\sclass\s*=\s*["'][^"']*\bnotranslate\b""", re.IGNORECASE)
_OPAQUE = (("<!--", "-->"), ("<![CDATA[", "]]>"), ("<?", "?>"), ("<!", ">"))
_SUBSET = re.compile(r"<!DOCTYPE[^<>\[]*\[", re.IGNORECASE)  # declarations of a document type, which end with ]>
_PROLOG = re.compile(r"<!DOCTYPE\b|\A<\?xml\b")
_TEXTS = ("#text", "#entity")
_RAISED = frozenset(("sub", "sup"))
_LONGEST_RAISED = 20
"""Maximum characters of a raised number or mark. Longer raised parts are text."""
_LONGEST_WORD = 100
_WORD_BEFORE = re.compile(rf"(?:(?<!\S)[-+−])?(?:{LETTER}|[.,](?=\d))+$")
_WORD_BEHIND = re.compile(f"{LETTER}*")
_UNIT_BEHIND = re.compile(rf"(?:[ \u00a0]?(?!&)(?:{UNIT})(?!\w))?")
_SYMBOL = re.compile(r"\A(?:\w|\D*\d.*|[b-df-hj-np-tv-xz]{2,3})", re.IGNORECASE)  # x, 10, km
_SPACES = " \t\r\n\f"
_SPACE = re.compile(r"[ \t\r\n\f]+")
_LONG_NUMBER = re.compile(r"&#(\d{8,});?")
_ENTITY = re.compile(r"&(?!(?:amp|lt|gt|quot|apos|#\d+|#x[0-9A-Fa-f]+);)[A-Za-z_][\w.-]*;")
"""An entity that a document type may define; in HTML, only if its name is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkupRules:
    """Rules for tags.

    ignore: Names of elements whose text is preserved. splitting: Names of elements that end a sentence. non_splitting:
    Names of elements that may be inside sentences. outline: Whether other XML elements are inside a sentence only if
    they are next to text.
    """

    kind: Literal["html", "xml"]
    ignore: frozenset[str] = frozenset()
    splitting: frozenset[str] = frozenset()
    non_splitting: frozenset[str] = frozenset()
    outline: bool = True


@dataclass(slots=True)
class Segment:
    """Running text without tags, its elements (inside `root`), and the white space around it in the document."""

    text: str
    root: Element
    spaces: tuple[str, str] = ("", "")


@dataclass(slots=True, eq=False)
class _Node:
    """An element by its name, or #text, #entity, #stray (a tag that closes nothing) or #other (such as comments).

    Two kinds join adjacent nodes: #formula, a word with raised or lowered parts, such as H<sub>2</sub>O; and #marks,
    which are not text of the sentence, such as comments, images and the number of a footnote.

    inside, stop: Offsets of the beginning and end of its content; stop is -1 for an element that is not closed.
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
    """Split a document into preserved markup and segments, in order.

    Raises `SettingsError` if XML is not well-formed, or if elements are nested too deeply.
    """
    return _Segments(text, rules).cut(_parse(text, is_xml=rules.kind == "xml"))


def _parse(text: str, *, is_xml: bool) -> _Node:
    """Parse a document. Returns its root, which is not an element.

    HTML may be malformed. An unmatched end tag is preserved as markup.
    """
    root = _Node("", 0, len(text), 0, len(text))
    stack, text_start = [root], 0
    for start, end, markup in _markup(text, is_xml=is_xml):
        if text_start < start:
            stack[-1].children.append(_Node("#text", text_start, start, n_elements=0))
        text_start = end
        if isinstance(markup, str):
            stack[-1].children.append(_Node(markup, start, end))
            continue
        slash, name, attributes = markup.groups()
        name = name if is_xml else name.lower()
        if slash:
            _close(stack, name, start, end)
        elif attributes.endswith("/") if is_xml else name in _VOID:
            stack[-1].children.append(_Node(name, start, end, end, end))
        elif len(stack) > DEEPEST:
            raise SettingsError(f"elements are nested more than {DEEPEST} deep; flatten the document")
        else:
            stack[-1].children.append(_Node(name, start, inside=end))
            stack.append(stack[-1].children[-1])
    if text_start < len(text):
        stack[-1].children.append(_Node("#text", text_start, len(text), n_elements=0))
    if is_xml:
        _check_xml(text, root)
    for unclosed in stack[1:]:
        unclosed.end = len(text)
    return root


def _markup(text: str, *, is_xml: bool) -> Iterator[tuple[int, int, str | re.Match[str]]]:
    """Yield (start, end, match) of each tag, and (start, end, node name) of entities, comments and other markup."""
    begin, end, missing = re.compile(f"<|{_ENTITY.pattern}"), 0, set[str]()
    while (beginning := begin.search(text, end)) is not None:
        start, end = beginning.span()
        if beginning[0] != "<":
            if is_xml or html.unescape(beginning[0]) == beginning[0]:
                yield start, end, "#entity"
        elif (tag := _TAG.match(text, start)) is not None:
            end = tag.end()
            yield start, end, tag
            if not is_xml and not tag[1] and tag[2].lower() in _RAW:
                closing = re.compile(rf"</{tag[2]}\b", re.IGNORECASE).search(text, end)
                end = len(text) if closing is None else closing.start()
        else:
            for first, last in _OPAQUE if not _SUBSET.match(text, start) else (("<!", "]>"),):
                if text.startswith(first, start) and last not in missing:
                    stop = text.find(last, start + len(first))
                    if stop >= 0:
                        end = stop + len(last)
                        yield start, end, "#other"
                        break
                    missing.add(last)


def _close(stack: list[_Node], name: str, start: int, end: int) -> None:
    depth = next((i for i in range(len(stack) - 1, 0, -1) if stack[i].name == name), 0)
    if not depth:
        stack[-1].children.append(_Node("#stray", start, end))
        return
    stack[depth].stop, stack[depth].end = start, end
    for unclosed in stack[depth + 1 :]:
        unclosed.end = start
    del stack[depth:]


def _check_xml(text: str, root: _Node) -> None:
    """Check with expat that the text is well-formed, apart from its document type and the entities that it defines."""
    for node in root.children:
        if node.name == "#other" and _PROLOG.match(text, node.start):
            text = text[: node.start] + re.sub(r"[^\n]", " ", text[node.start : node.end]) + text[node.end :]
    text = _ENTITY.sub(lambda entity: "x" * len(entity[0]), text)
    try:
        expat.ParserCreate("utf-8").Parse(f"<_>\n{text}</_>".encode(errors="replace"), True)
    except expat.ExpatError as error:
        position = f"line {error.lineno - 1}, column {error.offset + 1}"
        raise SettingsError(f"not well-formed XML: {expat.ErrorString(error.code)} at {position}") from None


class _Segments:
    """Cuts a parsed document into segments and markup."""

    def __init__(self, text: str, rules: MarkupRules) -> None:
        self._text, self._rules = text, rules
        self._pieces: list[str | Segment] = []
        self._begin()

    def _begin(self) -> None:
        self._segment, self._n_elements = "", 0
        self._open = [Element(0, 0)]
        self._first = -1  # start of the current segment in the document, or -1

    def cut(self, root: _Node) -> list[str | Segment]:
        self._mark(root)
        self._walk(root.children)
        self._flush(len(self._text))
        return self._pieces

    def _mark(self, node: _Node) -> bool:
        """Mark the elements that are inside sentences. Returns whether `node` itself may be inside a sentence."""
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
        for node in self._with_marks(self._with_formulas(children)):
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

    def _with_formulas(self, children: Sequence[_Node]) -> list[_Node]:
        """Join raised or lowered elements with the word that they touch, or make them marks, such as footnote marks."""
        nodes = list[_Node]()
        for node, behind in zip_longest(children, children[1:]):
            before = nodes[-1] if nodes and nodes[-1].is_inline else None
            if not self._is_raised(node):
                nodes += [node] * (node.start < node.end)  # a formula may have taken all of a text
            elif (formula := self._formula(node, before, behind)) is None:
                edges = before and self._plain_text(before)[-1:], behind and self._plain_text(behind)[:1]
                is_text = before is not None and before.name != "#marks" and edges == (" ", " ")
                nodes.append(node if is_text else _Node("#marks", node.start, node.end, is_inline=True))
            elif formula is not before:
                nodes.append(formula)
        return nodes

    def _is_raised(self, node: _Node) -> bool:
        """Whether an element is raised or lowered, and contains a short text such as a number or a mark."""
        if node.name in _RAISED and node.is_inline:
            text = self._plain_text(node)
            return 0 < len(text) <= _LONGEST_RAISED and " " not in text
        return node.is_inline and bool(node.children) and all(map(self._is_raised, node.children))

    def _formula(self, node: _Node, before: _Node | None, behind: _Node | None) -> _Node | None:
        """Join a raised element with the word around it in the texts beside it. None if it is a footnote mark."""
        start, end, is_formula = node.start, node.end, False
        if before is not None and before.name == "#formula":
            start, is_formula = before.start, True
        elif before is not None and before.name == "#text":
            word = _WORD_BEFORE.search(self._text[max(before.start, start - _LONGEST_WORD) : start])
            if word is not None:
                start -= len(word[0])
                is_formula = node.name == "sub" or _SYMBOL.fullmatch(word[0]) is not None
        if start < node.start and behind is not None and behind.name == "#text":
            is_number = self._text[node.start - 1].isdigit()
            for pattern in (_WORD_BEHIND, _UNIT_BEHIND) if is_number else (_WORD_BEHIND,):
                end += len(pattern.match(self._text, end, behind.end)[0])  # type: ignore[index]
            is_formula = is_formula or end > node.end
            behind.start = end
        if not is_formula:
            return None
        parts = [_Node("#text", start, node.start), node, _Node("#text", node.end, end)]
        if before is not None and before.name == "#formula":
            before.end = end
            before.children += parts[1:]
            return before
        if start < node.start and before is not None:
            before.end = start
        return _Node("#formula", start, end, children=parts, is_inline=True)

    def _with_marks(self, nodes: Sequence[_Node]) -> list[_Node]:
        """Join adjacent marks, also across spaces, so that they keep their order. Elements without text are marks too.

        The `children` of joined marks are the spaces between them, if any.
        """
        joined = list[_Node]()
        for node in nodes:
            if not node.is_inline or (node.name != "#marks" and any(True for _ in _texts(node))):
                joined.append(node)
                continue
            marks, spaces = _Node("#marks", node.start, node.end, is_inline=True), list[_Node]()
            if [n.name for n in joined[-2:]] == ["#marks", "#text"] and not self._plain_text(joined[-1]).strip():
                spaces.append(joined.pop())
            if joined and joined[-1].name == "#marks":
                first = joined.pop()
                marks.start, marks.children = first.start, spaces or first.children
            joined.append(marks)
        for i, marks in reversed([*enumerate(joined)]):
            if marks.name == "#marks" and marks.children and i and joined[i - 1].is_inline:
                behind = "".join(map(self._plain_text, joined[i + 1 : i + 2]))
                if not self._plain_text(joined[i - 1]).endswith(" ") and not behind.startswith(" "):
                    joined.insert(i, marks.children[0])  # the sentence keeps a space between its words
        return joined

    def _add_block(self, node: _Node) -> None:
        if node.inside < 0 or self._is_kept(node):
            self._pieces.append(self._text[node.start : node.end])
            return
        stop = node.stop if node.stop >= 0 else node.end
        self._pieces.append(self._text[node.start : node.inside])
        self._walk(node.children)
        self._flush(stop)
        self._pieces.append(self._text[stop : node.end])

    def _add_inline(self, node: _Node) -> None:
        start, whole = len(self._segment), self._text[node.start : node.end]
        if node.name == "#text":
            self._segment += _plain(whole)
        elif node.name == "#entity":
            self._add_kept(whole, whole)
        elif node.name == "#marks":
            self._add_kept("", whole)
        elif node.name == "#formula" or self._is_kept(node):
            self._add_kept(self._plain_text(node), whole)
        else:
            element = Element(start, start, self._text[node.start : node.inside], self._text[node.stop : node.end])
            self._open[-1].children.append(element)
            self._open.append(element)
            self._walk(node.children)
            self._open.pop()
            element.end = len(self._segment)

    def _plain_text(self, node: _Node) -> str:
        return _plain("".join(self._text[text.start : text.end] for text in _texts(node)))

    def _add_kept(self, copy: str, verbatim: str) -> None:
        start = len(self._segment)
        self._segment += copy
        self._open[-1].children.append(Element(start, len(self._segment), verbatim=verbatim, copy=copy))

    def _flush(self, end: int) -> None:
        """End the current segment at the offset `end` in the document."""
        if self._first < 0:
            return
        text, (root,) = self._segment, self._open
        root.end = len(text)
        raw = self._text[self._first : end]
        around = (text[: leaf.start] + text[leaf.end :] for leaf in root.leaves() if leaf.start < leaf.end)
        if any(map(str.isalnum, text)) and all(map(str.strip, around)):
            n_before, n_after = (len(raw) - len(strip(_SPACES)) for strip in (raw.lstrip, raw.rstrip))
            self._pieces.append(Segment(text, root, (raw[:n_before], raw[len(raw) - n_after :])))
        else:
            self._pieces.append(raw)
        self._begin()


def _plain(raw: str) -> str:
    # Python refuses thousands of digits; eight are beyond Unicode already.
    raw = _LONG_NUMBER.sub(lambda number: f"&#{number[1].lstrip('0')[:8] or 0};", raw)
    return _SPACE.sub(" ", html.unescape(raw))


def _texts(node: _Node) -> Iterator[_Node]:
    if node.name in _TEXTS:
        yield node
    for child in node.children:
        yield from _texts(child)
