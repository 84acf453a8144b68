"""Which words of a translation belong to which words of its source, for a translation model of any architecture.

Attention weights are a poor guide: which layer and which head align words, and whether at the step that writes a word
or at the next, differs from model to model. What aligns them is how much less likely each word of the translation is
without each word of the source (prediction difference; Li et al. 2019, On the Word Alignment from Neural Machine
Translation, section 4). It takes one pass of scoring per word of the source. Where a head was trained to align
(`training.guided_alignment`), its weights are the links, and one pass is enough.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import Settings
from transduce.data.examples import Example
from transduce.decoding.engine import Engine
from transduce.decoding.results import Translation
from transduce.text.scripts import script
from transduce.text.special import Span, Vocabulary
from transduce.text.tokenizer import Tokenizers

MOST_UNITS = 64
"""Words of a source that are left out one by one; of longer ones, neighbouring words are left out together."""

_SPACELESS = ("Han", "Kana", "Thai", "Lao", "Khmer", "Myanmar")
_SMOOTHING = 0.5  # nats
_LEAST = 0.05  # nats by which a word must become less likely to be linked


WordRule = Callable[[str, Sequence[Span]], tuple[list[int], list[Span]]]
"""From a text and the places of its tokens: the word of each token (-1: none), and the place of each word."""


class Link(NamedTuple):
    """A word of the target and the word of the source that it translates, as character offsets."""

    src_start: int
    src_end: int
    tgt_start: int
    tgt_end: int


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of cross-attention whose average aligns, given as (decoder layer, head), from 0.

    reads: by the step that reads a token, for which guided alignment trains a head, since it knows what it aligns; if
    false by the one that writes it (Chen et al. 2020, Accurate Word Alignment Induction from Neural Machine
    Translation, section 3.2).
    """

    heads: tuple[tuple[int, int], ...]
    reads: bool

    def rows(self, weights: np.ndarray) -> np.ndarray:
        """The average row of each target token, from weights [heads, target tokens + 1, source tokens + 1]."""
        average: np.ndarray = weights.mean(axis=0)
        return average[1:] if self.reads else average[:-1]


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A text as tokens and words. owners: the word of each token, -1 for white space; spans: of the words."""

    ids: list[int]
    owners: list[int]
    spans: list[Span]

    @classmethod
    def read(cls, text: str, vocabulary: Vocabulary, words: WordRule) -> _Sentence:
        ids, places = vocabulary.encode_with_offsets(text)
        return cls(ids, *words(text, places))

    def groups(self, most: int) -> list[range]:
        """The words, neighbouring ones together where there are more than `most`."""
        size = -(-len(self.spans) // most)
        return [range(i, min(i + size, len(self.spans))) for i in range(0, len(self.spans), size or 1)]

    def without(self, words: Sequence[int]) -> list[int]:
        return [token for token, owner in zip(self.ids, self.owners, strict=True) if owner not in words]


@dataclass(frozen=True, slots=True)
class Alignment:
    """A source and its translation, whose links follow from the scores of `pairs`, or from the weights of heads.

    attention: the rows [target tokens, source tokens + 1] of the trained head that the search has kept, if any.
    """

    src_text: str
    tgt_text: str
    src: _Sentence
    tgt: _Sentence
    attention: np.ndarray | None = None

    @classmethod
    def read(cls, tokenizers: Tokenizers, src: str, tgt: str | Translation, words: WordRule | None = None) -> Alignment:
        """Tokenize both texts. `words`: what a word is (default: `words_of_tokens`)."""
        words = words or words_of_tokens
        text = tgt if isinstance(tgt, str) else tgt.text
        sides = _Sentence.read(src, tokenizers.src, words), _Sentence.read(text, tokenizers.tgt, words)
        return cls(src, text, *sides, None if isinstance(tgt, str) else _kept_attention(*sides, tgt))

    def pairs(self) -> list[Example]:
        """Pairs to score: the source, then the source without each of its words. Empty if a side has no words."""
        if not (self.src.spans and self.tgt.spans):
            return []
        sources = (self.src.ids, *map(self.src.without, self.src.groups(MOST_UNITS)))
        return [Example(ids, self.tgt.ids) for ids in sources]

    def links_of_head(self, weights: np.ndarray) -> list[Link]:
        """The links, by their place in the target, from the attention [target tokens, source tokens + 1] of a head.

        A word is linked to the word with most of the attention of its tokens, or to none if that is the end of the
        source, the last column.
        """
        if not (self.src.spans and self.tgt.spans):
            return []
        shares = word_weights(weights, self.src.owners, self.tgt.owners)
        best = enumerate(shares.argmax(axis=1))
        n_src = len(self.src.spans)
        linked = [(int(i), j) for j, i in best if i < n_src and shares[j, i] > 0]
        return [Link(*self.src.spans[i], *self.tgt.spans[j]) for i, j in linked]

    def links(self, scores: Sequence[Sequence[float]]) -> list[Link]:
        """The links, by their place in the target, from the log-probabilities of `pairs`."""
        links = _links(self.src, self.tgt, scores) if scores else []
        if not links:
            return []
        src, tgt = self.src.spans[-1], self.tgt.spans[-1]
        if all(map(_is_sign, self.src_text[slice(*src)] + self.tgt_text[slice(*tgt)])):
            # A sentence ends with a sign even if its source lacks one, so that the source's changes little.
            links = [link for link in links if link[2:] != tgt] + [Link(*src, *tgt)]
        return links


def _kept_attention(src: _Sentence, tgt: _Sentence, found: Translation) -> np.ndarray | None:
    """The attention of a translation, unless it has other tokens than its text or is of another source."""
    best = found.candidates[0]
    if best.attention is None or best.attention.shape != (len(tgt.ids), len(src.ids) + 1) or best.ids != tuple(tgt.ids):
        return None
    return best.attention


def guided_head(settings: Settings) -> tuple[int, int] | None:
    """The decoder layer and head of a run that were trained with `training.guided_alignment`; None without that."""
    model, path = settings.model, settings.training.guided_alignment
    return model.guided_head if isinstance(model, TransformerSettings) and path is not None else None


def find_links(engine: Engine, pairs: Sequence[Alignment], heads: Heads | None) -> list[list[Link]]:
    """The links of each pair by the attention of heads, or, without heads, by leaving out words of the source."""
    if heads is None:
        examples = [one.pairs() for one in pairs]
        return [one.links(engine.score(x) if x else []) for one, x in zip(pairs, examples, strict=True)]
    others = [Example(one.src.ids, one.tgt.ids) for one in pairs if one.attention is None]
    rows = map(heads.rows, engine.attention(others, heads.heads) if others else ())
    return [one.links_of_head(next(rows) if one.attention is None else one.attention) for one in pairs]


def _links(src: _Sentence, tgt: _Sentence, known: Sequence[Sequence[float]]) -> list[Link]:
    groups = src.groups(MOST_UNITS)
    scores = np.array(known)[:, :-1]  # without the end
    losses = np.zeros((len(tgt.spans), len(groups)))  # [target words, groups of source words]
    for token, owner in enumerate(tgt.owners):
        if owner >= 0:
            losses[owner] += scores[0, token] - scores[1:, token]
    losses = np.maximum(losses, 0.0)
    # Some words make everything more likely, such as verbs; divided by what it does to all, each counts the same.
    shares = losses / (np.linalg.norm(losses, axis=0) + _SMOOTHING)
    links = []
    for word, group in enumerate(shares.argmax(axis=1)):
        if losses[word, group] >= _LEAST:
            first, last = groups[group][0], groups[group][-1]
            links.append(Link(src.spans[first][0], src.spans[last][1], *tgt.spans[word]))
    return links


def word_weights(weights: np.ndarray, src_owners: Sequence[int], tgt_owners: Sequence[int]) -> np.ndarray:
    """Sum weights of tokens [target tokens, source tokens + 1] over the tokens of words.

    Returns [target words, source words + 1]; the last column is that of the end and of what belongs to no word.
    """
    n_src, n_tgt = max(src_owners, default=-1) + 1, max(tgt_owners, default=-1) + 1
    columns = np.array([i if i >= 0 else n_src for i in (*src_owners, n_src)])
    found = np.zeros((n_tgt + 1, n_src + 1))
    np.add.at(found, (np.array(tgt_owners, dtype=int)[:, None], columns[None]), weights)
    return found[:-1]


def joined_links(first: Sequence[Link], second: Sequence[Link]) -> list[Link]:
    """Links by way of a third language: from the source of `first` to the target of `second`.

    >>> joined_links([Link(0, 2, 4, 6)], [Link(3, 5, 7, 9), Link(8, 9, 0, 1)])
    [Link(src_start=0, src_end=2, tgt_start=7, tgt_end=9)]
    """
    return [
        Link(one.src_start, one.src_end, two.tgt_start, two.tgt_end)
        for two in second
        for one in first
        if one.tgt_start < two.src_end and two.src_start < one.tgt_end
    ]


def words_of_tokens(text: str, places: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """The word of each token, from the tokens' places in the text, and the place of each word.

    Words end at spaces, and before and after punctuation; what a token joins is one word. In scripts without spaces
    between words, each token is a word. White space belongs to the word after it; tokens of a text without words have
    none (-1).

    >>> words_of_tokens("a cat.", [(0, 1), (1, 3), (3, 5), (5, 6)])
    ([0, 1, 1, 2], [(0, 1), (2, 5), (5, 6)])
    """
    owners: list[int] = []
    spans: list[Span] = []
    for begin, end in places:
        start = _skip_space(text, begin)
        if start < len(text) and (not spans or (start > spans[-1][0] and _begins_word(text, start))):
            spans.append((start, start))
        if spans:
            last = spans[-1][0]
            spans[-1] = last, max(spans[-1][1], last + len(text[last:end].rstrip()))
        owners.append(len(spans) - 1)
    return owners, spans


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _begins_word(text: str, place: int) -> bool:
    """Whether a word begins at the character at this place, which is not the first."""
    before, here = text[place - 1], text[place]
    if before.isspace() or script(before) in _SPACELESS or script(here) in _SPACELESS:
        return True
    joins = before in "'’" or (here in "'’" and text[place + 1 : place + 2].isalpha())
    return not joins and (_is_sign(before) or _is_sign(here))


def _is_sign(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS" and character != "_"
