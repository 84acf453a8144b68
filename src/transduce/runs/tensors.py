"""Named tensors in a safetensors file. Equal tensors make equal files, byte for byte; nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from transduce.runs.atomic import expecting, write_aside
from transduce.runs.tensor_file import ERRORS, TensorFile, open_tensors, read_header, read_tensors


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` atomically. Raises `RunFolderError` if the disk is full."""
    with write_aside(path) as aside:
        write_tensors(aside, tensors, metadata)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path` directly, for a folder that is itself written atomically.

    Tied tensors are stored once and are loaded as one tensor under all their names. Raises OSError.
    """
    distinct, aliases = _distinct(tensors)
    entries = {"format": "pt", **(metadata or {})}
    if aliases:
        entries["aliases"] = json.dumps(aliases, sort_keys=True)
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(distinct, path, metadata=entries)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)  # safetensors creates files that only their owner can read
    _sort_metadata(path)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors. Raises `RunFolderError`, which names the file, if it is missing or damaged."""
    return tensors_in(read_tensors(path))


def tensors_in(file: TensorFile) -> dict[str, torch.Tensor]:
    """The tensors of a file that was read."""
    file.file.seek(0)
    with expecting(file.path, *ERRORS):
        return file.by_all_names(dict(sorted(load(file.file.read()).items())))  # safetensors returns them in any order


def stream_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a file in float32, with one tensor at a time in memory."""
    with ExitStack() as files:
        for name, tensor in open_tensors(path, files).stored().items():
            yield name, torch.from_numpy(np.asarray(tensor))


def tensors_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Copies of arrays as tensors; an array with several names becomes one tensor."""
    distinct = {id(array): array for array in arrays.values()}
    tensors = {key: torch.from_numpy(array.copy()) for key, array in distinct.items()}
    return {name: tensors[id(array)] for name, array in arrays.items()}


def _distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors on the CPU without shared memory, and {name: stored name} for additional names of tied tensors."""
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
            copy = copy.clone()  # memory of this view is already stored under another name
        storages.add(copy.untyped_storage().data_ptr())
        distinct[name] = copy
    return distinct, aliases


def _as_os_error(error: SafetensorError) -> OSError:
    """Convert an error of safetensors to the underlying OSError, so that a full disk is reported as such."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else OSError(str(error))


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a new file, which safetensors writes in random order."""
    head = read_header(path).head
    header = json.loads(head[8:])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    assert len(text) <= len(head) - 8, "sorting does not make it longer"
    with path.open("r+b") as file:
        file.seek(8)
        file.write(text.ljust(len(head) - 8))  # the format pads with spaces
