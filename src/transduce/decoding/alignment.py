"""Word alignment of a translation with its source, for a translation model of any architecture.

Attention weights are a poor guide: the layer and the head that align words, and whether they align a word at the step
that predicts it or at the next step, differ from model to model. Words are linked by prediction difference instead: how
much less probable each target word becomes without each source word (Li et al. 2019, On the Word Alignment from Neural
Machine Translation, section 4). This takes one scoring pass per source word. If a head was trained to align
(`training.guided_alignment`), its weights give the links in a single pass.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import Settings
from transduce.data.store import Example
from transduce.decoding.engine import Engine
from transduce.decoding.results import Translation
from transduce.text.languages import script
from transduce.text.placeholders import Masked, encode_masked
from transduce.text.special import Span, Vocabulary
from transduce.text.tokenizer import Tokenizers

MOST_UNITS = 64
"""Maximum number of groups of source words; each group is left out once. Long sources have groups of several words."""

_SPACELESS = ("Han", "Kana", "Thai", "Lao", "Khmer", "Myanmar")
_SMOOTHING = 0.5  # nats
_LEAST = 0.05  # nats by which a word must become less probable to be linked


WordRule = Callable[[str, Sequence[Span]], tuple[list[int], list[Span]]]
"""Maps a text and its tokens' spans (start, end) to each token's word index (-1 for none) and each word's span."""


Head = tuple[int, int]
"""Indices (decoder layer, head) of a head of cross-attention, both from 0."""


class Link(NamedTuple):
    """A target word and the source word that it translates, as character offsets (start, end) in the texts."""

    src_start: int
    src_end: int
    tgt_start: int
    tgt_end: int


