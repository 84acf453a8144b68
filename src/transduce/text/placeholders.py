"""Placeholders: pieces that stand for parts of a sentence that its translation must contain unchanged.

A part that the vocabulary cannot read, or that must be preserved, is replaced by a placeholder before the sentence is
encoded, and comes back in the translation. Training text with placeholders teaches a model where they belong
(`data.copies`). Decoding makes each placeholder occur as often as in the source.

In a text, a placeholder is a character of a private-use area. SentencePiece makes it a piece of its own and keeps the
space before it, so that the model decides about the spaces around the part in the translation.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from transduce.text.languages import (
    FINAL_SIGNS,
    is_other_sign,
    is_spaced,
    is_without_spaces,
)
from transduce.text.special import PLACEHOLDER_IDS, Span, Vocabulary
from transduce.text.unreadable import (
    APOSTROPHES,
    CLOSING,
    CONTROLS,
    OPENING,
    around,
    in_word,
    is_invisible,
    unreadable_spans,
)

PLACEHOLDERS = tuple(map(chr, range(0xF0000, 0xF0008)))
"""The placeholder characters, each a piece of its own. A sentence with more than 8 parts reuses them in order."""

KEPT_WORDS, KEPT_SIGNS = range(0x100000, 0x108000), range(0x108000, 0x10FFFE)
"""Characters that callers put in place of words to keep, such as names, and of other parts to keep, such as images.
They are in the second private-use area, which no vocabulary contains, so the translation contains them unchanged.
"""

_ANY = re.compile(f"[{PLACEHOLDERS[0]}-{PLACEHOLDERS[-1]}]")
_CONTROL_IN_WORD = re.compile(rf"(?<=\S)(?!\x1b\[[\d;]{{0,20}}m)[{CONTROLS}](?=\S)")
"""Control characters inside words, except for the color codes of terminals, which are kept."""
_NOTED = re.compile(f"[{CONTROLS}\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters and direction marks, which are reported if they are lost."""
_POP_EMBEDDING, _POP_ISOLATE = "\u202c", "\u2069"
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Marks that begin or end a part of a text with another writing direction."""
_BEHIND_NAME = re.compile(r"[\s:：.!?–—-]*")
_ENDS = ".!?,;:։।॥؟۔،؛።፧"
_TOUCHING = re.compile(rf"{_ANY.pattern}|[{_ENDS}]|[^\W_]")
_KEYCAP = re.compile("[0-9]\ufe0f?\u20e3")  # an emoji such as 1️⃣
_APOSTROPHE = re.compile(rf"(?<=[^\W\d_])[{APOSTROPHES}](?=[^\W\d_])")
_KEPT = re.compile(f"[{chr(KEPT_WORDS[0])}-{chr(KEPT_SIGNS[-1])}]")


class Masked(NamedTuple):
    """A sentence prepared for the model.

    text: The sentence with placeholders. parts: The replaced parts in order. joints: For each part, "<" if it touches
    the word before it, ">" if it touches the word after it. `text` has a space there, so that the word is tokenized
    normally. before, after: Spaces and parts at the edges of the sentence, which the model does not read. end: The
    punctuation mark that replaces the punctuation at the start of `after` for the model, such as "." for "...".
    unreadable: The parts that the vocabulary cannot read. dropped: Control characters and direction marks not kept.
    """

    text: str
    parts: tuple[str, ...] = ()
    joints: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    end: str = ""
    unreadable: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


def prepare(text: str, vocabulary: Vocabulary, ids: Sequence[int] | np.ndarray, *, whole: bool = False) -> Masked:
    """Replace words that the vocabulary cannot read, and `KEPT_WORDS` and `KEPT_SIGNS`, by placeholders.

    Unreadable symbols and, unless the vocabulary keeps them, spaces at the edges of the sentence are left out. So is a
    whole sentence without readable letters or digits. Invisible characters that the vocabulary lacks are dropped.
    Without placeholders in the vocabulary, the inside of the sentence is unchanged. `ids`: the ids of the text.
    `whole`: replace symbols at the edges too.
    """
    masked = _masked(text, vocabulary, ids, whole=whole)
    if text.isprintable() or not vocabulary.reads_text:
        return masked
    kept = "".join([masked.before, *masked.parts, masked.after])
    kept += "".join(mark for mark in _NOTED.findall(masked.text) if not vocabulary.rewritten(mark))
    marks = dict.fromkeys(_NOTED.findall(text))
    return masked._replace(dropped=tuple(mark for mark in marks if text.count(mark) > kept.count(mark)))


def _masked(text: str, vocabulary: Vocabulary, ids: Sequence[int] | np.ndarray, *, whole: bool) -> Masked:
    if not vocabulary.reads_text:
        return Masked(text)
    if not any(map(str.isalnum, text)):
        return Masked("", before=text)
    read = _CONTROL_IN_WORD.sub(" ", _with_known_apostrophes(text, vocabulary, ids))
    unreadable = unreadable_spans(read, vocabulary, ids if read == text else vocabulary.encode(read))
    if not unreadable and (vocabulary.keeps_spaces or read == read.strip()):
        return Masked(read)
    visible = [text[slice(*span)] for span in unreadable if not is_invisible(text[slice(*span)])]
    names = tuple(filter(None, (_KEPT.sub("", part).strip() for part in visible)))
    unreadable = _without_final_signs(read, unreadable, vocabulary)
    first, last = _edges(text, [] if whole else unreadable, keeps_spaces=vocabulary.keeps_spaces)
    if broken := _broken_pairs(text, unreadable, (first, last)):
        text = "".join(c for i, c in enumerate(text) if i not in broken)
        return _masked(text, vocabulary, vocabulary.encode(text), whole=whole)
    spans = [(start - first, stop - first) for start, stop in unreadable if first <= start and stop <= last]
    inside = read[first:last]
    masked = mask(inside, spans, written=text[first:last]) if vocabulary.has_placeholders else Masked(inside)
    if not any(map(str.isalnum, masked.text)):
        return Masked("", before=text, unreadable=names)
    end = _end_to_read(text[last:], vocabulary)
    return Masked(masked.text + end, masked.parts, masked.joints, text[:first], text[last:], end, names)


def _broken_pairs(text: str, kept: Sequence[Span], core: Span) -> set[int]:
    """Positions of paired direction marks of which only one would reach the translation.

    The two marks are not in the same kept part, not both at the edges, and not both in text that the model reads.
    `core`: the span of the text between the edges.
    """

    def part_of(i: int) -> Span | None:
        if not core[0] <= i < core[1]:
            return 0, len(text)
        return around((i, i + 1), (span for span in kept if not is_invisible(text[slice(*span)])))

    opened, broken = defaultdict[str, list[int]](list), set[int]()
    for mark in _DIRECTION.finditer(text):
        if mark[0] not in (_POP_EMBEDDING, _POP_ISOLATE):
            opened[_POP_EMBEDDING if mark[0] < "\u2066" else _POP_ISOLATE].append(mark.start())
        elif opened[mark[0]] and part_of(start := opened[mark[0]].pop()) != part_of(mark.start()):
            broken |= {start, mark.start()}
    return broken


def mask(text: str, spans: Sequence[Span], order: Sequence[str] = PLACEHOLDERS, *, written: str = "") -> Masked:
    """Replace spans, which are sorted and do not overlap, by the placeholders of `order`, in turn.

    `written`: the original text to take the parts from, if `text` is a changed copy of equal length.
    """
    pieces, parts, joints, end = list[str](), list[str](), list[str](), 0
    for start, stop in spans:
        pieces.append(text[end:start])
        if not is_invisible(part := (written or text)[start:stop]):
            before, behind = text[max(0, start - 1) : start], text[stop : stop + 1]
            closes, opens = unicodedata.category(part[0]) in CLOSING, unicodedata.category(part[-1]) in OPENING
            touches_before = is_spaced(before) or (closes and in_word(before))
            touches_behind = is_spaced(behind) or (opens and in_word(behind))
            joints.append("<" * touches_before + ">" * touches_behind)
            placeholder = order[len(parts) % len(order)]
            pieces.append(" " * is_spaced(before) + placeholder + " " * is_spaced(behind))
            parts.append(part)
        end = stop
    return Masked("".join([*pieces, text[end:]]), tuple(parts), tuple(joints))


def restore(text: str, source: Masked, *, whole: bool = True) -> str:
    """Replace the placeholders of a translation by the parts of the source.

    A part is joined to the words beside it if it was joined in the source. A part that stood alone is not joined to a
    word or to the end of a sentence. `whole`: the translation is complete, so missing parts are appended to it.
    """
    if not source.parts and not source.end:  # nearly all sentences
        return source.before + text + source.after * whole
    if source.end:  # before the parts are restored, which may be punctuation marks too
        text = text.rstrip(FINAL_SIGNS)
    waiting, pieces, end, side = _parts_by_placeholder(source), list[str](), 0, ""

    def add(between: str) -> None:
        """Append the text after a part. `side`: the part's right side in the source, see `_parts_by_placeholder`."""
        has_space = side == ">" or "".join(pieces[-1:]).endswith(" ")
        joined = between.lstrip(" ") if has_space else between
        pieces.append(" " * (side == " " and is_spaced(joined[:1])) + joined)

    for match in _ANY.finditer(text):
        add(text[end : match.start()])
        end, side = match.end(), ""
        if not waiting[match[0]]:
            continue
        part, before, side = waiting[match[0]].popleft()
        if before == "<":
            pieces[-1] = pieces[-1].rstrip(" ")
        last = "".join(pieces[-2:])[-1:]
        is_apart = before == " " and last and (not pieces[-1] or is_spaced(last) or last in _ENDS)
        pieces.append((" " if is_apart else "") + part)
    add(text[end:])
    text = "".join(pieces)
    if not whole:
        return source.before + text
    missing = [part for parts in waiting.values() for part, *_ in parts]
    return source.before + reduce(_joined, missing, text) + source.after


