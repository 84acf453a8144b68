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
"""What reading a damaged file may raise."""


def load_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of tensors. Only the header and the length are checked: fast for any size."""
    return read_header(path)[1]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, tied ones once; as fast as `load_metadata`."""
    return read_header(path)[2]


def check_tensors(path: Path, *, sealed: bool = True) -> dict[str, str]:
    """Compare a file of tensors with its checksum; returns its metadata. Raises `RunFolderError`."""
    with reading(path), path.open("rb") as file:
        return _check(path, file, sealed=sealed)


def read_tensors(path: Path, *, sealed: bool = True) -> tuple[bytes, dict[str, str]]:
    """The content of a file of tensors, after `check_tensors`, and its metadata.

    It is not mapped into memory: whoever overwrites a mapped file in place kills the process (SIGBUS).
    """
    with reading(path), path.open("rb") as file:
        _header(path, file)  # first: the file may be huge
        file.seek(0)
        content = file.read()
    return content, _check(path, io.BytesIO(content), sealed=sealed)


def _check(path: Path, file: io.BufferedIOBase, *, sealed: bool) -> dict[str, str]:
    head, metadata, _ = _header(path, file)
    if "sha256" not in metadata and sealed:
        raise damaged(path, "it has no checksum")
    if "sha256" in metadata and digest_of(file, head) != metadata["sha256"]:
        raise damaged(path, "its content does not match its checksum")
    return metadata


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file with a checksum, in float32; read-only.

    Raises `RunFolderError`: missing or damaged; `SettingsError`: a tensor is not of floating-point numbers of 16, 32 or
    64 bits.
    """
    file, metadata = read_tensors(path)
    try:
        content = np.frombuffer(file, np.uint8)
        n_head = 8 + int(content[:8].view("<u8")[0])
        entries: dict[str, Any] = json.loads(content[8:n_head].tobytes())
        entries.pop("__metadata__", None)
        arrays = {name: _array(name, entry, content[n_head:]) for name, entry in entries.items()}
        return arrays | {name: arrays[kept] for name, kept in json.loads(metadata.get("aliases", "{}")).items()}
    except ERRORS as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _array(name: str, entry: Mapping[str, Any], content: np.ndarray) -> np.ndarray:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _TYPES:
        raise SettingsError(f"{name} has dtype {entry['dtype']}")
    values = content[begin:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":  # the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def read_header(path: Path) -> tuple[bytes, dict[str, str], dict[str, tuple[int, ...]]]:
    """The bytes before the data, the metadata and the shapes; checks the header and the length of the whole file."""
    with reading(path), path.open("rb") as file:
        return _header(path, file)


def _header(path: Path, file: io.BufferedIOBase) -> tuple[bytes, dict[str, str], dict[str, tuple[int, ...]]]:
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
        in_order = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
        return head, metadata, {name: tuple(map(index, entry["shape"])) for name, entry in in_order}
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
