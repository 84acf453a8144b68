"""Writes the arrays of a store."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

Sequences = Sequence[Sequence[int] | np.ndarray]


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