def _joined(text: str, part: str) -> str:
    """Append a part to a text, after a space if the script of the text has spaces between words."""
    return text + " " * (text.rstrip(" ") == text != "" and not is_without_spaces(text[-1])) + part


def shared_spans(src: str, tgt: str, vocabulary: Vocabulary, src_ids: Sequence[int]) -> list[tuple[Span, Span]]:
    """Source and target spans of words that the vocabulary cannot read and that occur exactly once on each side."""
    shared = list[tuple[Span, Span]]()
    for start, stop in unreadable_spans(src, vocabulary, src_ids):
        word = src[start:stop]
        if src.count(word) == tgt.count(word) == 1:
            first = tgt.index(word)
            shared.append(((start, stop), (first, first + len(word))))
    ends = sorted(span for _, span in shared)
    return [] if any(stop > start for (_, stop), (start, _) in pairwise(ends)) else shared


def mask_pair(
    src: str, tgt: str, spans: Sequence[tuple[Span, Span]], order: Sequence[str] = PLACEHOLDERS
) -> tuple[Masked, Masked]:
    """Replace spans of a source, and the corresponding spans of its target, by the same placeholders."""
    in_order = sorted(spans)
    names = [order[number % len(order)] for number in range(len(in_order))]
    by_target = sorted(zip((span for _, span in in_order), names, strict=True))
    masked_tgt = mask(tgt, [span for span, _ in by_target], [name for _, name in by_target] or order)
    return mask(src, [span for span, _ in in_order], names or order), masked_tgt


