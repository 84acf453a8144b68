"""What all vocabularies share: the special ids, and the protocol of a tokenizer."""

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
"""The mask token. Only vocabularies of masked models have it; in these, BOS is BERT's [CLS] and EOS its [SEP]."""

_SURROGATES = re.compile(r"[\ud800-\udfff]")


@runtime_checkable
class Vocabulary(Protocol):
    """The tokenizer of one side, as the rest of the package uses it."""

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
        """The pieces of ids."""

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that are not in the vocabulary."""

    def sample(self, texts: Sequence[str], *, amount: float, seed: int) -> list[list[int]]:
        """Random segmentations."""

    def save(self, path: Path) -> None:
        """Write its files: `path`, and others with the same stem."""


def characters(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, by U+FFFD. Text from files has none."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def opened(path: Path, make: Callable[[bytes], T]) -> T:
    """Read a vocabulary with `make`; a `RunFolderError` names a file that is missing or damaged."""
    content = read_bytes(path, most=sys.maxsize)
    try:
        return make(content)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None
