"""What every vocabulary shares, whatever made it: the special ids, and how text is handed to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from transduce.errors import RunFolderError
from transduce.runs.atomic import read_bytes

T = TypeVar("T")

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SPECIAL_PIECES = ("<pad>", "<unk>", "<s>", "</s>")

MASK = 4
MASK_PIECE = "<mask>"
"""What hides a token. Only vocabularies of masked models have it; there BOS is BERT's [CLS], and EOS its [SEP]."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")


@runtime_checkable
class Vocabulary(Protocol):
    """What the rest of the package needs of one side's tokenizer."""

    model: bytes
    notes: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Pieces, special ones included."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special ones but `UNK`."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""

    def normalize(self, text: str) -> str:
        """The text as the vocabulary sees it."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The pieces that ids stand for."""

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that the vocabulary lacks."""

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Segmentations drawn at random."""

    def save(self, path: Path) -> None:
        """Write its files: `path` and what stands beside it."""


def characters(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD. Text that was read has none."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def opened(path: Path, make: Callable[[bytes], T]) -> T:
    """What `make` makes of a vocabulary's file; a `RunFolderError` names one that is missing or damaged."""
    content = read_bytes(path, most=sys.maxsize)
    try:
        return make(content)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None
