"""Encoded text: single examples, and stores of examples, which are written once per run and memory-mapped.

A store is a folder with one NAME.npy per array, and store.json with counts. It is written under a temporary name and
renamed, so that it is complete or absent. Ids take two bytes if the vocabulary is small enough.

| store | arrays | task |
|---|---|---|
| `TokenStore` | src, src_offsets, tgt, tgt_offsets: pairs of sentences | translation |
| `AlignedStore` | also links, link_offsets: pairs of tokens | translation with guided alignment |
| `TextStore` | ids: documents in one row, each as BOS ids EOS | language models |
| `SentenceStore` | ids, offsets, documents: documents as sentences | masked models |
| `LabelStore` | ids, offsets, seconds, labels: labelled texts | classification |

This module does not import torch.
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

from transduce.errors import RunFolderError, message_of
from transduce.runs.atomic import read_json, write_aside, write_json
from transduce.text.special import BOS, EOS, Vocabulary

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence pair: ids of both sides, without special ids, which `collate` adds.

    links: [n, 2], positions of a source token and of its target token, for guided alignment; None without alignment.
    """

    src: Ids
    tgt: Ids
    links: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class RowExample:
    """The ids of a row of running text, and the target id at each position; `PAD` if there is no target."""

    ids: Ids
    targets: Ids


@dataclass(frozen=True, slots=True)
class Packed:
    """One or two texts, [CLS] A [SEP] B [SEP], or vectors [S, N], and the segment of each token (0 for A, 1 for B)."""

    ids: np.ndarray
    segments: np.ndarray


def pack(a: Ids, b: Ids | None = None) -> Packed:
    """Join one or two texts, with special tokens, or one or two sequences of vectors, without special tokens.

    >>> pack([7, 8], [9]).ids.tolist(), pack([7, 8], [9]).segments.tolist()
    ([2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1])
    """
    if isinstance(a, np.ndarray) and a.ndim == 2:
        segments = np.repeat([0, 1], [len(a), 0 if b is None else len(b)])
        return Packed(a if b is None else np.concatenate([a, b]), segments)
    parts = [[BOS], a, [EOS]] + ([] if b is None else [b, [EOS]])
    ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    segments = np.zeros(len(ids), dtype=np.int64)
    segments[len(a) + 2 :] = 1
    return Packed(ids, segments)


def pack_texts(texts: Sequence[tuple[str, ...]], vocabulary: Vocabulary, *, longest: int) -> list[Packed]:
    """Encode texts, or pairs of texts, with special tokens, as a model reads them. See `pack`.

    Examples of more than `longest` tokens are cut, in a pair the longer text first.
    """
    sides = [vocabulary.encode_batch(list(side)) for side in zip(*texts, strict=True)]
    return [_cut(ids, longest) for ids in zip(*sides, strict=True)]


def _cut(sides: Sequence[Ids], longest: int) -> Packed:
    lengths = [len(side) for side in sides]
    room = longest - len(pack(*(side[:0] for side in sides)).ids)  # without the special tokens
    while sum(lengths) > room:  # cut half of the excess at a time, so that long texts are cut quickly
        longer = max(range(len(lengths)), key=lambda i: lengths[i])
        lengths[longer] -= max(1, (sum(lengths) - room) // 2)
    return pack(*(side[:n] for side, n in zip(sides, lengths, strict=True)))


StoreT = TypeVar("StoreT", bound="Store")
Sequences = Sequence[Ids]

FORMAT = 1


class StoreWriter:
    """Writes the arrays of a store piece by piece. `facts`: the content of store.json."""

    def __init__(self, files: Mapping[str, IO[bytes]], dtypes: Mapping[str, Any]) -> None:
        self.facts: dict[str, Any] = {}
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._counts, self._files = dict.fromkeys(files, 0), files
        self.write_headers()

    def append(self, name: str, values: Iterable[int] | np.ndarray) -> None:
        dtype = self._dtypes[name]
        array = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=dtype)
        self._files[name].write(np.ascontiguousarray(array, dtype=dtype.base).data)
        self._counts[name] += len(array)

    def append_sequences(self, name: str, offsets: str, sequences: Sequences) -> None:
        """Append sequences of ids to the array `name`, and their ends to the array `offsets`."""
        self.append_joined(name, offsets, *join_sequences(sequences, self._dtypes[name]))

    def append_joined(self, name: str, offsets: str, joined: np.ndarray, lengths: np.ndarray) -> None:
        """Append sequences already joined by `join_sequences`."""
        if not self._counts[offsets]:
            self.append(offsets, [0])
        self.append(offsets, self._counts[name] + np.cumsum(lengths, dtype=np.int64))
        self.append(name, joined)

    def write_headers(self) -> None:
        """Write each array's header with its current length. NumPy pads it, so that a larger length fits later."""
        for name, file in self._files.items():
            dtype, shape = self._dtypes[name], (self._counts[name], *self._dtypes[name].shape)
            file.seek(0)
            np.lib.format.write_array_header_1_0(
                file, {"descr": np.lib.format.dtype_to_descr(dtype.base), "fortran_order": False, "shape": shape}
            )