@dataclass(frozen=True, slots=True)
class _Sentence:
    """A text as tokens and words.

    owners: Index of each token's word; -1 for white space and language tokens. spans: Start and end of each word.
    """

    ids: list[int]
    owners: list[int]
    spans: list[Span]

    @classmethod
    def read(cls, text: str, masked: Masked, vocabulary: Vocabulary, words: WordRule) -> _Sentence:
        ids, token_spans = encode_masked(vocabulary, masked)
        n_frame = vocabulary.n_frame(ids)
        owners, spans = words(text, token_spans[n_frame:])
        return cls(ids, [-1] * n_frame + owners, spans)

    def groups(self) -> list[range]:
        """Split the word indices into at most `MOST_UNITS` groups of neighbours."""
        size = -(-len(self.spans) // MOST_UNITS)
        return [range(i, min(i + size, len(self.spans))) for i in range(0, len(self.spans), size or 1)]

    def without(self, words: Sequence[int]) -> list[int]:
        return [token for token, owner in zip(self.ids, self.owners, strict=True) if owner not in words]


@dataclass(frozen=True, slots=True)
class Alignment:
    """A tokenized source and its translation. `links` and `links_of_head` pair their words.

    attention: Weights [target tokens, source tokens and the end of the source] of the head that was trained to align;
        None if the search stored none.
    """

    src_text: str
    tgt_text: str
    src: _Sentence
    tgt: _Sentence
    attention: np.ndarray | None = None

    @classmethod
    def read(cls, tokenizers: Tokenizers, src: str, tgt: str | Translation, words: WordRule | None = None) -> Alignment:
        """Tokenize both texts. `words`: splits tokens into words (default: `words_of_tokens`)."""
        words = words or words_of_tokens
        text = tgt if isinstance(tgt, str) else tgt.text
        src_masked, tgt_masked = tokenizers.masked(src, text, tokenizers.src.encode(src))
        source = _Sentence.read(src, src_masked, tokenizers.src, words)
        target = _Sentence.read(text, tgt_masked, tokenizers.tgt, words)
        best = None if isinstance(tgt, str) else tgt.candidates[0]
        attention = None if best is None or best.ids != tuple(target.ids) else best.attention
        if attention is not None and attention.shape != (len(target.ids), len(source.ids) + 1):
            attention = None  # it belongs to other tokens
        return cls(src, text, source, target, attention)

    def pairs(self) -> list[Example]:
        """Pairs to score: the full source, then the source without each group of words. Empty if a side has no word."""
        if not (self.src.spans and self.tgt.spans):
            return []
        sources = (self.src.ids, *map(self.src.without, self.src.groups()))
        return [Example(ids, self.tgt.ids) for ids in sources]

    def links_of_head(self, weights: np.ndarray) -> list[Link]:
        """Link words by the attention weights [target tokens, source tokens + 1] of a head; links are in target order.

        A target word is linked to the source word that gets most of the attention of its tokens. It has no link if the
        last column, the end of the source, gets most.
        """
        if not (self.src.spans and self.tgt.spans):
            return []
        shares = word_weights(weights, self.src.owners, self.tgt.owners)
        best = enumerate(shares.argmax(axis=1))
        n_src = len(self.src.spans)
        linked = [(int(i), j) for j, i in best if i < n_src and shares[j, i] > 0]
        return [Link(*self.src.spans[i], *self.tgt.spans[j]) for i, j in linked]

    def links(self, scores: Sequence[Sequence[float]]) -> list[Link]:
        """Link words in target order. `scores`: the engine's token log-probabilities for `pairs`."""
        if not scores:
            return []
        groups = self.src.groups()
        token_scores = np.array(scores)[:, :-1]  # without the end
        losses = np.zeros((len(self.tgt.spans), len(groups)))  # [target words, groups of source words]
        for token, owner in enumerate(self.tgt.owners):
            if owner >= 0:
                losses[owner] += token_scores[0, token] - token_scores[1:, token]
        losses = np.maximum(losses, 0.0)
        # Some source words, such as verbs, make all target words more probable: normalize the effect of each.
        shares = losses / (np.linalg.norm(losses, axis=0) + _SMOOTHING)
        links = []
        for word, group in enumerate(shares.argmax(axis=1)):
            if losses[word, group] >= _LEAST:
                first, last = groups[group][0], groups[group][-1]
                links.append(Link(self.src.spans[first][0], self.src.spans[last][1], *self.tgt.spans[word]))
        if not links:
            return []
        src, tgt = self.src.spans[-1], self.tgt.spans[-1]
        if all(map(_is_sign, self.src_text[slice(*src)] + self.tgt_text[slice(*tgt)])):
            # A translation ends with a punctuation mark even if its source lacks one, so leaving out the source's mark
            # changes little.
            links = [link for link in links if link[2:] != tgt] + [Link(*src, *tgt)]
        return links


def guided_head(settings: Settings) -> Head | None:
    """The head trained to align (`training.guided_alignment`); None without that setting."""
    model, path = settings.model, settings.training.guided_alignment
    return model.guided_head if isinstance(model, TransformerSettings) and path is not None else None


def find_links(engine: Engine, pairs: Sequence[Alignment], head: Head | None) -> list[list[Link]]:
    """Link the words of each pair by the attention of a trained head or, without one, by leaving out source words.

    With a trained head, a token's links come from the step that reads the token, as in training.
    """
    if head is None:
        return [pair.links(engine.score(examples) if (examples := pair.pairs()) else []) for pair in pairs]
    without = [Example(pair.src.ids, pair.tgt.ids) for pair in pairs if pair.attention is None]
    weights = iter(engine.attention(without, [head]) if without else ())
    return [pair.links_of_head(next(weights)[0, 1:] if pair.attention is None else pair.attention) for pair in pairs]


def word_weights(weights: np.ndarray, src_owners: Sequence[int], tgt_owners: Sequence[int]) -> np.ndarray:
    """Sum attention weights [target tokens, source tokens + 1] over the tokens of each word.

    Returns [target words, source words + 1]; the last column is for the end and for tokens that belong to no word.
    """
    n_src, n_tgt = max(src_owners, default=-1) + 1, max(tgt_owners, default=-1) + 1
    columns = np.array([i if i >= 0 else n_src for i in (*src_owners, n_src)])
    sums = np.zeros((n_tgt + 1, n_src + 1))
    np.add.at(sums, (np.array(tgt_owners, dtype=int)[:, None], columns[None]), weights)
    return sums[:-1]


def joined_links(first: Sequence[Link], second: Sequence[Link]) -> list[Link]:
    """Compose links through a third language: from the source of `first` to the target of `second`.

    >>> joined_links([Link(0, 2, 4, 6)], [Link(3, 5, 7, 9), Link(8, 9, 0, 1)])
    [Link(src_start=0, src_end=2, tgt_start=7, tgt_end=9)]
    """
    return [
        Link(a.src_start, a.src_end, b.tgt_start, b.tgt_end)
        for b in second
        for a in first
        if a.tgt_start < b.src_end and b.src_start < a.tgt_end
    ]


def words_of_tokens(text: str, tokens: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """Split tokens into words; return each token's word index, and each word's span in the text.

    Words end at spaces, and before and after punctuation, but not within a token. In scripts without spaces between
    words, each token is a word. White space belongs to the word after it. In a text without words every index is -1.

    >>> words_of_tokens("a cat.", [(0, 1), (1, 3), (3, 5), (5, 6)])
    ([0, 1, 1, 2], [(0, 1), (2, 5), (5, 6)])
    """
    owners: list[int] = []
    spans: list[Span] = []
    for begin, end in tokens:
        start = _skip_space(text, begin)
        if start < len(text) and (not spans or (start > spans[-1][0] and _begins_word(text, start))):
            spans.append((start, start))
        if spans:
            last = spans[-1][0]
            spans[-1] = last, max(spans[-1][1], last + len(text[last:end].rstrip()))
        owners.append(len(spans) - 1)
    return owners, spans


def _skip_space(text: str, index: int) -> int:
    while index < len(text) and text[index].isspace():
        index += 1
    return index


def _begins_word(text: str, index: int) -> bool:
    """Whether a word begins at this character, which is not the first of the text."""
    before, here = text[index - 1], text[index]
    if before.isspace() or script(before) in _SPACELESS or script(here) in _SPACELESS:
        return True
    joins = before in "'’" or (here in "'’" and text[index + 1 : index + 2].isalpha())
    return not joins and (_is_sign(before) or _is_sign(here))


def _is_sign(character: str) -> bool:
    return unicodedata.category(character)[0] in "PS" and character != "_"
