"""Tensor files: loading returns what was saved, or names the damaged file."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from transduce.errors import RunFolderError
from transduce.runs.tensor_file import read_header
from transduce.runs.tensors import copy_stored, load_tensors, save_tensors, write_tensors


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
    assert read_header(tmp_path / "x.safetensors").metadata["made_by"] == "a test"


def test_tied_tensors_are_stored_once_and_views_separately(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", some_tensors())
    stored = load_file(tmp_path / "x.safetensors")
    assert ("weight" in stored) != ("tied" in stored)
    back = load_tensors(tmp_path / "x.safetensors")
    back["row"].zero_()
    assert back["weight"][2].abs().sum() > 0


def test_equal_tensors_make_equal_files(tmp_path: Path) -> None:
    """safetensors writes metadata in random order."""
    tensors = some_tensors()
    metadata = {name: f"{name} é \x7f" for name in ("b", "transduce", "a", "z")}
    contents = set()
    for i in range(8):
        write_tensors(tmp_path / f"{i}.safetensors", tensors, metadata)
        contents.add((tmp_path / f"{i}.safetensors").read_bytes())
    assert len(contents) == 1
    assert read_header(tmp_path / "0.safetensors").metadata.items() >= metadata.items()
    assert set(load_tensors(tmp_path / "0.safetensors")) == set(tensors)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -8, -1])
def test_a_truncated_file_is_found_by_its_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunFolderError, match=f"{path} is damaged"):
        read_header(path)


def test_a_file_with_appended_bytes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(RunFolderError, match=r"is damaged: it has .* bytes"):
        read_header(path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"{", b"3", b"\xff\xfe", b"[" * 100_000),
        *({"a": 1}, {"a": []}, {"a": {"data_offsets": [0, "x"]}}, {"a": {**ENTRY, "data_offsets": [0]}}),
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
        load_tensors(path)


@pytest.mark.parametrize("read", [read_header, lambda path: copy_stored(path, {"a": torch.zeros(2)})])
@pytest.mark.parametrize("aliases", ["[1", "3", "[" * 100_000])
def test_invalid_names_of_tied_tensors_are_found_without_all_tensors(
    tmp_path: Path, aliases: str, read: Callable[[Path], Any]
) -> None:
    path, text = tmp_path / "x.safetensors", json.dumps({"a": ENTRY, "__metadata__": {"aliases": aliases}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(RunFolderError, match=f"{path} is damaged"):
        read(path)


def test_an_impossible_length_of_the_header_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(RunFolderError, match=r"x\.safetensors is damaged: its header has"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_of_another_program_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "x.safetensors")
    assert torch.equal(load_tensors(tmp_path / "x.safetensors")["a"], torch.ones(3))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"x\.safetensors is missing"):
        load_tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize("load", ["tensors.load_tensors(path)", "read(path).arrays()"])
def test_loaded_tensors_do_not_depend_on_the_file(load: str, tmp_path: Path) -> None:
    """Another program may overwrite it in place, which would be a SIGBUS if it were still mapped into memory."""
    save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(100_000), "b": torch.ones(100_000)})
    code = f"""
import os, sys
from pathlib import Path
from typing import Any
from transduce.runs import tensor_file, tensors
path, read = Path(sys.argv[1]), tensor_file.read_tensors
loaded = {load}
os.truncate(sys.argv[1], 0)
print(float(sum(one.sum() for one in loaded.values())))"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.safetensors"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "200000.0\n"), done.stderr


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(3)})
    (tmp_path / "x.txt").write_text("any other")
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "x.txt").stat().st_mode


def test_stored_tensors_are_copied_in_parts_to_the_types_of_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transduce.runs.tensors._NUMBERS_AT_ONCE", 7)
    saved = {"a": torch.randn(5, 3), "b": torch.randn(7), "c": torch.randn(2), "empty": torch.zeros(0, 4)}
    save_tensors(tmp_path / "x", saved)
    targets = {"a": torch.zeros(5, 3, dtype=torch.bfloat16), "b": torch.zeros(7), "empty": torch.zeros(0, 4)}
    copy_stored(tmp_path / "x", targets)
    assert targets["a"].equal(saved["a"].bfloat16()) and targets["b"].equal(saved["b"])
