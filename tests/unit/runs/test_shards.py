"""Files of sharded tensors, in a group of one process."""

import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from transduce.errors import RunFolderError
from transduce.runs.tensors import (
    FOLDER,
    copy_shards,
    gather,
    is_sharded,
    load_tensors,
    read_shards,
    shard_of,
    sharded_like,
    write_tensors,
)

WHOLE = {"model/a": torch.arange(15.0).view(5, 3), "model/b": torch.arange(5.0), "updater/c": torch.ones(2, 2)}


@pytest.fixture(autouse=True)
def mesh() -> Iterator[distributed.DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def sharded(mesh: distributed.DeviceMesh) -> dict[str, DTensor]:
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in WHOLE.items()}


def write_ranks(folder: Path, *ends: int) -> None:
    """The files that ranks would write, each with the rows from the end of the one before to its own."""
    (folder / FOLDER).mkdir(parents=True)
    for rank, rows in enumerate(slice(*one) for one in pairwise((0, *ends))):
        parts = {name: tensor[rows] for name, tensor in WHOLE.items() if tensor[rows].numel()}
        info = ", ".join(f'"{name}": {{"saved_offsets": {[rows.start, 0][: t.ndim]}}}' for name, t in parts.items())
        metadata = {"DCP_SHARDING_INFO": f"{{{info}}}"}
        write_tensors(folder / FOLDER / f"{rank:05d}.safetensors", parts, metadata)


@pytest.mark.loopback
def test_shards_are_read_as_they_were_written_without_pickles(
    tmp_path: Path, sharded: dict[str, DTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, None)
    copy_shards(tmp_path / FOLDER / "00000.safetensors", sharded)()
    found = read_shards(tmp_path, sharded["model/a"])
    assert all(is_sharded(tensor) for tensor in found.values())
    assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in gather(found, keep=True).items())
    assert load_tensors(tmp_path / FOLDER / "00000.safetensors").keys() == WHOLE.keys()
    assert gather(found, keep=False) == {}


@pytest.mark.loopback
@pytest.mark.parametrize("whole", [True, False])
def test_files_of_two_ranks_are_read_by_one(tmp_path: Path, sharded: dict[str, DTensor], whole: bool) -> None:
    write_ranks(tmp_path, 3, 5)
    found = read_shards(tmp_path, torch.empty(1) if whole else sharded["model/a"])
    assert {is_sharded(tensor) for tensor in found.values()} == {not whole}
    assert all(torch.equal(shard_of(tensor), WHOLE[name]) for name, tensor in found.items())


@pytest.mark.loopback
def test_a_pickle_in_place_of_a_file_is_refused(tmp_path: Path, sharded: dict[str, DTensor]) -> None:
    write_ranks(tmp_path, 3, 5)
    (tmp_path / FOLDER / "00001.safetensors").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(RunFolderError, match="is damaged"):
        read_shards(tmp_path, sharded["model/a"])
    assert read_shards(tmp_path / "none", sharded["model/a"]) == {}


@pytest.mark.loopback
@pytest.mark.parametrize("missing", [0, 1])  # without the last file, shapes differ from those of the model
def test_a_missing_file_of_a_rank_is_an_error(tmp_path: Path, sharded: dict[str, DTensor], missing: int) -> None:
    write_ranks(tmp_path, 2, 4, 5)
    (tmp_path / FOLDER / f"{missing:05d}.safetensors").unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        read_shards(tmp_path, sharded["model/a"])


@pytest.mark.loopback
def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(tmp_path: Path, sharded: dict[str, DTensor]) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(RunFolderError, match=r"cannot write .*00003\.safetensors"):
        copy_shards(tmp_path / FOLDER / "00003.safetensors", sharded)()


@pytest.mark.loopback
def test_whole_tensors_are_sharded_like_others(sharded: dict[str, DTensor]) -> None:
    for name, tensor in WHOLE.items():
        assert sharded_like(tensor, WHOLE[name]) is tensor
        found = sharded_like(tensor, sharded[name])
        assert is_sharded(found) and torch.equal(shard_of(found), tensor)
        assert sharded_like(found, sharded[name]) is found
