"""Encoded text as arrays of integers in a folder: written once per run, and memory-mapped.

A store is a folder with one NAME.npy per array, and store.json with counts. It is written under a temporary name and
renamed, so that it is complete or absent. Ids take two bytes where the vocabulary allows it.

| store | arrays | task |
|---|---|---|
| `TokenStore` | src, src_offsets, tgt, tgt_offsets: pairs of sentences | translation |
| `AlignedStore` | the same, and links, link_offsets: pairs of tokens | translation with guided alignment |
| `TextStore` | ids: documents in one row, each as BOS ids EOS | language models |
| `SentenceStore` | ids, offsets, documents: documents as sentences | masked models |
| `LabelStore` | ids, offsets, seconds, labels: labelled texts | classification |
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from transduce.data.sentence_pairs import Packed
from transduce.errors import RunFolderError, message_of
from transduce.runs.atomic import read_json, write_aside, write_json

StoreT = TypeVar("StoreT", bound="Store")
Sequences = Sequence[Sequence[int] | np.ndarray]

FORMAT = 1


class StoreWriter:
    """Writes the arrays of a store piece by piece. `facts` is what store.json will contain."""

    def __init__(self, folder: Path | None, arrays: Mapping[str, Any]) -> None:
        """`folder`: None to write into memory."""
        self.facts: dict[str, Any] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in arrays.items()}
        self._counts = dict.fromkeys(arrays, 0)
        self._files: dict[str, IO[bytes]] = {
            name: (folder / f"{name}.npy").open("wb") if folder else io.BytesIO() for name in arrays
        }
        self._write_headers()

    def append(self, name: str, values: Iterable[int] | np.ndarray) -> None:
        """Append numbers to an array."""
        dtype = self._dtypes[name]
        array = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=dtype)
        self._files[name].write(np.ascontiguousarray(array, dtype=dtype.base).data)
        self._counts[name] += len(array)

    def append_sequences(self, name: str, offsets: str, sequences: Sequences) -> None:
        """Append sequences of ids to the array `name`, and where each ends to the array `offsets`."""
        self.append_joined(name, offsets, *join_sequences(sequences, self._dtypes[name]))

    def append_joined(self, name: str, offsets: str, joined: np.ndarray, lengths: np.ndarray) -> None:
        """The same for what `join_sequences` returns."""
        if not self._counts[offsets]:
            self.append(offsets, [0])
        self.append(offsets, self._counts[name] + np.cumsum(lengths, dtype=np.int64))
        self.append(name, joined)

    def arrays(self) -> list[np.ndarray]:
        """The arrays that were written into memory."""
        self._write_headers()
        return [np.load(io.BytesIO(file.getvalue())) for file in self._files.values() if isinstance(file, io.BytesIO)]

    def close(self) -> None:
        """Write the final lengths."""
        self._write_headers()
        for file in self._files.values():
            file.close()

    def abandon(self) -> None:
        """Close the files after an error."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write_headers(self) -> None:
        """Write the lengths so far. NumPy pads the header, so that a larger length still fits."""
        for name, file in self._files.items():
            dtype, shape = self._dtypes[name], (self._counts[name], *self._dtypes[name].shape)
            file.seek(0)
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.lib.format.dtype_to_descr(dtype.base), "fortran_order": False, "shape": shape}
            )


def join_sequences(sequences: Sequences, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """All sequences of ids, or of vectors, in one array, and the length of each."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    if not dtype.shape:
        return np.fromiter(chain.from_iterable(sequences), dtype, int(lengths.sum())), lengths
    empty = np.empty((0, *dtype.shape), dtype.base)
    return np.concatenate([empty, *sequences], dtype=dtype.base), lengths


class Store:
    """Arrays, and the `facts` of store.json. A subclass is a dataclass whose fields are the arrays, then `facts`."""

    facts: Mapping[str, Any]

    @classmethod
    def open(cls: type[StoreT], folder: Path) -> StoreT:
        """Map the store in `folder`. Raises `RunFolderError` where it is missing, damaged or of another kind."""
        facts = read_json(folder / "store.json")
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise RunFolderError(f"{folder} is not a store of format {FORMAT}")
        names = [field.name for field in fields(cls) if field.name != "facts"]  # type: ignore[arg-type]
        return cls(**{name: _map_array(folder / f"{name}.npy") for name in names}, facts=facts)  # type: ignore[call-arg]

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
            write_json(aside / "store.json", {"format": FORMAT, **writer.facts})
        return cls.open(folder)


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


@dataclass(frozen=True, eq=False)
class AlignedStore(TokenStore):
    """Sentence pairs with links between their tokens: the source and the target token of each link in turn."""

    links: np.ndarray  # int32 [2 * links]
    link_offsets: np.ndarray  # int64 [N + 1]

    def links_of(self, i: int) -> np.ndarray:
        """The links of a pair, [n, 2]. The source token after the last one is the end of the source."""
        begin, end = self.link_offsets[i : i + 2]
        return self.links[begin:end].reshape(-1, 2)


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


def _map_array(path: Path) -> np.ndarray:
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except Exception as error:  # NumPy's reader of headers fails in many ways
        raise RunFolderError(f"{path} is damaged: {message_of(error)[:100]}") from None


def _differences(offsets: np.ndarray, *, more: int) -> np.ndarray:
    """The differences and `more`, uint16 [N], or int32 where they do not fit."""
    found = np.empty(len(offsets) - 1, dtype=np.int32)
    np.subtract(offsets[1:], offsets[:-1], out=found, casting="unsafe")
    found += more
    return found.astype(np.uint16) if found.max(initial=0) < 1 << 16 else found
