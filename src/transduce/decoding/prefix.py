"""Prefixes of translations: the tokens that every output starts with, and the ways to spell the last word.

The last word may be the beginning of a longer word with other tokens: "Haus" may be a single token, and not "Ha" and
"us". So the tokens of the last word are not forced. Search may choose all tokens that spell the word, and the last of
them may extend beyond it ("token healing" in guidance and llama.cpp).
"""

from __future__ import annotations

import re
import sys
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

from transduce.decoding.engine import Spelling
from transduce.errors import DataError
from transduce.text.languages import LETTER, is_spaced
from transduce.text.placeholders import Masked, placeholders_in, restore
from transduce.text.special import EOS, SPACE, UNK, Vocabulary
from transduce.text.tokenizer import SentencePieceVocabulary

_SHOWN = 8  # characters in an error


def prefixes_of(parts: Sequence[str], prefix: str) -> list[str]:
    """Distribute the prefix of a text over its sentences: the first non-empty sentence gets it, all others "".

    `parts`: see `split_sentences`. The prefix may begin with the white space and the list marker before the first
    sentence, which every translation keeps.
    """
    sentences = parts[::2]
    if not any(sentences):
        require_beginning("".join(parts), prefix)
    first = next((number for number, sentence in enumerate(sentences) if sentence), 0)
    before = "".join(parts[: 2 * first])
    prefix = "" if before.startswith(prefix) else prefix.removeprefix(before)
    return [prefix if number == first else "" for number in range(len(sentences))]


def require_beginning(text: str, prefix: str, where: str = "") -> None:
    """Raise `DataError` if a text that is returned untranslated is not blank and does not begin with the prefix."""
    if text.strip() and not text.startswith(prefix):
        raise DataError(
            f"{where}prefix {prefix[:40]!r}: nothing in {text[:40]!r} is translated, so the text comes back as it is; "
            "leave the prefix out"
        )


def encode_prefix(prefix: str, vocabulary: Vocabulary, source: Masked, where: str) -> tuple[list[int], Masked]:
    """Encode a prefix; return its tokens, and the source with `before` replaced by the start of the prefix.

    Raises `DataError` for a prefix that the model cannot write exactly. `where`: the beginning of the error message.
    """
    inside = prefix.removeprefix(source.before)
    if source.before.strip():  # text other than spaces, which are always kept
        source = source._replace(before=prefix[: len(prefix) - len(inside)])
    hidden = _hide_parts(inside, vocabulary, source)
    ids = vocabulary.encode(hidden)
    written = restore(vocabulary.decode(ids), source._replace(before="", end=""), whole=False)
    if UNK in ids or (inside and not written) or written not in (inside, inside.removesuffix(" ")):
        reason = ", ".join(vocabulary.unknown(hidden)) or _difference(inside, written)
        raise DataError(f"{where}prefix {prefix[:40]!r}: the model cannot write it exactly ({reason}); change it")
    return ids, source


def spell_last_word(
    ids: Sequence[int], prefix: str, vocabulary: Vocabulary, *, limit: int, may_end: bool
) -> tuple[list[int], Spelling]:
    """Return the tokens of a prefix without its last word, and the ways to spell that word.

    If the prefix ends with punctuation, its last word is complete, and all tokens are returned. If it ends with a
    space, a new word begins or, if `may_end`, the sentence ends. In scripts without spaces, the last word is the
    longest end of the prefix that begins a longer piece. If a spelling could take more than `limit` tokens, all tokens
    of the prefix are returned, and no spelling.
    """
    if not isinstance(vocabulary, SentencePieceVocabulary):
        return list(ids), ()
    pieces, first = vocabulary.pieces(ids), len(ids)
    is_new_word = prefix.endswith(" ") and not pieces[-1].endswith(SPACE)
    while first and not is_new_word and _is_word(pieces[first - 1].lstrip(SPACE)):
        first -= 1
        if pieces[first].startswith(SPACE):
            break
    if not is_new_word and pieces[first - 1 : first] == [SPACE]:
        first -= 1
    if not is_spaced(prefix[-1]):
        while first < len(ids) and not _begins_a_piece(_text_of(pieces[first:]), vocabulary):
            first += 1
    rest = _text_of(pieces[first:]) + " " * is_new_word
    if first + len(rest) > limit or not prefix.endswith(rest.lstrip(" ")):
        return list(ids), ()
    steps = _steps_of(rest, vocabulary)
    return list(ids[:first]), tuple(sorted([*steps, (0, EOS, 1)] if rest == " " and may_end else steps))


def _steps_of(text: str, vocabulary: Vocabulary) -> list[tuple[int, int, int]]:
    """Build the transitions of a text's `Spelling`. A state is the number of characters written so far."""
    pieces, ids = _sorted_pieces(vocabulary)
    steps, ends = list[tuple[int, int, int]](), list[int]()
    for state in reversed(range(len(text))):
        first = bisect_left(pieces, text[state:])
        last = bisect_left(pieces, text[state:] + chr(sys.maxunicode), first)
        new = [(state, i, len(text)) for i in ids[first:last]]
        for end in ends:
            first_equal = bisect_left(pieces, text[state:end])
            if pieces[first_equal : first_equal + 1] == [text[state:end]]:
                new.append((state, ids[first_equal], end))
        if new:
            steps += new
            ends.append(state)
    return steps


def _text_of(pieces: Sequence[str]) -> str:
    return "".join(pieces).replace(SPACE, " ")


def _begins_a_piece(text: str, vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary has a longer piece that begins with the text."""
    pieces, _ = _sorted_pieces(vocabulary)
    behind = bisect_right(pieces, text)
    return behind < len(pieces) and pieces[behind].startswith(text)


@lru_cache(maxsize=8)
def _sorted_pieces(vocabulary: Vocabulary) -> tuple[list[str], list[int]]:
    """Return the texts of all pieces that the model can read, in alphabetical order, and each piece's id."""
    pieces = enumerate(vocabulary.pieces(range(vocabulary.vocab_size)))
    known = {_text_of([piece]): i for i, piece in pieces if i > EOS and i not in vocabulary.unreadable_ids}
    return sorted(known), [known[piece] for piece in sorted(known)]


def _hide_parts(prefix: str, vocabulary: Vocabulary, source: Masked) -> str:
    """Replace protected parts of the source (`source.parts`) in the prefix by their placeholders.

    A part inside a longer word is not replaced, unless the vocabulary cannot read the part and the word begins with it.
    """
    for placeholder, part in zip(placeholders_in(source.text), source.parts, strict=False):
        is_readable = vocabulary.unreadable_ids.isdisjoint(vocabulary.encode(part))
        before = rf"(?<!{LETTER})" if is_spaced(part[0]) else ""
        behind = rf"(?!{LETTER})" if is_spaced(part[-1]) and is_readable else ""
        prefix = re.sub(f"{before}{re.escape(part)}{behind}", placeholder, prefix, count=1)
    return prefix


def _difference(prefix: str, written: str) -> str:
    """Describe the first change that the model would make to a prefix, by code points: characters may look alike."""
    changes = SequenceMatcher(None, prefix, written, autojunk=False).get_opcodes()
    start, end, other_start, other_end = next(span for tag, *span in changes if tag != "equal")
    names = [
        " ".join(f"U+{ord(c):04X}" for c in text[:_SHOWN]) or "nothing"
        for text in (prefix[start:end], written[other_start:other_end])
    ]
    return f"character {start + 1}, {names[0]}, would become {names[1]}"


def _is_word(text: str) -> bool:
    return text != "" and all(c.isalnum() or unicodedata.category(c).startswith("M") for c in text)
