"""Write and read named tensors in safetensors files. Equal tensors give equal files; nothing is ever unpickled.

Every rank writes its shard of a sharded tensor (`DTensor`), rank 0 into shards/00000.safetensors and so on. These files
have the metadata of torch.distributed.checkpoint (DCP), which can read them for any number of ranks. DCP's `save` is
not used, because it makes ranks exchange pickles.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from transduce.errors import RunFolderError, cannot_write, message_of
from transduce.runs.atomic import expecting, sync, write_aside
from transduce.runs.tensor_file import ERRORS, StoredTensor, TensorFile, open_tensors, read_tensors

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the header of a safetensors file."""
_NUMBERS_AT_ONCE = 1 << 20


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` atomically. Raises `RunFolderError` if the disk is full."""
    with write_aside(path) as aside:
        write_tensors(aside, tensors, metadata)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path` directly, not atomically, for a folder that is itself written atomically.

    Tied tensors are stored once and are loaded as one tensor under all their names. Raises `OSError`.
    """
    distinct, aliases = _distinct(tensors)
    entries = {"format": "pt", **(metadata or {})}
    if aliases:
        entries["aliases"] = json.dumps(aliases, sort_keys=True)
    header: dict[str, object] = {"__metadata__": dict(sorted(entries.items()))}
    in_order, end = sorted(distinct.items(), key=lambda item: (-item[1].element_size(), item[0])), 0
    for name, tensor in in_order:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    head += b" " * (-len(head) % 8)  # the data begins at a multiple of 8
    with path.open("wb") as file:  # safetensors would copy all tensors before it writes the first
        file.write(len(head).to_bytes(8, "little") + head)
        for _, tensor in in_order:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of tensors. Raises `RunFolderError`, which names the file, if it is missing or damaged."""
    return tensors_in(read_tensors(path))


def tensors_in(file: TensorFile) -> dict[str, torch.Tensor]:
    """Return the tensors of a file as PyTorch tensors; tied tensors have all their names."""
    file.file.seek(0)
    with expecting(file.path, *ERRORS):
        return file.by_all_names(dict(sorted(load(file.file.read()).items())))  # safetensors returns them in any order


def copy_stored(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors from a file into contiguous `tensors` of equal names and shapes, a few megabytes at a time.

    The file's other tensors are left out. Raises `RunFolderError`.
    """
    buffer = np.empty(_NUMBERS_AT_ONCE, np.float32)
    with ExitStack() as files:
        for name, stored in open_tensors(path, files).stored().items():
            if name not in tensors:
                continue
            for first, part in enumerate(tensors[name].view(-1).split(_NUMBERS_AT_ONCE)):
                values = buffer[: len(part)]
                stored.read(first * _NUMBERS_AT_ONCE, values)
                part.copy_(torch.from_numpy(values))


def tensors_of(arrays: Mapping[str, np.ndarray | StoredTensor]) -> dict[str, torch.Tensor]:
    """Convert arrays to tensors; an array with several names becomes one tensor."""
    distinct = {id(array): array for array in arrays.values()}
    tensors = {key: torch.from_numpy(np.asarray(array)) for key, array in distinct.items()}
    return {name: tensors[id(array)] for name, array in arrays.items()}


def _distinct(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return distinct tensors on the CPU, without shared memory, and the stored name for each further name."""
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


FOLDER = "shards"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is sharded (a `DTensor`). FSDP, which is slow to import, need not be imported for the check."""
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def shard_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, as a view, or the tensor itself if it is not sharded."""
    sharded: Any = tensor
    return sharded.to_local() if is_sharded(tensor) else tensor


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Gather the shards of tensors. Ranks with `keep` get all tensors whole, other ranks an empty dict.

    All ranks call this. Tensors are gathered one by one and moved to the CPU, so that no device needs memory for all.
    """
    kept = {}
    for name, tensor in tensors.items():
        detached: Any = tensor.detach()
        whole = detached.full_tensor() if is_sharded(tensor) else detached
        if keep:
            kept[name] = whole.cpu() if is_sharded(tensor) else whole
    return kept


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor like the tensor `like`, if that is sharded; otherwise return it unchanged."""
    other: Any = like
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, so that later changes do not affect the copies."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def copy_shards(path: Path, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copy this rank's shards; return a function that writes them to disk, or raises `RunFolderError` if it is full."""
    written: Mapping[str, Any] = {name: tensor for name, tensor in tensors.items() if _is_first_copy(tensor)}
    chunks = {name: tensor.__create_chunk_list__() for name, tensor in written.items()}
    offsets = {name: list(chunk.offsets) for name, (chunk,) in chunks.items() if 0 not in chunk.sizes}
    info = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
    shards = copy_to_cpu({name: shard_of(tensors[name]) for name in offsets})

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, shards, {"DCP_SHARDING_INFO": info})
            sync(path)
        except OSError as error:
            raise cannot_write(path, error) from error

    return write


def _is_first_copy(tensor: Any) -> bool:
    """Whether this rank has the first copy of its shard, of which other machines have copies."""
    axes = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in axes if placement.is_replicate())


def read_shards(folder: Path, like: Any) -> dict[str, Tensor]:
    """Read the shards that ranks have written into a checkpoint's folder; return tensors sharded as `like` is."""
    if not (folder / FOLDER).exists():
        return {}
    from torch.distributed import checkpoint
    from torch.distributed import tensor as sharded

    empty = torch.empty
    if is_sharded(like):
        empty = partial(sharded.empty, device_mesh=like.device_mesh, placements=like.placements)

    reader = checkpoint.HuggingFaceStorageReader(str(folder / FOLDER))
    try:
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        for name, entry in stored.items():
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise ValueError(f"a part of {name} is missing")
        tensors = {name: empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
        # the library warns of a missing process group, but each rank reads only its own shards
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    except (checkpoint.CheckpointException, *ERRORS) as error:
        raise RunFolderError(f"{folder} is damaged: {message_of(error)[:200]}") from error
    return tensors
