"""The store of documents as sentences: what masked models and next-sentence pairs are trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.arrays import check_offsets
from transduce.data.stored import flat, read_arrays, write_arrays
from transduce.data.text import Piece
from transduce.errors import DataError
from transduce.text.special import Vocabulary

KIND = "sentences, 1"
_NAMES = ("ids", "offsets", "documents")
_CHUNK = 10_000  # lines encoded at once


@dataclass(frozen=True, slots=True, eq=False)
class SentenceStore:
    """ids [sum of lengths], offsets [n + 1] of sentences, documents [m + 1]: each document's first sentence."""

    ids: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    facts: dict[str, Any]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, [n]."""
        return np.diff(self.offsets)

    @property
    def n_documents(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def span(self, begin: int, end: int) -> np.ndarray:
        """The ids of sentences begin .. end."""
        return np.asarray(self.ids[self.offsets[begin] : self.offsets[end]], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path) -> SentenceStore:
        """Map the store in `folder`. `RunFolderError` where it is missing or damaged."""
        arrays, facts = read_arrays(folder, _NAMES, kind=KIND)
        check_offsets(Path(folder) / "offsets.npy", arrays["offsets"], end=len(arrays["ids"]))
        check_offsets(Path(folder) / "documents.npy", arrays["documents"], end=len(arrays["offsets"]) - 1)
        return cls(arrays["ids"], arrays["offsets"], arrays["documents"], facts)


def build_sentence_store(
    folder: Path,
    pieces: Iterable[Piece],
    vocabulary: Vocabulary,
    *,
    longest: int,
    fingerprint: str = "",
    name: str = "training text",
) -> SentenceStore:
    """Encode as `sentences_of` does, and write."""
    made = sentences_of(pieces, vocabulary, longest=longest, name=name)
    arrays = {"ids": made.ids, "offsets": made.offsets, "documents": made.documents}
    write_arrays(folder, arrays, made.facts | {"fingerprint": fingerprint})
    return SentenceStore.open(folder)


def sentences_of(pieces: Iterable[Piece], vocabulary: Vocabulary, *, longest: int, name: str) -> SentenceStore:
    """Encode lines as sentences, blank ones left out, those above `longest` tokens in equal parts; in memory.

    Raises what reading raises, and `DataError` where there is no text.
    """
    sentences, documents, n_bytes = list[list[int]](), [0], 0
    for text, ids, ends in _encoded(iter(pieces), vocabulary):
        n_bytes += len(text.encode("utf-8"))
        n_parts = -(-len(ids) // longest)
        sentences += (
            [part.tolist() for part in np.array_split(np.array(ids), n_parts)] if n_parts > 1 else [ids] * n_parts
        )
        if ends and documents[-1] < len(sentences):
            documents.append(len(sentences))
    if documents[-1] < len(sentences):
        documents.append(len(sentences))
    if not sentences:
        raise DataError(f"{name}: there is no text")
    every, offsets = flat(sentences, vocabulary.vocab_size)
    facts = {"kind": KIND, "fingerprint": "", "bytes": n_bytes}
    return SentenceStore(every, offsets, np.array(documents, dtype=np.int64), facts)


def _encoded(pieces: Iterator[Piece], vocabulary: Vocabulary) -> Iterator[tuple[str, list[int], bool]]:
    while chunk := list(islice(pieces, _CHUNK)):
        texts = [piece.text.strip() for piece in chunk]
        for piece, ids in zip(chunk, vocabulary.encode_batch(texts), strict=True):
            yield piece.text, list(ids), piece.ends
