"""Word alignments in Pharaoh format, and their conversion to links between tokens.

Words are separated by ASCII white space (U+00A0 is inside a word) and counted from 0. A line has the links of one
sentence pair: `i-j` links word i of the source to word j of the target; `i?j` or `ipj` is a possible link (Och and
Ney 2003, section 2).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from transduce.data.lines import aligned, read_lines
from transduce.errors import DataError
from transduce.text.special import Span

_LINK = re.compile(r"(\d{1,9})([-?p])(\d{1,9})", re.ASCII)
_WORD = re.compile(r"[^ \t\n\r\f\v]+")


class WordLink(NamedTuple):
    """The indices of a source word and of the target word that it is aligned with."""

    src: int
    tgt: int


class GoldLinks(NamedTuple):
    """The word links of one sentence pair: sure links, and possible links, which include the sure links."""

    sure: frozenset[WordLink]
    possible: frozenset[WordLink]


def parse_links(line: str) -> GoldLinks:
    """Parse a line in Pharaoh format. Raises `ValueError` for other content.

    >>> sorted(parse_links("0-0 1?2").possible)
    [WordLink(src=0, tgt=0), WordLink(src=1, tgt=2)]
    """
    sure, possible = set(), set()
    for text in line.split():
        match = _LINK.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is not a link: expected i-j, or i?j for a possible link, counted from 0")
        link = WordLink(int(match[1]), int(match[3]))
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldLinks(frozenset(sure), frozenset(possible))


def format_links(links: Iterable[WordLink]) -> str:
    """Format links as a line in Pharaoh format, sorted.

    >>> format_links([WordLink(1, 0), WordLink(0, 0)])
    '0-0 1-0'
    """
    return " ".join(f"{link.src}-{link.tgt}" for link in sorted(links))


def read_links(path: Path | str, srcs: Sequence[str], tgts: Sequence[str]) -> list[GoldLinks]:
    """Read the word links of each pair of texts. Raises `DataError` for a faulty line or a missing line."""
    rows = aligned(read_lines(path), zip(srcs, tgts, strict=True), (path, "the text"))
    return [checked_links(line, src, tgt, f"{path}, line {number}") for number, line, (src, tgt) in rows]


def checked_links(line: str, src: str, tgt: str, place: str) -> GoldLinks:
    """Parse the links of a pair. Raises `DataError`, which begins with `place`, if they do not fit its words."""
    try:
        links = parse_links(line)
    except ValueError as error:
        raise DataError(f"{place}: {error}") from None
    n_src, n_tgt = n_words(src), n_words(tgt)
    for i, j in links.possible:
        if i >= n_src or j >= n_tgt:
            raise DataError(f"{place}: link {i}-{j}, but the sides have {n_src} and {n_tgt} words")
    return links


def n_words(text: str) -> int:
    return len(_WORD.findall(text))


def whitespace_words(text: str, token_spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """Find the words of a text. Returns the index of each token's word, and the span of each word.

    ASCII white space belongs to the word after it. At the end of a text it has no word (-1).

    >>> whitespace_words("a cat. ", [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)])
    ([0, 1, 1, 1, -1], [(0, 1), (2, 6)])
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    ends = [end for _, end in spans]
    # Use the last character: a token may begin with a character that normalization turns into white space.
    lasts = (begin + max(0, len(text[begin:end].rstrip()) - 1) for begin, end in token_spans)
    words = (bisect_right(ends, last) for last in lasts)
    return [word if word < len(spans) else -1 for word in words], spans


def links_of_tokens(
    links: Iterable[WordLink], src_words: Sequence[int], tgt_words: Sequence[int]
) -> list[tuple[int, int]]:
    """Link every token of a word with every token of the words that it is linked to: (source, target) positions.

    A target token without links is linked to the end of the source (token `len(src_words)`), so that a model learns
    which words have no counterpart. Without any `links` the result is empty, since the alignment is unknown.

    >>> links_of_tokens([WordLink(0, 1)], [0, 0], [0, 1])
    [(2, 0), (0, 1), (1, 1)]
    """
    linked = {link.tgt: set[int]() for link in links}
    for link in links:
        linked[link.tgt].add(link.src)
    if not linked:
        return []
    pairs = []
    for j, word in enumerate(tgt_words):
        src_tokens = [i for i, src_word in enumerate(src_words) if src_word in linked.get(word, ())]
        pairs += [(i, j) for i in src_tokens or [len(src_words)]]
    return pairs
