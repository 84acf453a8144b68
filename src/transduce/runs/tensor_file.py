"""Read safetensors files without PyTorch: the header, and the values as arrays. `runs.tensors` writes such files."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from safetensors import SafetensorError

from transduce.errors import RunFolderError
from transduce.runs.atomic import expecting, reading

_MOST_HEADER = 1 << 23  # bytes, for 50,000 tensors; the format allows 100 MB, which take 2 GB once parsed
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
T = TypeVar("T")

ERRORS = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions that reading a damaged file may raise."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of tensors with a valid header.

    head: the bytes before the data. entries: dtype, shape and offsets of each stored tensor, in the order of the data.
    aliases: for each further name of a tied tensor, the name of the stored tensor. file: the open file, or its content
    in memory.
    """

    path: Path
    head: bytes
    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    aliases: dict[str, str]
    file: BinaryIO

    def by_all_names(self, values: Mapping[str, T]) -> dict[str, T]:
        """Add entries for the further names of tied tensors to a mapping from the names of stored tensors to values."""
        return {**values, **{name: values[stored] for name, stored in self.aliases.items()}}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors, by all their names."""
        return self.by_all_names({name: entry["shape"] for name, entry in self.entries.items()})

    def arrays(self) -> dict[str, np.ndarray]:
        """Read the tensors as float32 arrays; all names of a tied tensor get the same array. Errors as for `stored`."""
        stored = self.stored()
        return self.by_all_names({name: np.asarray(stored[name]) for name in self.entries})

    def stored(self) -> dict[str, StoredTensor]:
        """Return objects that read the tensors later, by all their names.

        Raises `RunFolderError` if the file is damaged, or a tensor is not floating point of 16, 32 or 64 bits.
        """
        if other := next((name for name, entry in self.entries.items() if entry["dtype"] not in _TYPES), None):
            raise RunFolderError(
                f"{self.path} does not fit the settings: {other} has dtype {self.entries[other]['dtype']}, "
                "expected floating point"
            )
        with expecting(self.path, *ERRORS):
            return self.by_all_names({name: StoredTensor(self, **entry) for name, entry in self.entries.items()})

    def checksum(self) -> str:
        """Return the SHA-256 of the file, as a hexadecimal string."""
        self.file.seek(0)
        return hashlib.file_digest(self.file, "sha256").hexdigest()  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file that NumPy can use as an array. It can be read in parts, to save memory."""

    source: TensorFile
    dtype: str
    shape: tuple[int, ...]
    data_offsets: list[int]

    def __post_init__(self) -> None:
        begin, end = self.data_offsets
        if begin < 0 or end - begin != math.prod(self.shape) * np.dtype(_TYPES[self.dtype]).itemsize:
            raise ValueError(f"{end - begin} bytes for the shape {self.shape}")

    def read(self, first: int, values: np.ndarray) -> None:
        """Fill `values` (float32) with the tensor's numbers from index `first` on. Raises `RunFolderError`."""
        kind, file = np.dtype(_TYPES[self.dtype]), self.source.file
        stored = values if kind == values.dtype else np.empty(values.shape, kind)
        with expecting(self.source.path, *ERRORS):
            file.seek(len(self.source.head) + self.data_offsets[0] + first * kind.itemsize)
            if file.readinto(stored) != stored.nbytes:  # type: ignore[attr-defined]
                raise ValueError("it was changed while it was read")
        if self.dtype == "BF16":  # the upper half of a float32
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        if stored is not values:
            values[:] = stored

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        values = np.empty(self.shape, np.float32)
        self.read(0, values.reshape(-1))
        return values


def read_header(path: Path) -> TensorFile:
    """Read the header of a file of tensors, and check it and the file's length. The values are not read."""
    with reading(path), path.open("rb") as file:
        return _header(path, file)


def read_tensors(path: Path) -> TensorFile:
    """Read a whole file of tensors into memory, and check its header. Raises `RunFolderError`.

    The file is not mapped into memory, because truncating a mapped file kills the process (SIGBUS).
    """
    with reading(path), path.open("rb") as file:
        header = _header(path, file)  # check the header before reading: the file may be huge
        file.seek(0)
        return replace(header, file=io.BytesIO(file.read()))


def open_tensors(path: Path, files: ExitStack) -> TensorFile:
    """Open a file of tensors, to be read until `files` is closed. Raises `RunFolderError`."""
    with reading(path):
        return _header(path, files.enter_context(path.open("rb")))


def count_weights(path: Path) -> int:
    """Count the weights in a file of tensors; tied tensors count once."""
    return sum(math.prod(entry["shape"]) for entry in read_header(path).entries.values())


def _header(path: Path, file: BinaryIO) -> TensorFile:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length > _MOST_HEADER:
        raise RunFolderError(f"{path} is damaged: its header has {length:,} bytes; {_MOST_HEADER:,} are allowed")
    head += file.read(length)
    try:  # safetensors can read the header of a file only by mapping the file into memory
        entries: dict[str, Any] = json.loads(head[8:])
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        if len(head) + max((entry["data_offsets"][1] for entry in entries.values()), default=0) != size:
            raise ValueError("it is of a file of another size")
        for entry in entries.values():
            entry["shape"] = tuple(map(index, entry["shape"]))
        in_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        aliases = json.loads(metadata.get("aliases", "{}"))
        if not entries.keys() >= set(aliases.values()):
            raise ValueError("it names tensors that are missing")
        return TensorFile(path, head, metadata, dict(in_order), aliases, file)
    except ERRORS as error:
        problem = f"its header cannot be read or does not match ({type(error).__name__}: {error})"
        raise RunFolderError(f"{path} is damaged: it has {size:,} bytes; {problem}") from None
