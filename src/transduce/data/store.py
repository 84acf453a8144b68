"""Encoded text in memory-mapped arrays: written once per run, verified when they are opened.

A store is a folder with one NAME.npy per array, and store.json with counts and checksums. It is written under a
temporary name and renamed, so that it is complete or absent. Ids take two bytes where the vocabulary allows it.

| store | arrays | task |
|---|---|---|
| `TokenStore` | src, src_offsets, tgt, tgt_offsets: pairs of sentences | translation |
| `TextStore` | ids: documents in one row, each as BOS ids EOS | language models |
| `SentenceStore` | ids, offsets, documents: documents as sentences | masked models |
| `LabelStore` | ids, offsets, seconds, labels: labelled texts | classification |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from transduce.data.arrays import check_ids, check_offsets, read_store
from transduce.data.sentence_pairs import Packed
from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting
from transduce.text.special import UNK


@dataclass(frozen=True, slots=True)
class Side:
    """The sentences of one side: sentence i is `ids[offsets[i] : offsets[i + 1]]`."""

    ids: np.ndarray  # uint16 or int32 [tokens]
    offsets: np.ndarray  # int64 [N + 1]

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """int32 [N]: tokens of each sentence, including its EOS."""
        return (np.diff(self.offsets) + 1).astype(np.int32)


class TokenStore:
    """Sentence pairs as ids without special ones. `store[i]` is `(src_ids, tgt_ids)`, views without a copy."""

    def __init__(self, src: Side, tgt: Side, facts: Mapping[str, Any]) -> None:
        """`facts`: the content of store.json; empty for a store in memory."""
        self.src, self.tgt, self.facts = src, tgt, facts
        self.src_lengths, self.tgt_lengths = src.lengths, tgt.lengths

    def __len__(self) -> int:
        return len(self.src_lengths)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        if not -len(self) <= i < len(self):
            raise IndexError(f"pair {i} of {len(self)}")
        i %= len(self)
        return self.src[i], self.tgt[i]

    @property
    def fingerprint(self) -> str:
        """Of content, vocabulary and cleaning; empty for a store in memory."""
        return str(self.facts.get("fingerprint", ""))

    @property
    def cleaning(self) -> dict[str, Any]:
        """The report of cleaning (`CleanReport.to_json`)."""
        return dict(self.facts.get("cleaning", {}))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Pairs of each corpus, in order."""
        return tuple(self.facts.get("sizes", (len(self),)))

    @property
    def n_tokens(self) -> tuple[int, int]:
        """Source and target tokens, without EOS."""
        return len(self.src.ids), len(self.tgt.ids)

    @property
    def n_unknown(self) -> tuple[int, int]:
        """Unknown source and target tokens."""
        return int(np.count_nonzero(self.src.ids == UNK)), int(np.count_nonzero(self.tgt.ids == UNK))

    def weights(self, by_corpus: Sequence[float]) -> np.ndarray | None:
        """float64 [N]: how often an epoch uses each pair; None where that is once for all."""
        if all(weight == 1 for weight in by_corpus):
            return None
        return np.repeat(np.asarray(by_corpus, dtype=np.float64), self.sizes)

    @classmethod
    def from_lists(cls, src: Sequence[Sequence[int]], tgt: Sequence[Sequence[int]]) -> TokenStore:
        """A store in memory."""
        assert len(src) == len(tgt)

        def side(sentences: Sequence[Sequence[int]]) -> Side:
            offsets = np.concatenate(([0], np.cumsum([len(s) for s in sentences], dtype=np.int64)))
            return Side(np.fromiter(chain.from_iterable(sentences), dtype=np.int32), offsets.astype(np.int64))

        return cls(side(src), side(tgt), {})

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing or damaged."""
        (src, src_offsets, tgt, tgt_offsets), facts = read_store(folder, "src", "src_offsets", "tgt", "tgt_offsets")
        for name, ids, offsets in (("src", src, src_offsets), ("tgt", tgt, tgt_offsets)):
            check_offsets(folder / f"{name}_offsets.npy", offsets, end=len(ids), n=len(src_offsets) - 1)
        with expecting(folder / "store.json"):
            facts["sizes"], facts["cleaning"] = [int(n) for n in facts["sizes"]], dict(facts["cleaning"])
        if sum(facts["sizes"]) != len(src_offsets) - 1:
            raise RunFolderError(f"{folder / 'store.json'} is damaged: its sizes do not match the number of pairs")
        return cls(Side(src, src_offsets), Side(tgt, tgt_offsets), facts)

    def check(self, folder: Path, *, n_src: int, n_tgt: int) -> None:
        """Refuse ids beyond the vocabularies' sizes; `folder` is what the error names."""
        check_ids(folder / "src.npy", self.src.ids, n_src)
        check_ids(folder / "tgt.npy", self.tgt.ids, n_tgt)


@dataclass(frozen=True, slots=True, eq=False)
class TextStore:
    """Documents in one row of ids: BOS, the first document, EOS, BOS, the second document, EOS, and so on."""

    ids: np.ndarray
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """Of the text and the vocabulary; empty for a store in memory."""
        return str(self.facts.get("fingerprint", ""))

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return int(self.facts["documents"])

    @property
    def n_bytes(self) -> int:
        """Bytes of the text in UTF-8."""
        return int(self.facts["bytes"])

    @property
    def n_tokens(self) -> int:
        """Tokens that a model predicts: those of the text, and the end of each document."""
        return len(self.ids) - self.n_documents

    @classmethod
    def open(cls, folder: Path) -> TextStore:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing or damaged."""
        (ids,), facts = read_store(folder, "ids")
        with expecting(folder / "store.json"):
            facts |= {key: int(facts[key]) for key in ("documents", "bytes")}
        if not 0 < facts["documents"] < len(ids) or facts["bytes"] < 1:
            raise RunFolderError(f"{folder / 'ids.npy'} is damaged: it contains no text")
        return cls(ids, facts)


@dataclass(frozen=True, slots=True, eq=False)
class SentenceStore:
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

    @classmethod
    def open(cls, folder: Path) -> SentenceStore:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing or damaged."""
        (ids, offsets, documents), facts = read_store(folder, "ids", "offsets", "documents")
        check_offsets(folder / "offsets.npy", offsets, end=len(ids))
        check_offsets(folder / "documents.npy", documents, end=len(offsets) - 1)
        return cls(ids, offsets, documents, facts)


@dataclass(frozen=True, slots=True, eq=False)
class LabelStore:
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
        ids = np.asarray(self.ids[self.offsets[i] : self.offsets[i + 1]], dtype=np.int64)
        return Packed(ids, (np.arange(len(ids)) >= self.seconds[i]).astype(np.int64))

    def count_labels(self, labels: Iterable[str]) -> dict[str, int]:
        """The number of examples of each label."""
        return {label: int(np.count_nonzero(self.labels == i)) for i, label in enumerate(labels)}

    @classmethod
    def open(cls, folder: Path) -> LabelStore:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing or damaged."""
        (ids, offsets, seconds, labels), facts = read_store(folder, "ids", "offsets", "seconds", "labels")
        check_offsets(folder / "offsets.npy", offsets, end=len(ids), n=len(labels))
        if len(seconds) != len(labels):
            raise RunFolderError(f"{folder / 'seconds.npy'} is damaged: {len(seconds)} numbers for {len(labels)} texts")
        return cls(ids, offsets, seconds, labels, facts)
