"""The text store: all documents in one memory-mapped row of ids, each as BOS ids EOS, built once and found again.

A folder with `ids.npy` (uint16 where they fit, else int32) and `store.json`. Written aside and renamed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.arrays import ArrayFile, checksum, map_array
from transduce.data.text import Piece
from transduce.errors import DataError, RunFolderError
from transduce.runs.atomic import expecting, read_json, write_aside, write_json
from transduce.text.special import BOS, EOS, Vocabulary

FORMAT = 1
_CHUNK = 10_000  # pieces encoded at once


class TextStore:
    """Documents as one row of ids: BOS, the first document, EOS, BOS, the second, EOS, and so on."""

    def __init__(self, ids: np.ndarray, facts: dict[str, Any]) -> None:
        """`facts`: the content of store.json, or of one that was never written."""
        self.ids, self.facts = ids, facts

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """Of the text and the vocabulary; empty for a store in memory."""
        return str(self.facts.get("fingerprint", ""))

    @property
    def n_documents(self) -> int:
        """Documents."""
        return int(self.facts["documents"])

    @property
    def n_bytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return int(self.facts["bytes"])

    @property
    def n_tokens(self) -> int:
        """Tokens, each document's end counted and its beginning not: what a model is asked for."""
        return len(self.ids) - self.n_documents

    @classmethod
    def from_pieces(cls, pieces: Iterable[Piece], tokenizer: Vocabulary) -> TextStore:
        """A store in memory."""
        counts = {"documents": 0, "bytes": 0}
        parts = [np.asarray(ids, dtype=np.int32) for ids in _encoded(iter(pieces), tokenizer, counts)]
        return cls(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32), dict(counts))

    @classmethod
    def open(cls, folder: Path) -> TextStore:
        """Map the store in `folder`. `RunFolderError` where it is missing or damaged."""
        facts = read_json(Path(folder) / "store.json")
        if not isinstance(facts, dict) or facts.get("format") != FORMAT or "checksum" not in facts:
            raise RunFolderError(f"{folder} is no text store of format {FORMAT}")
        with expecting(Path(folder) / "store.json"):
            facts |= {key: int(facts[key]) for key in ("documents", "bytes")}
        ids = map_array(Path(folder) / "ids.npy", facts["checksum"])
        if not 0 < facts["documents"] < len(ids) or facts["bytes"] < 1:
            raise RunFolderError(f"{Path(folder) / 'ids.npy'} is damaged: there is no text in it")
        return cls(ids, facts)


def build_text_store(
    folder: Path,
    pieces: Iterable[Piece],
    tokenizer: Vocabulary,
    *,
    fingerprint: str = "",
    name: str = "training text",
    progress: Callable[[int], object] | None = None,
) -> TextStore:
    """Encode the pieces and write the store; one that lies in `folder` is replaced.

    Bounded memory. `progress` is called with the number of bytes read so far. Raises what reading raises, `DataError`
    where there is no text (`name` says of what), `RunFolderError` where the disk is full.
    """
    counts = {"documents": 0, "bytes": 0}
    with write_aside(Path(folder)) as aside:
        aside.mkdir()
        file = ArrayFile(aside / "ids.npy", np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        try:
            for ids in _encoded(iter(pieces), tokenizer, counts):
                file.append(np.asarray(ids))
                if progress is not None:
                    progress(counts["bytes"])
            file.close()
        except BaseException:
            file.abandon()
            raise
        if not counts["bytes"]:
            raise DataError(f"{name}: there is no text")
        facts = {"format": FORMAT, "fingerprint": fingerprint, **counts, "checksum": checksum(aside / "ids.npy")}
        write_json(aside / "store.json", facts)
    return TextStore.open(folder)


def fingerprint_of_text(digests: Sequence[bytes], tokenizer: Vocabulary, *extra: str) -> str:
    """sha256 over the sources' content and the vocabulary; `extra`: whatever else decides what is stored."""
    total = hashlib.sha256(f"transduce text store {FORMAT}\n".encode())
    total.update(hashlib.sha256(tokenizer.model).digest())
    for digest in digests:
        total.update(digest)
    for text in extra:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()


def _encoded(pieces: Iterator[Piece], tokenizer: Vocabulary, counts: dict[str, int]) -> Iterator[list[int]]:
    """The framed ids of a chunk of pieces after the other; counts documents and bytes."""
    begins = True
    while chunk := list(islice(pieces, _CHUNK)):
        framed: list[int] = []
        for piece, ids in zip(chunk, tokenizer.encode_batch([piece.text for piece in chunk]), strict=True):
            if begins:
                framed.append(BOS)
            framed += ids
            begins = piece.ends
            counts["bytes"] += len(piece.text.encode("utf-8"))
            if piece.ends:
                framed.append(EOS)
                counts["documents"] += 1
        yield framed
