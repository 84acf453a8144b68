"""Carry the inline tags of a text over to its translation, and parts that must stay as they are.

Each element becomes one stretch of the translation: the one that has the most words that translate its own, and the
fewest others. Elements keep their nesting whatever the alignment, so that the result is well-formed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby, islice
from operator import attrgetter, itemgetter
from typing import Literal

from transduce.serving.tags.protected import OTHER, forms_of
from transduce.text.scripts import is_spaced
from transduce.text.special import Span

MOST_PARTS = 100
"""Parts of a text that are kept; others are translated like any text."""

_OPENING = "([{<«„“‘¿¡'\""  # what follows touches these
_CLOSING = ".,;:!?)]}>»”’…%。，、；：！？'\""  # what precedes touches these


@dataclass(slots=True, eq=False)
class Element:
    """A part of a text: an inline element, or what stays as it is.

    start, end: Its place in the text.
    before, after: Its tags.
    verbatim: What replaces its words, if they are not translated.
    copy: The same as plain text, which the translation may have already.
    children: The elements inside, in order.
    """

    start: int
    end: int
    before: str = ""
    after: str = ""
    verbatim: str | None = None
    copy: str = ""
    children: list[Element] = field(default_factory=list)

    def leaves(self) -> Iterator[Element]:
        """The parts inside that stay as they are."""
        for child in self.children:
            if child.verbatim is not None:
                yield child
            yield from child.leaves()

    def path_to(self, place: float) -> list[Element]:
        """The element and those inside it that contain a place of the text, outermost first."""
        path = [self]
        while inside := [child for child in path[-1].children if child.start <= place < child.end]:
            path.append(inside[0])
        return path

    def keep(self, parts: Iterable[tuple[int, int, str]], escape: Callable[[str], str]) -> None:
        """Keep parts of the text, given by their places and what replaces them; at most `MOST_PARTS`."""
        for start, end, copy in islice(parts, MOST_PARTS):
            self._insert(Element(start, end, verbatim=escape(copy), copy=copy))

    def _insert(self, part: Element) -> None:
        """Add a part, unless it is inside another one that stays, or crosses the borders of elements."""
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
    """A word of the translation: its place, and that of its source if that is known, in the sentence's `number`."""

    start: int
    end: int
    src: Span | None
    number: int
    path: list[Element] = field(default_factory=list)


def words_of(text: str, links: Sequence[tuple[int, int, int, int]], *, src: int, tgt: int, number: int) -> list[Word]:
    """All words of a translated sentence, which begins at `tgt` and whose source begins at `src`."""
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
    """The translation with the elements of the source.

    Args:
        root: The whole source.
        source: Its text.
        target: The translation's text.
        words: The words of the translation, in order.
        sentences: Where the sentences of the source are.
        escape: What the text becomes in the result.
    """
    words, removed = _claim(root, source, target, words)
    _find_paths(root, words, sentences)
    return _Projection(source, target, words, removed, escape).write(root)


def _claim(root: Element, source: str, target: str, words: Sequence[Word]) -> tuple[list[Word], set[Word]]:
    """Words of which those that are copies of parts that stay are whole, and all these copies.

    The text of copies is left out: the parts themselves are written once.
    """
    words, removed = list(words), set[Word]()
    leaves: dict[str, list[Element]] = {}
    for leaf in root.leaves():
        leaves.setdefault(leaf.copy, []).append(leaf)
    n_leaves = {copy: len(found) for copy, found in leaves.items()}
    copies = sorted(filter(str.strip, leaves), key=len, reverse=True)
    forms = [(rank, copy, form) for copy in copies for rank, form in enumerate(forms_of(copy))]
    for rank, copy, form in sorted(forms, key=itemgetter(0)):
        there = {m.span(): _overlapping(words, m.span()) for m in re.finditer(form, target)}
        free = {span: [w.src for w in some if w.src] for span, some in there.items() if not any(w.path for w in some)}
        for leaf in list(leaves[copy]):
            best = max(free, key=partial(_n_linked, free, leaf), default=None)
            if best is not None and (rank < OTHER or _n_linked(free, leaf, best)):
                del free[best]
                leaves[copy].remove(leaf)
                words, one = _merged(words, best, leaf)
                removed.add(one)
        # A word may well be there for another reason.
        if not rank and not copy.isalnum() and source.count(copy) == n_leaves[copy]:
            for span in free:
                words, one = _merged(words, span, root)
                removed.add(one)
    return words, removed


