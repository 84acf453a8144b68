"""Named tensors in a safetensors file that contains its own checksum.

The metadata entry `sha256` is the digest of the whole file with the digest's own 64 characters as zeros. One rename
replaces weights and checksum together, and a copy of the file alone can still be checked. Equal tensors make equal
files, byte for byte. Any safetensors reader opens them; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from transduce.errors import RunFolderError
from transduce.runs.atomic import reading, write_aside

_ZEROS = b"0" * 64
_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_CHUNK = 1 << 20
_MOST_HEADER = 1 << 23  # bytes, for 50,000 tensors; the format allows 100 MB, which take 2 GB once parsed


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` atomically. A full disk is a one-line `RunFolderError`."""
    with write_aside(path) as aside:
        write_tensors(aside, tensors, metadata)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None, *, seal: bool = True
) -> None:
    """Write `tensors` to `path` directly, for a folder that is itself written atomically.

    Tied tensors are stored once and are loaded as one tensor under all their names. `seal` false: without a checksum,
    for a file that is listed in a manifest. Raises OSError.
    """
    distinct, aliases = _distinct(tensors)
    entries = dict(metadata or {})
    assert not entries.keys() & {"sha256", "aliases"}, "these metadata keys are taken"
    if aliases:
        entries["aliases"] = json.dumps(aliases, sort_keys=True)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(distinct, path, metadata={"format": "pt", **entries} | ({"sha256": _ZEROS.decode()} if seal else {}))
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)  # safetensors makes it readable for its owner only
    _finish_header(path, seal=seal)


def load_tensors(path: Path, *, sealed: bool = True) -> dict[str, torch.Tensor]:
    """Read and check a file of tensors. A missing or damaged one is a `RunFolderError` that names it.

    `sealed`: the file must contain a checksum; False for files of other programs and those listed in a manifest.
    """
    metadata = check_tensors(path, sealed=sealed)
    try:
        tensors = load_file(path)
        aliases = json.loads(metadata.get("aliases", "{}"))
        return tensors | {name: tensors[kept] for name, kept in aliases.items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def load_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of tensors. Only the header and the length are checked: fast for any size."""
    return _read_header(path)[1]


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file, tied ones once; as fast as `load_metadata`."""
    return _read_header(path)[2]


def check_tensors(path: Path, *, sealed: bool = True) -> dict[str, str]:
    """Compare a file of tensors with its checksum; returns its metadata. Raises `RunFolderError`."""
    head, metadata, _ = _read_header(path)
    if "sha256" not in metadata and sealed:
        raise _damaged(path, "it has no checksum")
    if "sha256" in metadata and _digest(path, head) != metadata["sha256"]:
        raise _damaged(path, "its content does not match its checksum")
    return metadata


def _distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors on the CPU that share no memory, and {name: stored name} of those that are the same tensor."""
    kept: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    distinct: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach()
        # Tensors without elements have no address: never tied.
        view = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device) if value.numel() else (name,)
        if (stored := kept.setdefault(view, name)) != name:
            aliases[name] = stored
            continue
        copy = value.cpu().contiguous()
        if value.numel() and copy.untyped_storage().data_ptr() in storages:
            copy = copy.clone()  # another view of memory that is already stored
        storages.add(copy.untyped_storage().data_ptr())
        distinct[name] = copy
    return distinct, aliases


def _as_os_error(error: SafetensorError) -> OSError:
    """The system's error behind a safetensors one, so that a full disk is reported as such."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def _finish_header(path: Path, *, seal: bool) -> None:
    """Sort the metadata, which safetensors writes in random order, and fill in the digest."""
    head = _read_header(path)[0]
    header = json.loads(head[8:])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    assert len(text) <= len(head) - 8, "sorting does not make it longer"
    head = head[:8] + text.ljust(len(head) - 8)  # the format pads with spaces
    if seal:
        place = _SEAL.search(head)
        assert place is not None, "the file was written with zeros for the digest"
        head = head[: place.start(1)] + _digest(path, head).encode("ascii") + head[place.end(1) :]
    with path.open("r+b") as file:
        file.write(head)


def _read_header(path: Path) -> tuple[bytes, dict[str, str], dict[str, tuple[int, ...]]]:
    """The bytes before the data, the metadata and the shapes; checks the header and the length of the whole file."""
    with reading(path):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if length > _MOST_HEADER:
                raise _damaged(path, f"its header has {length:,} bytes; at most {_MOST_HEADER:,} are allowed")
            head += file.read(length)
        try:
            with safe_open(path, framework="pt") as tensors:
                found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()}
                return head, tensors.metadata() or {}, found
        except SafetensorError as error:
            why = f"it has {size:,} bytes; its header cannot be read or does not match ({error})"
            raise _damaged(path, why) from None


def _digest(path: Path, head: bytes) -> str:
    """SHA-256 of a file that begins with `head`, with the digest in the head as zeros."""
    if (place := _SEAL.search(head)) is not None:
        head = head[: place.start(1)] + _ZEROS + head[place.end(1) :]
    digest = hashlib.sha256(head)
    with path.open("rb") as file:
        file.seek(len(head))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _damaged(path: Path, why: object) -> RunFolderError:
    return RunFolderError(f"{path} is damaged: {why}")
