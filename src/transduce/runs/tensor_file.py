"""Files of tensors without PyTorch: the header, the checksum, and the values as arrays. `tensors` writes them.

Such a file is a safetensors file that contains its own checksum. The metadata entry `sha256` is the digest of the whole
file with the digest's own 64 characters as zeros.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import reading

ZEROS = b"0" * 64
SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_CHUNK = 1 << 20
_MOST_HEADER = 1 << 23  # bytes, for 50,000 tensors; the format allows 100 MB, which take 2 GB once parsed
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}

ERRORS = (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading a damaged file."""


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a file of tensors.

    `head`: the bytes before the data. `entries`: dtype, shape and offsets of each tensor, in the order of the data.
    """

    head: bytes
    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]


def load_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of tensors. Only the header and the length are checked: fast for any size."""
    return read_header(path).metadata


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, tied ones once; as fast as `load_metadata`."""
    return {name: entry["shape"] for name, entry in read_header(path).entries.items()}


def check_tensors(path: Path) -> None:
    """Compare a file of tensors with its checksum. Raises `RunFolderError`."""
    with reading(path), path.open("rb") as file:
        _check(path, _header(path, file), file, sealed=True)


def read_tensors(path: Path, *, sealed: bool = True) -> tuple[bytes, Header]:
    """The content of a file of tensors, compared with its checksum, and its header. Raises `RunFolderError`.

    It is not mapped into memory: whoever overwrites a mapped file in place kills the process (SIGBUS).
    """
    with reading(path), path.open("rb") as file:
        header = _header(path, file)  # first: the file may be huge
        file.seek(0)
        content = file.read()
    _check(path, header, io.BytesIO(content), sealed=sealed)
    return content, header


def _check(path: Path, header: Header, file: io.BufferedIOBase, *, sealed: bool) -> None:
    digest = header.metadata.get("sha256")
    if digest is None and sealed:
        raise damaged(path, "it has no checksum")
    if digest is not None and digest_of(file, header.head) != digest:
        raise damaged(path, "its content does not match its checksum")


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file with a checksum, in float32; read-only.

    Raises `RunFolderError`: missing or damaged; `SettingsError`: a tensor is not of floating-point numbers of 16, 32 or
    64 bits.
    """
    content, header = read_tensors(path)
    try:
        data = np.frombuffer(content, np.uint8)[len(header.head) :]
        arrays = {name: _array(name, entry, data) for name, entry in header.entries.items()}
        aliases = json.loads(header.metadata.get("aliases", "{}"))
        return arrays | {name: arrays[kept] for name, kept in aliases.items()}
    except ERRORS as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _array(name: str, entry: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _TYPES:
        raise SettingsError(f"{name} has dtype {entry['dtype']}")
    values = data[begin:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def read_header(path: Path) -> Header:
    """The header of a file of tensors, which is checked, as is the length of the whole file."""
    with reading(path), path.open("rb") as file:
        return _header(path, file)


def _header(path: Path, file: io.BufferedIOBase) -> Header:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length > _MOST_HEADER:
        raise damaged(path, f"its header has {length:,} bytes; at most {_MOST_HEADER:,} are allowed")
    head += file.read(length)
    try:  # safetensors can read the header of a file only by mapping the file into memory
        entries: dict[str, Any] = json.loads(head[8:])
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        if len(head) + max((entry["data_offsets"][1] for entry in entries.values()), default=0) != size:
            raise ValueError("it is of a file of another size")
        for entry in entries.values():
            entry["shape"] = tuple(map(index, entry["shape"]))
        in_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        return Header(head, metadata, dict(in_order))
    except ERRORS as error:
        why = f"it has {size:,} bytes; its header cannot be read or does not match ({type(error).__name__}: {error})"
        raise damaged(path, why) from None


def digest_of(file: io.BufferedIOBase, head: bytes) -> str:
    """SHA-256 of a file that begins with `head`, with the digest in the head as zeros."""
    if (place := SEAL.search(head)) is not None:
        head = head[: place.start(1)] + ZEROS + head[place.end(1) :]
    digest = hashlib.sha256(head)
    file.seek(len(head))
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def damaged(path: Path, why: object) -> RunFolderError:
    """The error for a damaged file."""
    return RunFolderError(f"{path} is damaged: {why}")
