"""Named tensors in a safetensors file that contains its own checksum.

The metadata entry `sha256` is the digest of the whole file with the digest's own 64 characters as zeros. One rename
replaces weights and checksum together, and a copy of the file alone can still be checked. Equal tensors make equal
files, byte for byte. Any safetensors reader opens them; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from transduce.runs.atomic import write_aside
from transduce.runs.tensor_file import ERRORS, SEAL, ZEROS, damaged, digest_of, read_header, read_tensors


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
        save_file(distinct, path, metadata={"format": "pt", **entries} | ({"sha256": ZEROS.decode()} if seal else {}))
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)  # safetensors makes it readable for its owner only
    _finish_header(path, seal=seal)


def load_tensors(path: Path, *, sealed: bool = True) -> dict[str, torch.Tensor]:
    """Read and check a file of tensors. A missing or damaged one is a `RunFolderError` that names it.

    `sealed`: the file must contain a checksum; False for files of other programs and those listed in a manifest.
    """
    content, header = read_tensors(path, sealed=sealed)
    try:
        tensors = dict(sorted(load(content).items()))  # which returns them in any order
        aliases = json.loads(header.metadata.get("aliases", "{}"))
        return tensors | {name: tensors[kept] for name, kept in aliases.items()}
    except ERRORS as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


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
    head = read_header(path).head
    header = json.loads(head[8:])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    assert len(text) <= len(head) - 8, "sorting does not make it longer"
    head = head[:8] + text.ljust(len(head) - 8)  # the format pads with spaces
    with path.open("r+b") as file:
        if seal:
            place = SEAL.search(head)
            assert place is not None, "the file was written with zeros for the digest"
            head = head[: place.start(1)] + digest_of(file, head).encode("ascii") + head[place.end(1) :]
            file.seek(0)
        file.write(head)
