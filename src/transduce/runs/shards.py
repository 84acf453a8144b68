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
    """Whether this rank has only a shard of it. Such tensors exist only after FSDP, slow to import, was imported."""
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(tensor, known.DTensor)


def shard_of(tensor: Tensor) -> Tensor:
    """The values that this rank has, in the same memory."""
    found: Any = tensor
    return found.to_local() if is_sharded(tensor) else tensor


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors where `keep`, those that were sharded on the CPU; an empty dict elsewhere. All ranks call this.

    One tensor after another is gathered, so that no device needs the memory of all.
    """
    found = {}
    for name, tensor in tensors.items():
        one: Any = tensor.detach()
        values = one.full_tensor() if is_sharded(tensor) else one
        if keep:
            found[name] = values.cpu() if is_sharded(tensor) else values
    return found


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor if `like` is sharded."""
    other: Any = like
    if not is_sharded(like) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values that remain when the tensors change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def copy_shards(path: Path, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copy this rank's shards; the result writes and syncs them. A full disk is a `RunFolderError`."""
    written: Mapping[str, Any] = {name: tensor for name, tensor in tensors.items() if _is_first_copy(tensor)}
    chunks = {name: tensor.__create_chunk_list__() for name, tensor in written.items()}
    offsets = {name: list(chunk.offsets) for name, (chunk,) in chunks.items() if 0 not in chunk.sizes}
    info = json.dumps({name: {"saved_offsets": offset} for name, offset in offsets.items()})
    shards = copy_to_cpu({name: shard_of(tensors[name]) for name in offsets})

    def write() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, shards, {"DCP_SHARDING_INFO": info}, seal=False)
            sync(path)
        except OSError as error:
            raise cannot_write(path, error) from error

    return write


def _is_first_copy(tensor: Any) -> bool:
    """Whether no rank of another machine, which has the same shard, comes before this one."""
    places = zip(tensor.device_mesh.get_coordinate(), tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


def read_shards(folder: Path, like: Any) -> dict[str, Tensor]:
    """The tensors that ranks have written into a folder, sharded like `like`, or whole if it is."""
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
        for name, one in stored.items():
            if sum(chunk.sizes.numel() for chunk in one.chunks) != one.size.numel():
                raise ValueError(f"a part of {name} is missing")
        found = {name: empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
        with warnings.catch_warnings():  # it warns that no other rank takes part; each reads its own shards
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            checkpoint.load(found, storage_reader=reader, no_dist=True)
    except (checkpoint.CheckpointException, *ERRORS) as error:
        raise RunFolderError(f"{folder} is damaged: {message_of(error)[:200]}") from error
    return found
