"""Encoded text as arrays of integers in a folder: written once per run, memory-mapped, verified when it is opened.

A store is a folder with one NAME.npy per array, and store.json with counts and checksums. It is written under a
temporary name and renamed, so that it is complete or absent. Ids take two bytes where the vocabulary allows it.

| store | arrays | task |
|---|---|---|
| `TokenStore` | src, src_offsets, tgt, tgt_offsets: pairs of sentences | translation |
| `AlignedStore` | the same, and links, link_offsets: pairs of tokens | translation with guided alignment |
| `TextStore` | ids: documents in one row, each as BOS ids EOS | language models |
| `SentenceStore` | ids, offsets, documents: documents as sentences | masked models |
| `LabelStore` | ids, offsets, seconds, labels: labelled texts | classification |
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from transduce.data.sentence_pairs import Packed
from transduce.data.store_writer import Sequences, StoreWriter
from transduce.errors import RunFolderError, message_of
from transduce.runs.atomic import expecting, read_json, write_aside, write_json

StoreT = TypeVar("StoreT", bound="Store")

FORMAT = 1
_CHECKED = 1 << 14  # pairs whose links are checked at once
_DTYPES = (np.uint16, np.int32, np.int64)


class Store(ABC):
    """Arrays, and the `facts` of store.json. A subclass is a dataclass whose fields are the arrays, then `facts`."""

    facts: Mapping[str, Any]

    @classmethod
    def open(cls: type[StoreT], folder: Path) -> StoreT:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing, damaged or of another kind."""
        facts = read_json(folder / "store.json")
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise RunFolderError(f"{folder} is not a store of format {FORMAT}")
        sums, names = facts.get("checksums"), array_names(cls)
        if not isinstance(sums, dict) or sums.keys() != set(names):
            raise RunFolderError(f"{folder / 'store.json'} is damaged: not a store of {', '.join(names)}")
        store = cls(**{name: map_array(folder / f"{name}.npy", sums[name]) for name in names}, facts=facts)  # type: ignore[call-arg]
        with expecting(folder / "store.json"):
            if not store._is_consistent():
                raise RunFolderError(f"{folder} is damaged: its arrays do not fit each other or its counts")
        return store

    @classmethod
    def create(
        cls: type[StoreT],
        folder: Path | None,
        dtypes: Mapping[str, Any],
        fill: Callable[[StoreWriter], None],
    ) -> StoreT:
        """Write a store into `folder`, replacing one that is there, or into memory; `fill` appends its content.

        Nothing changes where `fill` or the disk fails.
        """
        if folder is None:
            writer = StoreWriter(None, dtypes)
            fill(writer)
            return cls(**dict(zip(dtypes, writer.arrays(), strict=True)), facts=writer.facts)  # type: ignore[call-arg]
        with write_aside(folder) as aside:
            aside.mkdir()
            writer = StoreWriter(aside, dtypes)
            try:
                fill(writer)
                writer.close()
            except BaseException:
                writer.abandon()
                raise
            sums = {name: checksum(aside / f"{name}.npy") for name in dtypes}
            write_json(aside / "store.json", {"format": FORMAT, **writer.facts, "checksums": sums})
        return cls.open(folder)

    @abstractmethod
    def _is_consistent(self) -> bool:
        """Whether the arrays and the facts fit each other."""


