"""Find the parts of a sentence that a model cannot read or would misread: words, numbers, code and symbols."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from transduce.text.languages import (
    CODE,
    ENTITY,
    FINAL_SIGNS,
    IN_TOKEN,
    INLINE,
    LETTER,
    LONG_WORD,
    WHOLE,
    is_inside_syllable,
    is_other_sign,
    is_spaced,
    is_without_spaces,
    spells_words_without_spaces,
)
from transduce.text.special import SPACE, Span, Vocabulary, bare

_INSIDE_WORDS = "-.@_/,:'’+&"
_TECHNICAL = "%$#&@\\/:=<>{}|^~_*+?"
_TECHNICAL_STARTS = "%$#@{<\\"
_TAG = re.compile(r"</?[A-Za-z][\w:-]*(?:\s+[\w:-]+=(?:\"[^\"<>]*\"|'[^'<>]*'|[^\s\"'<>]+))*\s*/?>" + f"|{INLINE}")
_TOKEN = re.compile(f"{IN_TOKEN}+")
_ARGUMENTS = re.compile(rf"\((?:(?![()]){IN_TOKEN}){{0,100}}\)")
_EMPHASIS = re.compile(r"(?<!\w)(_{1,3})(?![\s_])(?:[^_\n]|(?<=\w)_(?=\w)){1,300}?(?<!\s)(\1)(?!\w|\.\w|\()")
"""Words between underscores, as in Markdown's emphasis, but not names such as __init__.py."""
_LONGEST_UNSPACED = 20
"""Maximum letters of a word in a script without spaces between words."""
_SPACES = re.compile(r"[\s\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]*")
"""Spaces, and characters without a width."""
_VARIATION = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Variation selectors, which modify the character before them."""
_DOT_AND_SPACES = re.compile(rf"\.?{_SPACES.pattern}")
CONTROLS = r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
_ZERO_WIDTH = re.compile(f"[{CONTROLS}\u061c\u200b\u200e\u200f\ufeff]")
"""Zero-width characters that the normalization nmt_nfkc drops or replaces by spaces. The zero-width non-joiner is left
out, because a space is a common spelling of it.
"""
OPENING, CLOSING = ("Ps", "Pi"), ("Pe", "Pf")  # categories of brackets and quotation marks
_BETWEEN_WORDS = ("Pd", "Sm", "So", *OPENING, *CLOSING)
APOSTROPHES = "'’‘ʼ´`"
_END_OF_QUOTE = re.compile(rf"(?<=\S)[{APOSTROPHES}](?!\w)")
_BEGIN_OF_QUOTE = re.compile(rf"(?<!\S)[{APOSTROPHES}]")
_UNUSUAL = re.compile(
    rf"{CODE}|!?\[(?=[^][\n]{{1,500}}\]\([^\s()])|(?P<run>[{FINAL_SIGNS}]{{2,}}|[…‥]|(?P<sign>[^\w\s])(?P=sign)+)"
    rf"|[{SPACE}\ufffd]|(?<!\S)(?P<first>[^\w\s])(?=\s|{LETTER}|$)|{LONG_WORD}"
)
"""Parts that a model may misread although their characters are known: code; Markdown links; runs of symbols; symbols
that stand alone or begin a word; U+2581 and U+FFFD, which SentencePiece takes for spaces; and strings that are too long
to be a word.
"""
_MAY_BE_UNUSUAL = re.compile(rf"[^\w\s]{{2}}|(?<!\S)[^\w\s]|[`…‥{{&\x1b{SPACE}\ufffd]"), re.compile(r"\S{101}")
_SIGN = re.compile(r"[^\s…‥]")
_SMALL = 1024
"""A vocabulary with fewer pieces may have none for a space plus a symbol, even if the symbol often begins words."""


def unreadable_spans(text: str, vocabulary: Vocabulary, ids: Sequence[int] | np.ndarray) -> list[Span]:
    """Spans of words that the vocabulary cannot read, and of other parts that the model would misread.

    In Chinese and Japanese, a span has only unreadable characters. See `_unspaced_word` for other scripts without
    spaces. Spans with only spaces between them are joined. `ids`: the ids of the text.
    """
    spans = list[Span]()
    if not vocabulary.unreadable_ids.isdisjoint(ids):
        spans = vocabulary.unreadable(text)
    if vocabulary.has_placeholders:
        if any(pattern.search(text) for pattern in _MAY_BE_UNUSUAL):  # a fast first test
            spans += _misread_spans(text, vocabulary)
        if not text.isprintable():
            invisible = (m for m in _ZERO_WIDTH.finditer(text) if not _is_word_border(text, m.start()))
            spans += [m.span() for m in invisible if vocabulary.rewritten(m[0])]
        if not unicodedata.is_normalized("NFKC", text):
            spans += [m.span() for m in _SIGN.finditer(text) if is_other_sign(m[0]) and vocabulary.rewritten(m[0])]
    if not spans:
        return []  # nearly all sentences
    fixed = [match.span(group) for match in _EMPHASIS.finditer(text) for group in (1, 2)]
    fixed += [tag.span() for tag in _TAG.finditer(text)]
    separate = joined_spans(text, spans, across_spaces=False)
    widened = [around(span, fixed) or _with_arguments(text, _widened(text, span)) for span in separate]
    spans = joined_spans(text, widened)
    capitals = sum(stop - start for start, stop in spans if text[start:stop].isupper())
    is_in_capitals = text.isupper() and 2 * sum(map(str.isupper, text)) > sum(map(str.isalpha, text))
    if is_in_capitals and 2 * capitals >= len(text):  # other words in capitals are as unfamiliar to the model
        return [(0, len(text))]
    wholes = [match.span() for match in WHOLE.finditer(text)]
    touched = [(a, b) for a, b in wholes if any(start < b and a < stop for start, stop in spans)]
    return joined_spans(text, [_with_brackets(text, span) for span in joined_spans(text, spans + touched)])


def _is_word_border(text: str, i: int) -> bool:
    """Whether character `i` is a zero-width space between words of a script without spaces, such as Khmer."""
    return text[i] == "\u200b" and all(map(is_without_spaces, (text[max(0, i - 1)], text[i + 1 : i + 2])))


def _misread_spans(text: str, vocabulary: Vocabulary) -> list[Span]:
    """Spans of parts that the model would misread although their characters are known. See `_UNUSUAL`."""
    spans = list[Span]()
    for match in _UNUSUAL.finditer(text):
        if match["run"]:
            ids = vocabulary.encode(match[0])
            known = [i for i in ids[vocabulary.n_frame(ids) :] if i not in vocabulary.unreadable_ids]
            is_known = vocabulary.of_characters or any(len(bare(piece)) > 1 for piece in vocabulary.pieces(known))
        elif match["first"]:
            is_known = match["first"] in _beginnings_of_words(vocabulary)
        else:  # code is kept even if frequent, except entities, since translations may have others or none
            pieces = map(bare, vocabulary.pieces(vocabulary.encode(match[0])))
            is_known = ENTITY.fullmatch(match[0]) is not None and match[0] in pieces
        if is_known:
            continue
        spans.append(match.span())
        if match[0] in APOSTROPHES:  # it opens a quotation, so the next one after a word closes it
            spans += [end.span() for end in _END_OF_QUOTE.finditer(text, match.end())]
    if not _BEGIN_OF_QUOTE.search(text):  # closing marks of a quotation that began in another sentence
        spans += [end.span() for end in _END_OF_QUOTE.finditer(text) if text[end.start() - 1] in FINAL_SIGNS]
    return spans


@lru_cache(maxsize=8)
def _beginnings_of_words(vocabulary: Vocabulary) -> frozenset[str]:
    """The characters that begin words in the training text, found as first characters of pieces that begin a word.

    In a small or a character vocabulary, the space may be a piece of its own, so every piece may begin a word.
    """
    pieces = vocabulary.pieces(range(vocabulary.vocab_size))
    if vocabulary.of_characters or vocabulary.vocab_size < _SMALL:
        return frozenset(piece[:1] for piece in pieces)
    return frozenset(piece[1:2] for piece in pieces if piece.startswith(SPACE))


def around(span: Span, others: Iterable[Span]) -> Span | None:
    """The first span of `others` that contains `span`, or None."""
    return next((other for other in others if other[0] <= span[0] and span[1] <= other[1]), None)


def joined_spans(text: str, spans: Iterable[Span], *, across_spaces: bool = True) -> list[Span]:
    """Sort spans, and join spans that touch or overlap. `across_spaces`: also spans with only spaces between them."""
    joined = list[Span]()
    for start, stop in sorted(spans):
        is_near = across_spaces and joined and _DOT_AND_SPACES.fullmatch(text, joined[-1][1], start)
        if joined and (start <= joined[-1][1] or is_near):
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return joined


def _widened(text: str, span: Span) -> Span:
    """Widen unreadable letters to the word, and a symbol inside a URL or code to all of it. Leave other symbols."""
    start, stop = span
    if any(map(spells_words_without_spaces, text[start:stop])):
        start, stop = _unspaced_word(text, span)
    is_part = _is_part_of_word(text, span)
    if is_invisible(text[start:stop]) or (not is_part and all(map(is_other_sign, text[start:stop]))):
        return span
    before, behind = text[max(0, start - 1) : start], text[stop : stop + 1]
    if text[start] in _TECHNICAL and (text[start] in _TECHNICAL_STARTS or (before.strip() and behind.strip())):
        tokens = _TOKEN.finditer(text, text.rfind(" ", 0, start) + 1)
        first, last = next((token.span() for token in tokens if token.end() > start), span)
        if text[start] in "#@" or any(map(is_spaced, text[first:last])):
            return min(first, start), max(stop, len(text[:last].rstrip(".,;:!?)")))
    if is_spaced(before) and is_spaced(behind):
        if not (before.isnumeric() or behind.isnumeric()) and all(map(_is_between_words, text[start:stop])):
            return span
    elif not is_part and not any(map(in_word, text[start:stop])):
        return start, stop
    while start and _continues(text, start - 1):
        start -= 1
    while stop < len(text) and _continues(text, stop):
        stop += 1
    return start, stop


def _unspaced_word(text: str, span: Span) -> Span:
    """Widen a span of letters to a word or name, in a script without spaces between words.

    At most 20 letters between spaces and symbols are taken for one word. Otherwise, widen to whole syllables.
    """
    start, stop = span
    while start and stop - start <= _LONGEST_UNSPACED and spells_words_without_spaces(text[start - 1]):
        start -= 1
    while stop < len(text) and stop - start <= _LONGEST_UNSPACED and spells_words_without_spaces(text[stop]):
        stop += 1
    if stop - start <= _LONGEST_UNSPACED:
        return start, stop
    start, stop = span
    while start and is_inside_syllable(text, start):
        start -= 1
    while stop < len(text) and is_inside_syllable(text, stop):
        stop += 1
    return start, stop


def _with_arguments(text: str, span: Span) -> Span:
    """Widen the span of a function name to the arguments after it, such as (1)."""
    start, stop = span
    call = _ARGUMENTS.match(text, stop) if is_spaced(text[stop - 1]) else None
    return start, call.end() if call else stop


def _with_brackets(text: str, span: Span) -> Span:
    """Add the missing bracket of a pair if it touches the span, or leave out a closing bracket without a partner."""
    start, stop = span
    for opening, closing in ("()", "[]", "{}"):
        n_open = text.count(opening, start, stop) - text.count(closing, start, stop)
        if n_open > 0 and text.startswith(closing, stop):
            stop += 1
        elif n_open < 0 and text.endswith(opening, 0, start):
            start -= 1
        elif n_open == -1 and text.endswith(closing, start + 1, stop):
            before = text[stop - 2]
            stop -= before == closing or in_word(before)  # but not :)
    return start, stop


def _is_between_words(character: str) -> bool:
    """Whether a character is a symbol between two words, such as a dash or an arrow, and belongs to neither word."""
    if character in _INSIDE_WORDS + APOSTROPHES:
        return False
    return character in "…‥;!•" or unicodedata.category(character) in _BETWEEN_WORDS


def _is_part_of_word(text: str, span: Span) -> bool:
    """Whether a span has only symbols that belong to the word before them, as in H₂O, x² and dog™."""
    start, stop = span
    signs = (c in "©®" or (is_other_sign(c) and unicodedata.category(c)[0] != "P") for c in text[start:stop])
    return start > 0 and in_word(text[start - 1]) and all(signs)


def _continues(text: str, i: int) -> bool:
    """Whether character `i` is a part of a word.

    True for letters of scripts with spaces, for signs such as hyphens between letters, and for zero-width characters.
    """
    if text[i] in _INSIDE_WORDS:
        return 0 < i < len(text) - 1 and in_word(text[i - 1]) and in_word(text[i + 1])
    return is_spaced(text[i]) or (unicodedata.category(text[i]) == "Cf" and not _is_word_border(text, i))


def in_word(character: str) -> bool:
    return character.isalnum() or is_spaced(character)


def is_invisible(text: str) -> bool:
    """Whether a text consists of spaces and invisible characters, such as a soft hyphen."""
    return all(c.isspace() or unicodedata.category(c) in ("Cf", "Cc") or _VARIATION.match(c) for c in text)
