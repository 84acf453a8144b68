"""Transfer inline tags, and parts that must be preserved, from a text to its translation.

Each element becomes one span of the translation: the span with the most translations of the element's words and the
fewest other words. Elements keep their nesting for any alignment, so that the result is well-formed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, filterfalse, groupby, islice, pairwise
from operator import attrgetter, itemgetter
from typing import Literal

from transduce.serving.tags.protected import OTHER, forms_of
from transduce.text.languages import is_spaced
from transduce.text.placeholders import KEPT_SIGNS, KEPT_WORDS
from transduce.text.special import Span

MOST_PARTS = 100
"""Maximum number of parts to preserve in a text. Further parts are translated like any text."""

_WORDLIKE = re.compile(r"[^\W_]|\{")
_OPENING = "([{<«„“‘¿¡'\""  # no space after these
_CLOSING = ".,;:!?)]}>»”’…%。，、；：！？'\""  # no space before these


@dataclass(slots=True, eq=False)
class Element:
    """A part of a text: an inline element, or a preserved part.

    start, end: Its span in the text.
    before, after: Its tags.
    verbatim: The text that a preserved part becomes in the translation; None for other elements.
    copy: `verbatim` as plain text, which the translation may already contain; empty for an empty element.
    children: The elements inside, in order.
    """

    start: int
    end: int
    before: str = ""
    after: str = ""
    verbatim: str | None = None
    copy: str = ""
    children: list[Element] = field(default_factory=list)

    def inside(self) -> Iterator[Element]:
        for child in self.children:
            yield child
            yield from child.inside()

    def leaves(self) -> Iterator[Element]:
        """The preserved parts inside the element."""
        return (element for element in self.inside() if element.verbatim is not None)

    @property
    def needs_links(self) -> bool:
        """Whether a child has no character of its own (`hide_leaves`), so that word links determine its position."""
        return any(not child.copy or ord(child.copy[0]) < KEPT_WORDS[0] for child in self.children)

    def path_to(self, offset: float) -> list[Element]:
        """The elements that contain an offset in the text, outermost first, beginning with this element."""
        path = [self]
        while inside := [child for child in path[-1].children if child.start <= offset < child.end]:
            path.append(inside[0])
        return path

    def hide_leaves(self, text: str) -> str:
        """Replace each preserved part of the text by one private-use character. Update spans to the new text.

        Translators with placeholders copy these characters. An empty element that touches a word gets no character,
        because it moves with the word.
        """
        words, signs = (filterfalse(text.__contains__, map(chr, kind)) for kind in (KEPT_WORDS, KEPT_SIGNS))
        pieces, size = list[str](), 0

        def add(piece: str) -> None:
            nonlocal size
            pieces.append(piece)
            size += len(piece)

        def add_element(element: Element) -> None:
            start, end, element.start = element.start, element.end, size
            if element.verbatim is None:
                for child in element.children:
                    add(text[start : child.start])
                    start = child.end
                    add_element(child)
                add(text[start:end])
            elif start < end or not any(map(is_spaced, text[max(0, start - 1) : start + 1])):
                element.copy = next(words if _WORDLIKE.search(element.copy) else signs)
                add(element.copy)
            element.end = size

        add_element(self)
        return "".join(pieces)

    def keep(self, parts: Iterable[tuple[int, int, str]], escape: Callable[[str], str]) -> None:
        """Make the translation contain the given parts of the text, as their escaped replacements.

        `parts`: (start, end, replacement) of each; those after the first `MOST_PARTS` are ignored.
        """
        for start, end, copy in islice(parts, MOST_PARTS):
            self._insert(Element(start, end, verbatim=escape(copy), copy=copy))

    def _insert(self, part: Element) -> None:
        """Insert a preserved part, unless it is inside another one or crosses the borders of elements."""
        if self.verbatim is not None:
            return
        for number, child in enumerate(self.children):
            if child.start <= part.start and part.end <= child.end:
                child._insert(part)
                return
            if child.start < part.end and part.start < child.end:
                return
            if part.end <= child.start:
                self.children.insert(number, part)
                return
        self.children.append(part)


@dataclass(slots=True, eq=False)
class Word:
    """A word of the translation: its span, the source word's span if known, and the index of its sentence.

    path: the elements that it belongs to, outermost first.
    """

    start: int
    end: int
    src: Span | None
    number: int
    path: list[Element] = field(default_factory=list)


def words_of(text: str, links: Sequence[tuple[int, int, int, int]], *, src: int, tgt: int, number: int) -> list[Word]:
    """List the words of a translated sentence.

    `links`: spans of linked words in the sentences, (source start, source end, target start, target end). `src`, `tgt`:
    positions of the sentences in the texts. `number`: index of the sentence.
    """
    words, end = [], 0
    for a, b, c, d in sorted({link[2:]: link for link in links}.values(), key=lambda link: link[2]):
        words += [Word(tgt + m.start(), tgt + m.end(), None, number) for m in re.compile(r"\S+").finditer(text, end, c)]
        words.append(Word(tgt + c, tgt + d, (src + a, src + b), number))
        end = d
    return words + [Word(tgt + m.start(), tgt + m.end(), None, number) for m in re.compile(r"\S+").finditer(text, end)]


def project(
    root: Element,
    source: str,
    target: str,
    words: Sequence[Word],
    sentences: Sequence[Span],
    escape: Callable[[str], str] = str,
) -> str:
    """Put the elements of the source into its translation.

    Args:
        root: The whole source as an element.
        source: The text of the source.
        target: The text of the translation.
        words: The words of the translation, in order.
        sentences: The spans of the source's sentences.
        escape: Function that escapes the text of the result.
    """
    words, removed = _claim(root, source, target, _cut_copies(root, source, target, words))
    _find_paths(root, source, words, sentences)
    return _Projection(source, target, words, removed, escape).write(root)


def _cut_copies(root: Element, source: str, target: str, words: Sequence[Word]) -> list[Word]:
    """Cut words that equal their source words at the borders of elements. Returns all words."""
    borders = sorted({offset for element in root.inside() for offset in (element.start, element.end)})
    cut = list[Word]()
    for word in words:
        if word.src is None or target[word.start : word.end] != source[slice(*word.src)]:
            cut.append(word)
            continue
        first, last = word.src
        edges = [first, *borders[bisect_right(borders, first) : bisect_left(borders, last)], last]
        cut += [
            Word(word.start + a - first, word.start + b - first, (a, b), word.number)
            for a, b in pairwise(edges)
            if source[a:b].strip()
        ]
    return cut


def _claim(root: Element, source: str, target: str, words: Sequence[Word]) -> tuple[list[Word], set[Word]]:
    """Find copies of preserved parts in the translation, and make each one word. Returns all words, and the copies.

    The copies are omitted from the result, because the preserved parts themselves are written.
    """
    words, removed = list(words), set[Word]()
    leaves: dict[str, list[Element]] = {}
    for leaf in root.leaves():
        leaves.setdefault(leaf.copy, []).append(leaf)
    n_leaves = {copy: len(leaves_of_copy) for copy, leaves_of_copy in leaves.items()}
    copies = sorted(filter(str.strip, leaves), key=len, reverse=True)
    forms = [(rank, copy, form) for copy in copies for rank, form in enumerate(forms_of(copy))]
    for rank, copy, form in sorted(forms, key=itemgetter(0)):
        free = dict[Span, list[Span]]()  # matches that no part has claimed, with the source spans of their words
        for match in re.finditer(form, target):
            inside = _overlapping(words, match.span())
            if not any(word.path for word in inside):
                free[match.span()] = [word.src for word in inside if word.src]
        for leaf in list(leaves[copy]):
            best = max(free, key=partial(_n_linked, free, leaf), default=None)
            if best is not None and (rank < OTHER or _n_linked(free, leaf, best)):
                del free[best]
                leaves[copy].remove(leaf)
                words, claimed = _merged(words, best, leaf)
                removed.add(claimed)
        # A matching word may be unrelated to the part.
        if not rank and not copy.isalnum() and source.count(copy) == n_leaves[copy]:
            for span in free:
                words, claimed = _merged(words, span, root)
                removed.add(claimed)
    return words, removed


def _overlapping(words: Sequence[Word], span: Span) -> Sequence[Word]:
    return words[bisect_right(words, span[0], key=lambda w: w.end) : bisect_left(words, span[1], key=lambda w: w.start)]


def _n_linked(sources: Mapping[Span, Sequence[Span]], leaf: Element, span: Span) -> int:
    return sum(leaf.start < last and first < leaf.end for first, last in sources[span])


def _merged(words: Sequence[Word], span: Span, owner: Element) -> tuple[list[Word], Word]:
    """Insert a word of `owner` at `span`, and cut overlapping words. Returns all words and the new word."""
    start, end = span
    overlapping = _overlapping(words, span)
    new = Word(start, end, None, overlapping[0].number if overlapping else 0, [owner])
    before = [replace(w, end=start) if w.end > start else w for w in words if w.start < start]
    after = [replace(w, start=end) if w.start < end else w for w in words if w.end > end]
    return [*before, new, *after], new


def _find_paths(root: Element, source: str, words: Sequence[Word], sentences: Sequence[Span]) -> None:
    """Set the `path` of each word: the elements that it belongs to, outermost first.

    A word with unknown source belongs to the common elements of its neighbors or, at the ends of a sentence, to the
    elements of the whole sentence.
    """
    claimed = {word.path[0] for word in words if word.path}
    for word in words:
        owner = word.path[0] if word.path else None
        if owner is not None and owner is not root:
            word.path = root.path_to((owner.start + owner.end - 1) / 2)
        elif owner is None and word.src is not None:
            path = root.path_to((word.src[0] + word.src[1] - 1) / 2)
            if not re.search(r"\s", source[slice(*word.src)]):
                path += _inside_word(path[-1], source, word.src)
            word.path = path[:-1] if path[-1] in claimed else path
    for number, group in groupby(words, key=attrgetter("number")):
        words_of_sentence, (start, end) = list(group), sentences[number]
        whole = _shared(root.path_to(start), root.path_to(max(start, end - 1)))
        paths = [word.path for word in words_of_sentence]
        before = accumulate(paths, _last_known, initial=whole)
        after = [*accumulate(paths[::-1], _last_known, initial=whole)][-2::-1]
        for word, *neighbours in zip(words_of_sentence, before, after, strict=False):
            if not word.path:
                word.path = _shared(*neighbours)
                while word.path[-1].verbatim is not None:
                    word.path.pop()


def _inside_word(element: Element, source: str, word: Span) -> list[Element]:
    """The first element inside `element` that covers a part of a word, and the elements inside it.

    They apply to the whole translation of the word: the translation of `<b>T</b>he` is bold as a whole.
    """

    def is_inside(child: Element) -> bool:
        has_letters = any(map(str.isalnum, source[child.start : child.end]))
        return child.verbatim is None and has_letters and word[0] <= child.start and child.end <= word[1]

    path = [element]
    while inside := list(filter(is_inside, path[-1].children)):
        path.append(inside[0])
    return path[1:]


def _last_known(known: list[Element], path: list[Element]) -> list[Element]:
    return path or known


def _shared(left: Sequence[Element], right: Sequence[Element]) -> list[Element]:
    return [a for a, b in zip(left, right, strict=False) if a is b]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the result: text, a tag, or a preserved part (`leaf`). is_new: it replaces no words of the target."""

    text: str
    tag: Literal["", "start", "end"] = ""
    leaf: Element | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class _Projection:
    """Writes the translation of a text with elements."""

    source: str
    target: str
    words: Sequence[Word]
    removed: set[Word]
    escape: Callable[[str], str]

    def write(self, root: Element) -> str:
        """Write the translation, with spaces around inserted parts if needed."""
        out = list[str]()
        spot, last = 0, _Piece("")  # index for a space: after the end tags that follow the last text
        for piece in self._pieces(root, (0, len(self.words)), (0, len(self.target))):
            if piece.text and not piece.tag:
                if last.text and self._needs_space(last, piece):
                    out.insert(spot, " ")
                last = piece
            out.append(piece.text)
            if piece.text and piece.tag != "start":
                spot = len(out)
        return "".join(out)

    def _pieces(self, element: Element, word_range: Span, characters: Span, *, depth: int = 0) -> Iterator[_Piece]:
        """Yield the pieces of an element at nesting level `depth`, which gets these words and characters."""
        start, end = characters
        if element.verbatim is not None:
            yield _Piece(element.verbatim, leaf=element, is_new=start == end)
            return
        yield _Piece(element.before, tag="start")
        for words_of_child, child in self._placed(element, word_range, depth + 1):
            first, last = self._characters(words_of_child, characters, child)
            yield _Piece(self._text(start, first))
            yield from self._pieces(child, words_of_child, (first, last), depth=depth + 1)
            start = max(start, last)
        yield _Piece(self._text(start, end))
        yield _Piece(element.after, tag="end")

    def _needs_space(self, left: _Piece, right: _Piece) -> bool:
        """Whether two adjacent pieces, of which one is a preserved part, need a space between them."""
        is_new = left.is_new or right.is_new
        edges = [leaf.copy[i] for leaf, i in ((left.leaf, -1), (right.leaf, 0)) if leaf is not None and leaf.copy]
        if not is_new and any(edge.isalnum() and not is_spaced(edge) for edge in edges):
            return False
        if left.leaf is not None and right.leaf is not None:
            return left.leaf.end != right.leaf.start
        if right.leaf is not None:
            leaf, beside, joined = right.leaf, left.text[-1], _OPENING
            beside_in_source = self.source[: leaf.start][-1:]
        elif left.leaf is not None:
            leaf, beside, joined = left.leaf, right.text[0], _CLOSING
            beside_in_source = self.source[leaf.end :][:1]
        else:
            return False
        if not is_new:  # the preserved part replaces a part of a word, or a comma
            return is_spaced(beside) and not is_spaced(beside_in_source)
        may_touch = beside_in_source.strip() or beside.isspace() or beside in joined
        return (beside.isalnum() and leaf.copy != "") or not may_touch

    def _placed(self, element: Element, word_range: Span, depth: int) -> list[tuple[Span, Element]]:
        """Choose the range of words for each child, in order. The range of a child without words is empty.

        `depth`: index of the children in the words' paths.
        """
        words = self.words[slice(*word_range)]
        owners = [word.path[depth] if depth < len(word.path) else element for word in words]
        n_words = Counter(owners)
        # gain if the span of a child includes a word of another element
        gains = [-1 if word.path[-1].verbatim is None else -math.inf for word in words]
        taken = [False] * len(words)
        spans: dict[Element, Span] = {}
        for child in sorted(element.children, key=lambda child: -n_words[child]):
            if self._is_all(child, element):
                spans[child] = word_range
                break
            if n_words[child]:
                columns = zip(owners, gains, taken, strict=True)
                first, last = _best_run(
                    [-math.inf if used else 1 if owner is child else gain for owner, gain, used in columns]
                )
                taken[first:last] = [True] * (last - first)
                if first < last:
                    spans[child] = word_range[0] + first, word_range[0] + last
        for child in element.children:
            if child not in spans:
                spans[child] = self._point(child, word_range, [span for span in spans.values() if span[0] < span[1]])
        return [(spans[child], child) for child in sorted(element.children, key=spans.__getitem__)]

    def _is_all(self, child: Element, element: Element) -> bool:
        around = self.source[element.start : child.start] + self.source[child.end : element.end]
        return child.end > child.start and not around.strip()

    def _point(self, child: Element, word_range: Span, others: Sequence[Span]) -> Span:
        """The position of a child without words: after the words before it in the source, but not inside `others`."""
        start, end = word_range
        linked = [(w.src, i) for i, w in enumerate(self.words[start:end], start) if w.src is not None]
        before = [(src[1], i + 1) for src, i in linked if src[1] <= child.start]
        after = [(src[0], i) for src, i in linked if src[0] >= child.end]
        point = max(before)[1] if before else min(after)[1] if after else start
        for first, last in others:
            if first < point < last:
                point = last
        return point, point

    def _characters(self, word_range: Span, bounds: Span, child: Element) -> Span:
        """The character span of a child's words. For a child without words, an empty span within `bounds`."""
        (first, last), (least, most) = word_range, bounds
        if first < last:
            return self.words[first].start, self.words[last - 1].end
        starts_word = child.start > 0 and self.source[child.start - 1].isspace()
        point = least
        if first > 0 and self.words[first - 1].end >= least:
            point = self.words[first - 1].end
        if starts_word and first < len(self.words) and self.words[first].start <= most:
            point = self.words[first].start
        point = min(max(point, least), most)
        return point, point

    def _text(self, start: int, end: int) -> str:
        gone = [(w.start, w.end) for w in self.removed if start <= w.start and w.end <= end]
        out = []
        for first, last in sorted(gone):
            out.append(self.target[start:first].rstrip())
            start = last
        return self.escape("".join([*out, self.target[start:end]]))


def _best_run(gains: Sequence[float]) -> Span:
    """Find the span with the largest sum, or an empty span if no sum is positive. Ties: the span that ends first."""
    best, best_run, start, total = 0.0, (0, 0), 0, 0.0
    for i, gain in enumerate(gains):
        if total <= 0:
            start, total = i, 0.0
        total += gain
        if total > best:
            best, best_run = total, (start, i + 1)
    return best_run