def encode_masked(vocabulary: Vocabulary, masked: Masked) -> tuple[list[int], list[Span]]:
    """Encode a masked text. Returns its ids and, for each id, the span in the original text."""
    ids, spans = vocabulary.encode_with_offsets(masked.text)
    if not masked.parts:
        return ids, spans
    ends, parts = [0], iter(masked.parts)  # end of each character of the masked text in the original text
    joints = zip(_ANY.finditer(masked.text), masked.joints, strict=False)
    added = {match.start() + step for match, joint in joints for step, sign in ((-1, "<"), (1, ">")) if sign in joint}
    for i, character in enumerate(masked.text):
        part = next(parts, character) if _ANY.match(character) else character
        ends.append(ends[-1] + len(part) * (character != " " or i not in added))
    return ids, [(ends[start], ends[stop]) for start, stop in spans]


def restore_pieces(pieces: Iterable[str], source: Masked) -> list[str]:
    """Replace the placeholders among the pieces of a source or its translation by the parts of the source."""
    waiting = _parts_by_placeholder(source)
    return [waiting[piece].popleft()[0] if waiting.get(piece) else piece for piece in pieces]


def _parts_by_placeholder(source: Masked) -> defaultdict[str, deque[tuple[str, str, str]]]:
    """Return, for each placeholder, its parts in order: (part, left side, right side).

    A side is "<" or ">" if the part touches a word there in the source. It is empty if the part touches another part, a
    word of a script without spaces, or punctuation on its left. Otherwise, as beside a bracket, it is a space, and no
    word of the translation may touch the part.
    """
    waiting = defaultdict[str, deque[tuple[str, str, str]]](deque)
    # The text itself may contain private-use characters, which a vocabulary without placeholders reads.
    joints = source.joints or [""] * len(source.parts)
    for match, part, joint in zip(_ANY.finditer(source.text), source.parts, joints, strict=False):
        before, behind = (
            source.text[max(0, match.start() - 1) : match.start()],
            source.text[match.end() : match.end() + 1],
        )
        before = "" if _TOUCHING.match(before) else " "
        behind = "" if _TOUCHING.match(behind) and behind not in _ENDS else " "
        waiting[match[0]].append((part, "<" if "<" in joint else before, ">" if ">" in joint else behind))
    return waiting