def _overlapping(words: Sequence[Word], span: Span) -> Sequence[Word]:
    return words[bisect_right(words, span[0], key=lambda w: w.end) : bisect_left(words, span[1], key=lambda w: w.start)]


def _n_linked(sources: Mapping[Span, Sequence[Span]], leaf: Element, span: Span) -> int:
    return sum(leaf.start < last and first < leaf.end for first, last in sources[span])


def _merged(words: Sequence[Word], span: Span, owner: Element) -> tuple[list[Word], Word]:
    """The words with one at `span`, which belongs to the element, and that one; others are cut there."""
    here = _overlapping(words, span)
    one = Word(*span, None, here[0].number if here else 0, [owner])
    before = [w for w in words if w.start < span[0]]
    after = [w for w in words if w.end > span[1]]
    cut = [replace(w, end=min(w.end, span[0])) if w.end > span[0] else w for w in before]
    rest = [replace(w, start=max(w.start, span[1])) if w.start < span[1] else w for w in after]
    return [*cut, one, *rest], one


def _find_paths(root: Element, words: Sequence[Word], sentences: Sequence[Span]) -> None:
    """Give each word the elements that it belongs to, outermost first.

    A word whose source is unknown belongs where both its neighbours do; at the ends of a sentence, to what the whole
    sentence belongs to.
    """
    claimed = {word.path[0] for word in words if word.path}
    for word in words:
        owner = word.path[0] if word.path else None
        if owner is not None and owner is not root:
            word.path = root.path_to((owner.start + owner.end - 1) / 2)
        elif owner is None and word.src is not None:
            path = root.path_to((word.src[0] + word.src[1] - 1) / 2)
            word.path = path[:-1] if path[-1] in claimed else path
    for number, group in groupby(words, key=attrgetter("number")):
        here, (start, end) = list(group), sentences[number]
        whole = _shared(root.path_to(start), root.path_to(max(start, end - 1)))
        paths = [word.path for word in here]
        before = accumulate(paths, _last_known, initial=whole)
        after = [*accumulate(paths[::-1], _last_known, initial=whole)][-2::-1]
        for word, *known in zip(here, before, after, strict=False):
            if not word.path:
                word.path = _shared(*known)
                while word.path[-1].verbatim is not None:
                    word.path.pop()


def _last_known(path: list[Element], other: list[Element]) -> list[Element]:
    return other or path


