"""Tensors of which every rank has a shard (`DTensor`), and their files, shards/00000.safetensors for rank 0 and so on.

The files have the metadata of torch.distributed.checkpoint (DCP), which reads them for any number of ranks. Its `save`
does not write them, because it makes ranks exchange pickles.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.errors import RunFolderError, cannot_write, message_of
from transduce.runs.atomic import sync
from transduce.runs.tensor_file import ERRORS
from transduce.runs.tensors import write_tensors

FOLDER = "shards"


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a shard. FSDP is slow to import, and sharded tensors exist only if it was imported."""
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def shard_of(tensor: Tensor) -> Tensor:
    """The values of this rank's shard, as a view."""
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
    """Shard a whole tensor if `like` is sharded."""
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
    """Copy this rank's shards; return a function that writes and syncs them. A full disk is a `RunFolderError`."""
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
    """Whether this rank has the first of the equal copies of a shard on different machines."""
    axes = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in axes if placement.is_replicate())


def read_shards(folder: Path, like: Any) -> dict[str, Tensor]:
    """Read the tensors that ranks have written into a folder, sharded like `like`, or whole if `like` is whole."""
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
