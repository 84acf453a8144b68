"""Encode text with masked words, written <mask>."""

from __future__ import annotations

from transduce.text.special import MASK, MASK_PIECE, Vocabulary

_SPACE = "\u2581"


def encode_gaps(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text. Each <mask> becomes one MASK, which replaces a word and the space before it.

    The vocabulary's own mask token, such as [MASK], is accepted too.
    """
    ids = vocabulary.encode(text.replace(MASK_PIECE, vocabulary.pieces([MASK])[0]))
    lone = {i for i in set(ids) if i != MASK and vocabulary.pieces([i])[0] == _SPACE}
    return [i for i, behind in zip(ids, [*ids[1:], -1], strict=True) if not (i in lone and behind == MASK)]


def bare(piece: str) -> str:
    """A piece without the marks that say whether it begins a word.

    >>> [bare(piece) for piece in ("\u2581cat", "##s", "\u0120dog", "#")]
    ['cat', 's', 'dog', '#']
    """
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    return piece.lstrip("\u2581\u0120") or piece
