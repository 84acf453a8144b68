"""Arrays in files: written piece by piece, checked and memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from pathlib import Path

import numpy as np

from transduce.errors import DataError, RunFolderError

_KINDS = (np.uint16, np.int32, np.int64)


class ArrayFile:
    """A one-dimensional .npy file that grows: NumPy's header leaves room for the number, which comes at the end."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        self.dtype, self.n = np.dtype(dtype), 0
        self._file = path.open("wb")
        self._header()

    def append(self, array: np.ndarray) -> None:
        """Write more numbers behind those that are there."""
        self._file.write(np.ascontiguousarray(array, dtype=self.dtype).data)
        self.n += len(array)

    def close(self) -> None:
        """Write the number of numbers, and close."""
        end = self._file.tell()
        self._file.seek(0)
        self._header()
        assert end == self._file.tell() + self.n * self.dtype.itemsize, "the header has grown"
        self._file.close()

    def abandon(self) -> None:
        """Close a file that is not to be used; what cannot be flushed does not matter."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _header(self) -> None:
        described = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.n,)}
        np.lib.format.write_array_header_1_0(self._file, described)


def map_array(path: Path, expected: object) -> np.ndarray:
    """A checked memory-mapped row of whole numbers; reading it for the check also warms the cache."""
    try:
        if checksum(path) != expected:
            raise RunFolderError(f"{path} is damaged: its checksum differs")
        array = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except RunFolderError:
        raise
    except Exception as error:  # NumPy's reader of headers stumbles in many ways
        told = " ".join(str(error).split())[:100]
        raise RunFolderError(f"{path} is damaged: {told}") from None
    if array.ndim != 1 or array.dtype not in _KINDS:
        raise RunFolderError(f"{path} is damaged: {array.dtype} of shape {list(array.shape)} is no row of numbers")
    return array


def check_offsets(path: Path, offsets: np.ndarray, *, end: int, n: int | None = None) -> None:
    """Refuse offsets [N + 1], N at least 1, that do not go from 0 up to `end`; `n`: what N must be."""
    whole = len(offsets) > 1 and offsets[0] == 0 and offsets[-1] == end and bool((np.diff(offsets) >= 0).all())
    if not whole or (n is not None and len(offsets) != n + 1):
        raise RunFolderError(f"{path} is damaged: it does not tell where each begins")


def check_lengths(path: Path, offsets: np.ndarray, most: int) -> None:
    """Refuse what is longer than `most` tokens."""
    if len(offsets) > 1 and int(np.diff(offsets).max()) > most:
        raise RunFolderError(f"{path} is damaged: something in it is longer than {most} tokens")


def check_ids(path: Path, ids: np.ndarray, vocab_size: int) -> None:
    """Refuse ids that the vocabulary has not."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise RunFolderError(f"{path} is damaged: it has ids that the vocabulary of {vocab_size:,} pieces has not")


def checksum(path: Path) -> int:
    """A quick checksum of a file's content."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def digest(path: Path) -> bytes:
    """sha256 of a file's content; a `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