def _shared(one: Sequence[Element], other: Sequence[Element]) -> list[Element]:
    return [a for a, b in zip(one, other, strict=False) if a is b]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the result: text, a tag, or a part that stays. is_new: it replaces no words of the translation."""

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
        """The translation; parts that were put between its words get the spaces that they need."""
        out = list[str]()
        spot, last = 0, _Piece("")  # where a space goes: behind the tags that end after the last text
        for piece in self._pieces(root, (0, len(self.words)), (0, len(self.target))):
            if piece.text and not piece.tag:
                if last.text and self._needs_space(last, piece):
                    out.insert(spot, " ")
                last = piece
            out.append(piece.text)
            if piece.text and piece.tag != "start":
                spot = len(out)
        return "".join(out)

    def _pieces(self, element: Element, here: Span, place: Span, *, depth: int = 0) -> Iterator[_Piece]:
        """An element, inside `depth` others, that has these words, and these characters of the target."""
        if element.verbatim is not None:
            yield _Piece(element.verbatim, leaf=element, is_new=place[0] == place[1])
            return
        yield _Piece(element.before, tag="start")
        end = place[0]
        for inside, child in self._placed(element, here, depth + 1):
            first, last = self._characters(inside, place, child)
            yield _Piece(self._text(end, first))
            yield from self._pieces(child, inside, (first, last), depth=depth + 1)
            end = max(end, last)
        yield _Piece(self._text(end, place[1]))
        yield _Piece(element.after, tag="end")

    def _needs_space(self, one: _Piece, two: _Piece) -> bool:
        """Whether a part that stays touches what should be apart from it."""
        is_new = one.is_new or two.is_new
        edges = [leaf.copy[place] for leaf, place in ((one.leaf, -1), (two.leaf, 0)) if leaf is not None and leaf.copy]
        if not is_new and any(edge.isalnum() and not is_spaced(edge) for edge in edges):
            return False
        if one.leaf is not None and two.leaf is not None:
            return one.leaf.end != two.leaf.start
        if two.leaf is not None:
            here, there, joined = one.text[-1], self.source[: two.leaf.start][-1:], _OPENING
        elif one.leaf is not None:
            here, there, joined = two.text[0], self.source[one.leaf.end :][:1], _CLOSING
        else:
            return False
        if not is_new:  # it replaces a part of a word, or a comma
            return is_spaced(here) and not is_spaced(there)
        return here.isalnum() or not (there.strip() or here.isspace() or here in joined)

    def _placed(self, element: Element, here: Span, depth: int) -> list[tuple[Span, Element]]:
        """The words of each child, in the order of the target; a child without words is between two.

        `depth`: place of the children in the words' paths.
        """
        words = self.words[slice(*here)]
        owners = [word.path[depth] if depth < len(word.path) else element for word in words]
        n_words = Counter(owners)
        gains = [-1 if word.path[-1].verbatim is None else -math.inf for word in words]  # of words of other elements
        taken = [False] * len(words)
        spans: dict[Element, Span] = {}
        for child in sorted(element.children, key=lambda child: -n_words[child]):
            if self._is_all(child, element):
                spans[child] = here
                break
            if n_words[child]:
                known = zip(owners, gains, taken, strict=True)
                first, last = _best_run(
                    [-math.inf if used else 1 if owner is child else gain for owner, gain, used in known]
                )
                taken[first:last] = [True] * (last - first)
                if first < last:
                    spans[child] = here[0] + first, here[0] + last
        for child in element.children:
            if child not in spans:
                spans[child] = self._point(child, here, [span for span in spans.values() if span[0] < span[1]])
        return [(spans[child], child) for child in sorted(element.children, key=spans.__getitem__)]

    def _is_all(self, child: Element, element: Element) -> bool:
        around = self.source[element.start : child.start] + self.source[child.end : element.end]
        return child.end > child.start and not around.strip()

    def _point(self, child: Element, here: Span, others: Sequence[Span]) -> Span:
        """Between which words a child without words goes: behind what is before it in the source, outside others."""
        known = [(w.src, i) for i, w in enumerate(self.words[slice(*here)], here[0]) if w.src is not None]
        before = [(src[1], i + 1) for src, i in known if src[1] <= child.start]
        after = [(src[0], i) for src, i in known if src[0] >= child.end]
        place = max(before)[1] if before else min(after)[1] if after else here[0]
        for first, last in others:
            if first < place < last:
                place = last
        return place, place

    def _characters(self, inside: Span, place: Span, child: Element) -> Span:
        """The span of these words in the target."""
        if inside[0] < inside[1]:
            return self.words[inside[0]].start, self.words[inside[1] - 1].end
        starts_word = child.start > 0 and self.source[child.start - 1].isspace()
        at = place[0]
        if inside[0] > 0 and self.words[inside[0] - 1].end >= place[0]:
            at = self.words[inside[0] - 1].end
        if (starts_word or at < place[0]) and inside[0] < len(self.words) and self.words[inside[0]].start <= place[1]:
            at = self.words[inside[0]].start
        return (min(max(at, place[0]), place[1]),) * 2

    def _text(self, start: int, end: int) -> str:
        gone = [(w.start, w.end) for w in self.removed if start <= w.start and w.end <= end]
        out = []
        for first, last in sorted(gone):
            out.append(self.target[start:first].rstrip())
            start = last
        return self.escape("".join([*out, self.target[start:end]]))


def _best_run(gains: Sequence[float]) -> Span:
    """The stretch with the largest sum, the first of the longest."""
    best, found, start, total = 0.0, (0, 0), 0, 0.0
    for i, gain in enumerate(gains):
        if total <= 0:
            start, total = i, 0.0
        total += gain
        if total > best:
            best, found = total, (start, i + 1)
    return found