@dataclass(frozen=True, eq=False)
class TokenStore(Store):
    """Sentence pairs as ids without special ones. `store[i]` is `(src_ids, tgt_ids)`, views without a copy."""

    src: np.ndarray  # uint16 or int32 [tokens]
    src_offsets: np.ndarray  # int64 [N + 1]
    tgt: np.ndarray
    tgt_offsets: np.ndarray
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.src_offsets) - 1

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        src, tgt = self.src_offsets[i : i + 2], self.tgt_offsets[i : i + 2]
        return self.src[src[0] : src[1]], self.tgt[tgt[0] : tgt[1]]

    @property
    def src_lengths(self) -> np.ndarray:
        """[N]: tokens of each source sentence, including its EOS, or vectors of each sequence."""
        return _differences(self.src_offsets, more=self.src.ndim == 1)

    @property
    def tgt_lengths(self) -> np.ndarray:
        """[N]: tokens of each target sentence, including its EOS."""
        return _differences(self.tgt_offsets, more=1)

    def lengths_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`src_lengths` and `tgt_lengths` of some pairs."""
        src, tgt = (ends[indices + 1] - ends[indices] for ends in (self.src_offsets, self.tgt_offsets))
        return src + (self.src.ndim == 1), tgt + 1

    def weights(self, by_corpus: Sequence[float]) -> np.ndarray | None:
        """float64 [N]: how often an epoch uses each pair; None where that is once for all."""
        if all(weight == 1 for weight in by_corpus) or "sizes" not in self.facts:
            return None
        return np.repeat(np.asarray(by_corpus, dtype=np.float64), self.facts["sizes"])

    @classmethod
    def from_lists(cls, src: Sequences, tgt: Sequences) -> TokenStore:
        """A store in memory."""
        writer = StoreWriter(None, {"src": np.int32, "src_offsets": np.int64, "tgt": np.int32, "tgt_offsets": np.int64})
        writer.append_sequences("src", "src_offsets", src)
        writer.append_sequences("tgt", "tgt_offsets", tgt)
        src_ids, src_offsets, tgt_ids, tgt_offsets = writer.arrays()
        return cls(src_ids, src_offsets, tgt_ids, tgt_offsets, {})

    def _is_consistent(self) -> bool:
        n = sum(map(int, self.facts["sizes"]))
        return dict(self.facts["cleaning"]) is not None and all(
            are_offsets(offsets, end=len(ids)) and len(offsets) == n + 1
            for ids, offsets in ((self.src, self.src_offsets), (self.tgt, self.tgt_offsets))
        )


@dataclass(frozen=True, eq=False)
class AlignedStore(TokenStore):
    """Sentence pairs with links between their tokens: the source and the target token of each link in turn."""

    links: np.ndarray  # int32 [2 * links]
    link_offsets: np.ndarray  # int64 [N + 1]

    def links_of(self, i: int) -> np.ndarray:
        """The links of a pair, [n, 2]. The source token after the last one is the end of the source."""
        begin, end = self.link_offsets[i : i + 2]
        return self.links[begin:end].reshape(-1, 2)

    def _is_consistent(self) -> bool:
        offsets = self.link_offsets
        if len(offsets) != len(self) + 1 or not (
            super()._is_consistent() and are_offsets(offsets, end=len(self.links))
        ):
            return False
        limits = np.stack([self.src_lengths, self.tgt_lengths - 1], 1)
        return not (offsets % 2).any() and all(
            self._fit(limits[i : i + _CHECKED], offsets[i : i + _CHECKED + 1]) for i in range(0, len(self), _CHECKED)
        )

    def _fit(self, limits: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether the links of some pairs are below the limits [pairs, 2]."""
        links = self.links[offsets[0] : offsets[-1]].reshape(-1, 2)
        return bool(((links >= 0) & (links < limits.repeat(np.diff(offsets) // 2, axis=0))).all())


@dataclass(frozen=True, eq=False)
class TextStore(Store):
    """Documents in one row of ids: BOS, the first document, EOS, BOS, the second document, EOS, and so on."""

    ids: np.ndarray
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_bytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return int(self.facts["bytes"])

    @property
    def n_tokens(self) -> int:
        """Tokens that a model predicts: those of the text, and the end of each document."""
        return len(self.ids) - int(self.facts["documents"])

    def _is_consistent(self) -> bool:
        return 0 < int(self.facts["documents"]) < len(self.ids) and self.n_bytes > 0


@dataclass(frozen=True, eq=False)
class SentenceStore(Store):
    """ids [tokens], offsets [n + 1] of sentences, documents [m + 1]: the first sentence of each document."""

    ids: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    facts: Mapping[str, Any]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sentence, [n]."""
        return np.diff(self.offsets)

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return len(self.documents) - 1

    def span(self, begin: int, end: int) -> np.ndarray:
        """The ids of sentences begin .. end."""
        return np.asarray(self.ids[self.offsets[begin] : self.offsets[end]], dtype=np.int64)

    def _is_consistent(self) -> bool:
        return are_offsets(self.offsets, end=len(self.ids)) and are_offsets(self.documents, end=len(self.offsets) - 1)


@dataclass(frozen=True, eq=False)
class LabelStore(Store):
    """ids [tokens], offsets [n + 1], seconds [n] (where segment 1 begins), labels [n]."""

    ids: np.ndarray
    offsets: np.ndarray
    seconds: np.ndarray
    labels: np.ndarray
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, including the special ones, [n]."""
        return np.diff(self.offsets)

    def __getitem__(self, i: int) -> Packed:
        ids = self.ids[self.offsets[i] : self.offsets[i + 1]]
        ids = np.asarray(ids, dtype=np.int64 if ids.ndim == 1 else np.float32)
        return Packed(ids, (np.arange(len(ids)) >= self.seconds[i]).astype(np.int64))

    def _is_consistent(self) -> bool:
        n = len(self.labels)
        return are_offsets(self.offsets, end=len(self.ids)) and len(self.offsets) - 1 == len(self.seconds) == n


def array_names(store: type[Store]) -> list[str]:
    """The names of a store's arrays."""
    return [field.name for field in fields(store) if field.name != "facts"]  # type: ignore[arg-type]


def map_array(path: Path, expected: object) -> np.ndarray:
    """Map a list of integers, or of vectors, whose checksum is `expected`. Checking it also warms the disk cache."""
    try:
        if checksum(path) != expected:
            raise ValueError("its checksum differs")
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
        if (array.ndim != 1 or array.dtype not in _DTYPES) and (array.ndim, array.dtype) != (2, np.float32):
            raise ValueError(f"{array.dtype} of shape {list(array.shape)} is not a list of integers or vectors")
        return array
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except Exception as error:  # NumPy's reader of headers fails in many ways
        raise RunFolderError(f"{path} is damaged: {message_of(error)[:100]}") from None


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _differences(offsets: np.ndarray, *, more: int) -> np.ndarray:
    """The differences and `more`, uint16 [N], or int32 where they do not fit."""
    found = np.empty(len(offsets) - 1, dtype=np.int32)
    np.subtract(offsets[1:], offsets[:-1], out=found, casting="unsafe")
    found += more
    return found.astype(np.uint16) if found.max(initial=0) < 1 << 16 else found


def are_offsets(offsets: np.ndarray, *, end: int) -> bool:
    """Whether offsets [N + 1] increase from 0 to `end`, and N is not 0."""
    return len(offsets) > 1 and bool(offsets[0] == 0 and offsets[-1] == end and (np.diff(offsets) >= 0).all())
