"""Common parts of vocabularies: the special ids, the mask token, and the methods of a tokenizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transduce.runs.atomic import write_aside, write_json

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>")

MASK = 4
MASK_PIECE = "<mask>"
"""The mask token. Only vocabularies of masked models have it; in these, BOS is BERT's [CLS] and EOS its [SEP]."""

SPACE = "\u2581"
"""SentencePiece's sign for a space, which begins a word."""

Span = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")


class Vocabulary(ABC):
    """The tokenizer of one side. Immutable, safe to use from several threads. `model`: the content of its file."""

    model: bytes
    chunk: int = 10_000
    """Texts to encode at once, so that their ids fit in memory."""
    _pieces: list[str]

    @property
    def vocab_size(self) -> int:
        """Pieces, special ones included."""
        return len(self._pieces)

    @property
    def stored_as(self) -> np.dtype[Any]:
        """The type of a token in a store: the smallest for the ids."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones but `UNK`."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts; the same as `encode` of each, and faster."""

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """The ids of a text, and the part of the text that each stands for, before any normalization.

        A part may be empty where several ids stand for one character: one of them has it.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special ids are left out, except `UNK`, which becomes visible."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces of ids, including special ones; SentencePiece marks the beginning of a word with U+2581."""
        return [self._pieces[int(i)] for i in ids]

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary, in order, each once."""
        ids, places = self.encode_with_offsets(text)
        return list(dict.fromkeys(text[a:b] for i, (a, b) in zip(ids, places, strict=True) if i == UNK))

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segmentations drawn at random. Here the usual ones: most vocabularies have only one."""
        return self.encode_batch(texts)

    def save(self, path: Path) -> None:
        """Write the model file and, for kinds that list pieces or ids, a .json next to it (each atomically)."""
        with write_aside(path) as aside:
            aside.write_bytes(self.model)
        if listed := self._listed():
            write_json(path.with_suffix(".json"), listed)

    def _listed(self) -> dict[str, Any]:
        return {}


def characters(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD. Text from files has none."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def encode_with_masks(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text. Each <mask> becomes one MASK, which replaces a word and the space before it.

    The vocabulary's own mask token, such as [MASK], is accepted too.
    """
    ids = vocabulary.encode(text.replace(MASK_PIECE, vocabulary.pieces([MASK])[0]))
    lone = {i for i in set(ids) if i != MASK and vocabulary.pieces([i])[0] == SPACE}
    return [i for i, behind in zip(ids, [*ids[1:], -1], strict=False) if not (i in lone and behind == MASK)]


def bare(piece: str) -> str:
    """A piece without the marks that say whether it begins a word.

    >>> [bare(piece) for piece in ("\u2581cat", "##s", "\u0120dog", "#")]
    ['cat', 's', 'dog', '#']
    """
    if piece.startswith("##") and len(piece) > 2:
        return piece[2:]
    return piece.lstrip("\u2581\u0120") or piece
