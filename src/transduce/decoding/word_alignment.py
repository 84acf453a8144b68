"""Links between the words of a text and of its translation, for `transduce align`.

Words are separated by white space and counted from 0. Every method links each target word to at most one source word;
`symmetrize` combines these links with the links of a model for the other direction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from transduce.config.settings import Settings
from transduce.data.word_links import WordLink, whitespace_words
from transduce.decoding.alignment import Alignment, Head, Link, guided_head
from transduce.decoding.translator import Translator
from transduce.errors import SettingsError, check_known

Links = Collection[WordLink]
METHODS = ("guided", "leave-out")


def head_of(settings: Settings, method: str) -> Head | None:
    """The trained head of a run for the method `guided`; None for `leave-out`, which uses none.

    Raises `SettingsError` if the method is unknown, or the run has no such head.
    """
    check_known("--method", method, METHODS)
    if method == "leave-out":
        return None
    if (head := guided_head(settings)) is None:
        raise SettingsError("--method guided: the run was not trained with training.guided_alignment; use leave-out")
    return head


def common_method(runs: Iterable[Settings]) -> str:
    """The default method: `guided` if all runs were trained with guided alignment, else `leave-out`."""
    return "guided" if all(map(guided_head, runs)) else "leave-out"


def align_words(
    translator: Translator, srcs: Sequence[str], tgts: Sequence[str], head: Head | None
) -> Iterator[list[WordLink]]:
    """Yield the links of each pair of texts, sorted by the target. A text without words has none.

    `head`: see `head_of`. Raises `DataError` if the numbers of texts differ or a text is too long for the model.
    """
    for alignment, links in translator.alignments(srcs, tgts, head, whitespace_words):
        yield _word_links(alignment, links)


def _word_links(alignment: Alignment, links: Sequence[Link]) -> list[WordLink]:
    """Turn links of character offsets into links of word indices. A group of source words becomes one link per word."""
    src_starts, tgt_starts = ([begin for begin, _ in side.spans] for side in (alignment.src, alignment.tgt))
    return [
        WordLink(src, bisect_left(tgt_starts, link.tgt_start))
        for link in links
        for src in range(bisect_left(src_starts, link.src_start), bisect_left(src_starts, link.src_end))
    ]


def _grow_diag_final_and(forward: Links, backward: Links) -> set[WordLink]:
    """Grow the intersection within the union, then link pairs of words that both have no link (Koehn et al. 2005).

    Growing adds links of the union that are next to a link, also diagonally, if one of their words has no link yet.
    Passes over all links, by source and target, are repeated until no link is added.
    """
    union, links = set(forward) | set(backward), set(forward) & set(backward)
    srcs, tgts = {link.src for link in links}, {link.tgt for link in links}

    def add(link: WordLink) -> None:
        links.add(link)
        srcs.add(link.src)
        tgts.add(link.tgt)

    added = True
    while added:
        added = False
        for src, tgt in sorted(links):
            for step in _NEIGHBOURS:
                link = WordLink(src + step[0], tgt + step[1])
                if link in union and link not in links and not (link.src in srcs and link.tgt in tgts):
                    add(link)
                    added = True
    for direction in (forward, backward):
        for link in sorted(direction):
            if link.src not in srcs and link.tgt not in tgts:
                add(link)
    return links


_NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))

GROW = "grow-diag-final-and"
SYMMETRIZATIONS: dict[str, Callable[[Links, Links], Collection[WordLink]]] = {
    GROW: _grow_diag_final_and,
    "intersection": lambda forward, backward: set(forward) & set(backward),
    "union": lambda forward, backward: set(forward) | set(backward),
}
"""Functions that merge the links of two models. Both are given as links from source to target."""


def check_symmetrization(how: str) -> None:
    """Raise `SettingsError` if `how` is not in SYMMETRIZATIONS."""
    check_known("--symmetrize", how, SYMMETRIZATIONS)


def symmetrize(forward: Links, backward: Links, how: str = GROW) -> list[WordLink]:
    """Merge the links of a model with the links of a model for the opposite direction, whose `src` is our target.

    >>> symmetrize([WordLink(0, 0), WordLink(1, 1)], [WordLink(0, 0), WordLink(2, 1)], "union")
    [WordLink(src=0, tgt=0), WordLink(src=1, tgt=1), WordLink(src=1, tgt=2)]
    """
    check_symmetrization(how)
    return sorted(SYMMETRIZATIONS[how](forward, [WordLink(tgt, src) for src, tgt in backward]))
