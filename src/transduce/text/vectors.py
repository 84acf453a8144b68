"""Sequences of vectors in place of source text, such as patches of images or frames of audio features.

A file of vectors is a safetensors file with these tensors: `vectors` [total, N] in float32 or float16, all sequences in
order; `lengths` [n], the number of vectors of each sequence; and for classification `labels` [n], integers.

The rest of the package handles names of sequences as it handles text: `FILE.safetensors#I` is sequence I of a file,
counted from 0, and a file of vectors in place of a text file stands for the names of all its sequences. The tokenizer
of the source side, a `VectorReader`, turns names into vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from transduce.errors import DataError, SettingsError
from transduce.text.special import Span, Vocabulary

SUFFIX = ".safetensors"

MAX_WIDTH = 1 << 16
"""Maximum number of elements of a vector."""

_CHUNK_NUMBERS, _USUAL_LENGTH = 1 << 24, 256  # elements read at once (64 MiB), and the usual length of a sequence


def is_vectors(path: Path | str) -> bool:
    """Whether a file contains vectors, by its suffix."""
    return str(path).lower().endswith(SUFFIX)


class VectorFile:
    """An open file of vectors. Raises `DataError` if it is missing or lacks the tensors of the format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb"):
                self._file: Any = safe_open(path, framework="numpy")
            self._vectors = self._file.get_slice("vectors")
            shape, dtype, lengths = self._vectors.get_shape(), self._vectors.get_dtype(), self._integers("lengths")
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise DataError(f"{path}: not a file of vectors: {error}") from None
        if len(shape) != 2 or dtype not in ("F32", "F16") or not 1 <= shape[1] <= MAX_WIDTH:
            raise DataError(f"{path}: vectors is {dtype} of shape {shape}; expected F32 or F16 [total, N]")
        if not len(lengths) or lengths.min() < 1 or lengths.max() > shape[0] or lengths.sum() != shape[0]:
            raise DataError(f"{path}: lengths must be at least 1 each, and {shape[0]:,} in total, as there are vectors")
        self.width, self._ends = int(shape[1]), np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def names(self) -> Iterator[str]:
        return (f"{self.path}#{number}" for number in range(len(self)))

    @cached_property
    def labels(self) -> list[str]:
        """The label of each sequence. Raises `DataError` if the file has no labels."""
        try:
            labels = self._integers("labels")
        except SafetensorError:
            raise DataError(f"{self.path}: it has no labels; add the tensor labels [{len(self)}]") from None
        if len(labels) != len(self):
            raise DataError(f"{self.path}: {len(labels):,} labels for {len(self):,} sequences; give one each")
        return [str(label) for label in labels.tolist()]

    def read(self, number: int) -> np.ndarray:
        """Read sequence `number` as float32 [S, N]. Raises `DataError` if it does not exist or is not finite."""
        if number >= len(self):
            raise DataError(f"{self.path}#{number}: the file has {len(self):,} sequences, counted from 0")
        begin, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        vectors = np.asarray(self._vectors[begin:end], dtype=np.float32)
        if not np.isfinite(vectors).all():
            raise DataError(f"{self.path}#{number}: a vector contains NaN or infinity")
        return vectors

    def _integers(self, name: str) -> np.ndarray:
        values = np.asarray(self._file.get_tensor(name))
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.dtype == np.uint64:
            raise DataError(f"{self.path}: {name} is {values.dtype} of shape {list(values.shape)}; expected I64 [n]")
        return values.astype(np.int64)


class VectorReader(Vocabulary):
    """Encodes names of sequences as vectors, which a linear layer reads in place of an embedding table.

    `vocab_size` is the number of elements of a vector.
    """

    kind = "vectors"
    reads_text = False
    unreadable_ids = frozenset()

    def __init__(self, width: int) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"vectors of {width} numbers; allowed are 1 to {MAX_WIDTH}")
        self.width, self.model = width, f"vectors of {width} numbers\n".encode()
        self.chunk = max(1, min(self.chunk, _CHUNK_NUMBERS // (_USUAL_LENGTH * width)))

    @classmethod
    def of(cls, names: Iterable[str]) -> VectorReader:
        """Create a reader for vectors as wide as those of the first named sequence."""
        name = next(iter(names), "")
        return cls(VectorFile(_parse(name)[0]).width)

    @property
    def vocab_size(self) -> int:
        return self.width

    @property
    def stored_as(self) -> np.dtype[Any]:
        return np.dtype((np.float32, (self.width,)))

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """Read the vectors of each named sequence, float32 [S, N]. Raises `DataError` if a file is unsuitable."""
        files = dict[Path, VectorFile]()
        return [self._read(name, files) for name in texts]

    def _read(self, name: str, files: dict[Path, VectorFile]) -> np.ndarray:
        path, number = _parse(name)
        if path not in files:
            files[path] = VectorFile(path)
            if files[path].width != self.width:
                raise DataError(f"{path}: vectors of {files[path].width} numbers; the model takes {self.width}")
        return files[path].read(number)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """Raise `SettingsError`, because vectors have no offsets in a text."""
        raise SettingsError("a source of vectors has no words; words are aligned in text only")

    def decode(self, ids: Iterable[Any]) -> str:
        """Describe a sequence by its number of vectors, for reports."""
        return f"({len(list(ids))} vectors)"

    def pieces(self, ids: Iterable[Any]) -> list[str]:
        return [str(number) for number, _ in enumerate(ids)]

    def _listed(self) -> dict[str, Any]:
        return {"width": self.width}


def _parse(name: str) -> tuple[Path, int]:
    """Split a sequence's name into its file and number."""
    path, _, number = name.rpartition("#")
    if not is_vectors(path) or not number.isdecimal() or len(number) > 18:
        raise DataError(f"{name[:80]!r} names no sequence of vectors; expected FILE{SUFFIX}, or FILE{SUFFIX}#NUMBER")
    return Path(path), int(number)
