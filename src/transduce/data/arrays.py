"""Arrays in files: written piece by piece, checked and memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from pathlib import Path

import numpy as np

from transduce.errors import DataError, RunFolderError


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


def map_array(path: Path, expected: int | None) -> np.ndarray:
    """A checked memory-mapped array; reading it for the check also warms the cache."""
    try:
        if checksum(path) != expected:
            raise RunFolderError(f"{path} is damaged: its checksum differs")
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is damaged: {error}") from None


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