def join_sequences(sequences: Sequences, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate sequences of ids or vectors into one array. Returns the array and the lengths of the sequences."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    if not dtype.shape:
        return np.fromiter(chain.from_iterable(sequences), dtype, int(lengths.sum())), lengths
    empty = np.empty((0, *dtype.shape), dtype.base)
    return np.concatenate([empty, *sequences], dtype=dtype.base), lengths


class Store:
    """Base class of stores: dataclasses whose fields are the arrays, and `facts`, the content of store.json."""

    facts: Mapping[str, Any]

    @classmethod
    def open(cls: type[StoreT], folder: Path) -> StoreT:
        """Memory-map the store in `folder`. Raises `RunFolderError` if it is missing, damaged or of another kind."""
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
        """Write a store. `fill` appends its content. `folder`: is replaced if it exists; None for a store in memory.

        Nothing changes if `fill` or the disk fails.
        """
        if folder is None:
            files = {name: io.BytesIO() for name in dtypes}
            writer = StoreWriter(files, dtypes)
            fill(writer)
            writer.write_headers()
            arrays = {name: np.load(io.BytesIO(file.getvalue())) for name, file in files.items()}
            return cls(**arrays, facts=writer.facts)  # type: ignore[call-arg]
        with write_aside(folder) as aside:
            aside.mkdir()
            with contextlib.ExitStack() as stack:
                opened = {name: stack.enter_context((aside / f"{name}.npy").open("wb")) for name in dtypes}
                writer = StoreWriter(opened, dtypes)
                fill(writer)
                writer.write_headers()
            write_json(aside / "store.json", {"format": FORMAT, **writer.facts})
        return cls.open(folder)


@dataclass(frozen=True, eq=False)
class TokenStore(Store):
    """A store of sentence pairs without special ids. `store[i]` is `(src_ids, tgt_ids)`, views without a copy."""

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
        """[N]: number of tokens of each source sentence, including its EOS, or of vectors of each sequence."""
        return _differences(self.src_offsets, more=self.src.ndim == 1)

    @property
    def tgt_lengths(self) -> np.ndarray:
        """[N]: number of tokens of each target sentence, including its EOS."""
        return _differences(self.tgt_offsets, more=1)

    def lengths_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        src, tgt = (ends[indices + 1] - ends[indices] for ends in (self.src_offsets, self.tgt_offsets))
        return src + (self.src.ndim == 1), tgt + 1

    def weights(self, by_corpus: Sequence[float], *, temperature: float = 1.0) -> np.ndarray | None:
        """float64 [N]: how often an epoch uses each pair; None if every pair is used once.

        A corpus has a share of the epoch in proportion to (weight * size)^(1 / temperature); the length of the epoch
        does not depend on the temperature (Arivazhagan et al. 2019, section 4.2).
        """
        if (all(weight == 1 for weight in by_corpus) and temperature == 1) or "sizes" not in self.facts:
            return None
        sizes = np.maximum(self.facts["sizes"], 1)
        amounts = sizes * np.asarray(by_corpus, dtype=np.float64)
        if temperature != 1:
            shares = amounts ** (1 / temperature)
            amounts = amounts.sum() * shares / shares.sum()
        return np.repeat(amounts / sizes, self.facts["sizes"])

    @classmethod
    def from_lists(cls, src: Sequences, tgt: Sequences) -> TokenStore:
        def fill(writer: StoreWriter) -> None:
            writer.append_sequences("src", "src_offsets", src)
            writer.append_sequences("tgt", "tgt_offsets", tgt)

        dtypes = {"src": np.int32, "src_offsets": np.int64, "tgt": np.int32, "tgt_offsets": np.int64}
        return cls.create(None, dtypes, fill)


@dataclass(frozen=True, eq=False)
class AlignedStore(TokenStore):
    """A store of sentence pairs with token links. `links` has the source and target position of each link in turn."""

    links: np.ndarray  # int32 [2 * links]
    link_offsets: np.ndarray  # int64 [N + 1]

    def links_of(self, i: int) -> np.ndarray:
        """The token links of pair `i`, [n, 2]. The position after the last source token stands for its EOS."""
        begin, end = self.link_offsets[i : i + 2]
        return self.links[begin:end].reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class TextStore(Store):
    """A store of documents in one row of ids: BOS, the first document, EOS, BOS, the second document, EOS, ..."""

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
        """Number of tokens that a model predicts: the tokens of the text, and the EOS of each document."""
        return len(self.ids) - int(self.facts["documents"])


@dataclass(frozen=True, eq=False)
class SentenceStore(Store):
    """A store of sentences: ids [tokens], offsets [n + 1], documents [m + 1] (first sentence of each document)."""

    ids: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray
    facts: Mapping[str, Any]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def n_documents(self) -> int:
        return len(self.documents) - 1

    def span(self, begin: int, end: int) -> np.ndarray:
        return np.asarray(self.ids[self.offsets[begin] : self.offsets[end]], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class LabelStore(Store):
    """A store of labelled texts: ids [tokens], offsets [n + 1], seconds [n] (start of the second text), labels [n]."""

    ids: np.ndarray
    offsets: np.ndarray
    seconds: np.ndarray
    labels: np.ndarray
    facts: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """[n]: number of tokens of each example, including special tokens."""
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
    """Differences of consecutive offsets, plus `more`: uint16 [N], or int32 if they do not fit."""
    lengths = np.empty(len(offsets) - 1, dtype=np.int32)
    np.subtract(offsets[1:], offsets[:-1], out=lengths, casting="unsafe")
    lengths += more
    return lengths.astype(np.uint16) if lengths.max(initial=0) < 1 << 16 else lengths
