"""Word alignments in Pharaoh format, and what they mean for tokens.

Words are separated by white space and counted from 0. A line has the links of one sentence pair: `i-j` links word i of
the source to word j of the target; `i?j` or `ipj` is a possible link (Och and Ney 2003, section 2).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from transduce.data.corpus import Pair
from transduce.data.lines import aligned, content_mark, read_lines
from transduce.data.sources import Source
from transduce.errors import DataError
from transduce.text.special import Span

_LINK = re.compile(r"(\d{1,9})([-?p])(\d{1,9})", re.ASCII)
_WORD = re.compile(r"\S+")


class WordLink(NamedTuple):
    """A word of the source and a word of the target that belong together, counted from 0."""

    src: int
    tgt: int


class GoldLinks(NamedTuple):
    """The links of one pair: the sure ones, and those that are allowed, which include the sure ones."""

    sure: frozenset[WordLink]
    possible: frozenset[WordLink]


def parse_links(line: str) -> GoldLinks:
    """The links of a line. Raises `ValueError` for anything else.

    >>> sorted(parse_links("0-0 1?2").possible)
    [WordLink(src=0, tgt=0), WordLink(src=1, tgt=2)]
    """
    sure, possible = set(), set()
    for text in line.split():
        found = _LINK.fullmatch(text)
        if found is None:
            raise ValueError(f"'{text}' is not a link: expected i-j, or i?j for a possible link, counted from 0")
        link = WordLink(int(found[1]), int(found[3]))
        possible.add(link)
        if found[2] == "-":
            sure.add(link)
    return GoldLinks(frozenset(sure), frozenset(possible))


def format_links(links: Iterable[WordLink]) -> str:
    """A line in Pharaoh format, sorted.

    >>> format_links([WordLink(1, 0), WordLink(0, 0)])
    '0-0 1-0'
    """
    return " ".join(f"{link.src}-{link.tgt}" for link in sorted(links))


def read_links(path: Path | str, srcs: Sequence[str], tgts: Sequence[str]) -> list[GoldLinks]:
    """The links of each pair of texts. `DataError` names a faulty line, or the numbers of lines where they differ."""
    rows = aligned(read_lines(path), zip(srcs, tgts, strict=True), (path, "the text"))
    return [_checked(line, src, tgt, f"{path}, line {number}") for number, line, (src, tgt) in rows]


def with_links(source: Source[Pair], path: Path) -> Source[Pair]:
    """The pairs of a source with the links that a parallel file has for them."""

    def read() -> Iterator[Pair]:
        for number, pair, line in aligned(source.read(), read_lines(path), (source.name, path)):
            _checked(line, pair.src, pair.tgt, f"{path}, line {number}")
            yield pair._replace(links=line)

    return Source(source.name, read, (*source.files, path.name), lambda: mark_with_links(source.mark(), path))


def mark_with_links(mark: bytes, path: Path) -> bytes:
    """The mark of pairs with the links of a file, from that of the pairs."""
    return mark + content_mark(path)


def _checked(line: str, src: str, tgt: str, place: str) -> GoldLinks:
    try:
        links = parse_links(line)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from None
    n_src, n_tgt = len(src.split()), len(tgt.split())
    for i, j in links.possible:
        if i >= n_src or j >= n_tgt:
            raise DataError(f"{place}: link {i}-{j}, but the sides have {n_src} and {n_tgt} words")
    return links


def whitespace_words(text: str, places: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """The word of each token, from the tokens' places in the text, and the place of each word.

    White space belongs to the word after it; at the end of a text it has no word (-1).

    >>> whitespace_words("a cat. ", [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)])
    ([0, 1, 1, 1, -1], [(0, 1), (2, 6)])
    """
    spans = [found.span() for found in _WORD.finditer(text)]
    ends = [end for _, end in spans]
    # By the last character: a token may begin with a character that normalization makes white space.
    lasts = (begin + max(0, len(text[begin:end].rstrip()) - 1) for begin, end in places)
    words = (bisect_right(ends, last) for last in lasts)
    return [word if word < len(spans) else -1 for word in words], spans


def links_of_tokens(
    links: Iterable[WordLink], src_words: Sequence[int], tgt_words: Sequence[int]
) -> list[tuple[int, int]]:
    """Links between tokens: every token of a word with every token of the words that it is linked to.

    A target token without links is linked to the end of the source (token `len(src_words)`), so that a model learns
    which words have no counterpart. Without any links nothing is known of the pair, and there are none.

    >>> links_of_tokens([WordLink(0, 1)], [0, 0], [0, 1])
    [(2, 0), (0, 1), (1, 1)]
    """
    linked = {link.tgt: set[int]() for link in links}
    for link in links:
        linked[link.tgt].add(link.src)
    found = []
    for place, word in enumerate(tgt_words):
        tokens = [i for i, owner in enumerate(src_words) if owner in linked.get(word, ())]
        found += [(i, place) for i in (tokens or [len(src_words)])] if linked else []
    return found
