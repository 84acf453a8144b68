"""Tensor files: loading returns what was saved, or names the damaged file."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from transduce.errors import RunFolderError
from transduce.runs.tensor_file import check_tensors, load_metadata
from transduce.runs.tensors import load_tensors, save_tensors, write_tensors


def some_tensors() -> dict[str, torch.Tensor]:
    weight = torch.randn(5, 3)
    return {
        "weight": weight,
        "tied": weight,
        "transposed": weight.t(),
        "row": weight[2],
        "half": torch.randn(4).bfloat16(),
        "ids": torch.arange(7),
        "step": torch.tensor(3.0),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0),
        "nothing_else": torch.empty(0),
    }


def test_load_returns_what_was_saved(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_tensors(tmp_path / "x.safetensors", tensors, {"made_by": "a test"})
    back = load_tensors(tmp_path / "x.safetensors")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name
    assert back["weight"] is back["tied"]
    assert load_metadata(tmp_path / "x.safetensors")["made_by"] == "a test"


def test_tied_tensors_are_stored_once_and_views_separately(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", some_tensors())
    stored = load_file(tmp_path / "x.safetensors")
    assert ("weight" in stored) != ("tied" in stored)
    back = load_tensors(tmp_path / "x.safetensors")
    back["row"].zero_()
    assert back["weight"][2].abs().sum() > 0


@pytest.mark.parametrize("seal", [True, False])
def test_equal_tensors_make_equal_files(tmp_path: Path, seal: bool) -> None:
    """safetensors writes metadata in random order."""
    tensors = some_tensors()
    metadata = {name: f"{name} é \x7f" for name in ("b", "transduce", "a", "z")}
    contents = set()
    for i in range(8):
        write_tensors(tmp_path / f"{i}.safetensors", tensors, metadata, seal=seal)
        contents.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(contents) == 1
    assert load_metadata(tmp_path / "0.safetensors").items() >= metadata.items()
    assert set(load_tensors(tmp_path / "0.safetensors", sealed=seal)) == set(tensors)


def test_metadata_may_have_any_order(tmp_path: Path) -> None:
    """Files of early versions are not sorted."""
    path = tmp_path / "x.safetensors"
    values = {"sha256": "0" * 64, "transduce": "0.1.0", "format": "pt"}
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"__metadata__": values, "w": entry}, separators=(",", ":"))
    content = len(text).to_bytes(8, "little") + text.encode() + torch.ones(2).numpy().tobytes()
    path.write_bytes(content.replace(b"0" * 64, hashlib.sha256(content).hexdigest().encode()))
    assert torch.equal(load_tensors(path)["w"], torch.ones(2))


@pytest.mark.parametrize("seed", range(60))
def test_any_flipped_bit_is_found(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, some_tensors(), {"made_by": "a test"})
    content = bytearray(path.read_bytes())
    choose = random.Random(seed)
    # Half of the flips are in the header, where they do most harm.
    place = choose.randrange(8 + int.from_bytes(content[:8], "little") if seed % 2 else len(content))
    content[place] ^= 1 << choose.randrange(8)
    path.write_bytes(content)
    with pytest.raises(RunFolderError) as caught:
        load_tensors(path)
    assert str(caught.value).startswith(f"{path} is damaged: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -8, -1])
def test_a_truncated_file_is_found_by_its_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunFolderError, match=f"{path} is damaged"):
        load_metadata(path)


def test_a_file_with_appended_bytes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RunFolderError, match=r"is damaged: it has .* bytes"):
        load_metadata(path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"{", b"3", b"\xff\xfe", b"[" * 100_000),
        *({"a": 1}, {"a": []}, {"a": {"data_offsets": [0, "x"]}}),
        *({"a": {**ENTRY, "data_offsets": offsets}} for offsets in ([8, 0], [0.0, 8.0])),
        *({"a": {**ENTRY, "shape": shape}} for shape in (None, "x", [1 << 70])),
        *({"a": ENTRY, "__metadata__": values} for values in ([], {"sha256": 7})),
        *({"a": ENTRY, "__metadata__": {"aliases": text}} for text in ("[1", "3", '{"b": "c"}', "[" * 100_000)),
    ],
)
def test_an_invalid_header_is_found(tmp_path: Path, header: Any) -> None:
    path, text = tmp_path / "x.safetensors", header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(RunFolderError, match=f"{path} is damaged"):
        load_tensors(path, sealed=False)


def test_an_impossible_length_of_the_header_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(RunFolderError, match=r"x\.safetensors is damaged: its header has"):
        load_metadata(tmp_path / "x.safetensors")


def test_a_file_of_another_program_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, path)
    assert torch.equal(load_tensors(path, sealed=False)["a"], torch.ones(3))
    with pytest.raises(RunFolderError, match="no checksum"):
        check_tensors(path)


def test_the_checksum_can_be_left_to_a_manifest(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x.safetensors", {"a": torch.ones(3)}, seal=False)
    assert "sha256" not in load_metadata(tmp_path / "x.safetensors")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"x\.safetensors is missing"):
        load_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("load", ["tensors.load_tensors", "tensor_file.load_arrays"])
def test_loaded_tensors_do_not_depend_on_the_file(load: str, tmp_path: Path) -> None:
    """Another program may overwrite it in place, which would be a SIGBUS if it were still mapped into memory."""
    save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(100_000), "b": torch.ones(100_000)})
    code = f"""
import os, sys
from pathlib import Path
from typing import Any
from transduce.runs import tensor_file, tensors
loaded = {load}(Path(sys.argv[1]))
os.truncate(sys.argv[1], 0)
print(float(sum(one.sum() for one in loaded.values())))"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.safetensors"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "200000.0\n"), done.stderr


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(3)})
    (tmp_path / "x.txt").write_text("any other")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.txt").stat().st_mode