def placeholders_in(text: str) -> list[str]:
    return _ANY.findall(text)


def placeholder_ids(text: str) -> tuple[int, ...]:
    return tuple(PLACEHOLDER_IDS[PLACEHOLDERS.index(sign)] for sign in placeholders_in(text))


def _with_known_apostrophes(text: str, vocabulary: Vocabulary, ids: Sequence[int] | np.ndarray) -> str:
    """Replace apostrophes inside words by another kind of apostrophe if the vocabulary has only that kind."""
    if not vocabulary.has_placeholders or vocabulary.unreadable_ids.isdisjoint(ids):
        return text

    def known(match: re.Match[str]) -> str:
        return next((sign for sign in match[0] + APOSTROPHES if not vocabulary.unreadable(sign)), match[0])

    return _APOSTROPHE.sub(known, text)


def _without_final_signs(text: str, spans: list[Span], vocabulary: Vocabulary) -> list[Span]:
    """Split the last span so that the sentence's final punctuation, such as "...", is separate from the last word."""
    start, stop = spans[-1] if spans else (0, 0)
    cut = len(text[:stop].rstrip(FINAL_SIGNS + " "))
    is_end = start < cut < stop == len(text.rstrip()) and _end_to_read(text[cut:], vocabulary)
    return [*spans[:-1], (start, cut), (cut, stop)] if is_end else spans


def _end_to_read(after: str, vocabulary: Vocabulary) -> str:
    """The punctuation mark that the model reads instead of the signs that end a sentence, or an empty text."""
    first = after.lstrip()[:1]
    if not first or first not in FINAL_SIGNS:
        return ""
    signs = ".。" if first in "…‥" else f"{first}.。"
    return next((sign for sign in signs if not vocabulary.unreadable(sign)), "")


def _edges(text: str, unreadable: Sequence[Span], *, keeps_spaces: bool) -> Span:
    """The span of a text without the unreadable symbols and, unless `keeps_spaces`, the spaces at its edges.

    A kept name before the sentence is left out too, because the sentence would have two subjects with it.
    """
    first, last = (0, len(text)) if keeps_spaces else (len(text) - len(text.lstrip()), len(text.rstrip()))
    for start, stop in unreadable:
        end = _BEHIND_NAME.match(text, stop).end()  # type: ignore[union-attr]
        is_letter = str.isalnum if text[end : end + 1].isupper() else _is_letter
        if any(map(is_letter, _KEYCAP.sub("", text[start:stop]))) or text[first:start].strip():
            break
        first = end
    for start, stop in reversed(unreadable):
        is_footnote = all(map(is_other_sign, text[start:stop].replace(" ", ""))) and text[start - 1] in FINAL_SIGNS
        is_word = any(map(_is_letter, _KEYCAP.sub("", text[start:stop]))) and not is_footnote
        if start < first or is_word or text[stop:last].strip():
            break
        last = len(text[:start].rstrip())
    return first, max(first, last)


def _is_letter(character: str) -> bool:
    """Whether a character is a letter or digit, or stands for a word to keep (`KEPT_WORDS`)."""
    return character.isalnum() or ord(character) in KEPT_WORDS
