"""Model folders of other programs: read Hugging Face's layout, whose content is untrusted, and create new folders."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.settings import Settings
from transduce.errors import RunFolderError, UserError
from transduce.runs import atomic
from transduce.runs.tensors import load_tensors
from transduce.text.tokenizer import Tokenizers

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"

MAX_BYTES = 1 << 26
"""Maximum size of a JSON file or vocabulary that is read: 64 MiB."""

_CODE = re.compile(r"[\w.-]{1,32}")


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A model of another program, converted for a run folder; `notes` go into its model card.

    `compare`: compares our model, in eval mode, with the original, and returns a line on the result.
    """

    settings: Settings
    tokenizers: Tokenizers
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]
    compare: Callable[[Any], str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A run to be exported: its model in eval mode, settings and tensors.

    `adapters`: the adapters that the run stores, if any, for the weights of the run `base_name`.
    """

    settings: Settings
    tokenizers: Tokenizers
    tensors: Mapping[str, Tensor]
    model: Any  # of any architecture
    quantization: str | None = None
    adapters: Mapping[str, Tensor] = field(default_factory=dict)
    base_name: str | None = None


def check_free(path: Path) -> None:
    """Raise `UserError` if the path for a new folder exists and is not an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already; give another folder, or remove it")


def make_parents(path: Path) -> None:
    """Create the parents of a new folder. Call it after all checks."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path.parent}: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """Read a file; `RunFolderError` if it is missing, not a regular file, or too large."""
    return atomic.read_bytes(path, most=MAX_BYTES)


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read the object in a JSON file; `RunFolderError` if it is missing (unless `optional`) or damaged."""
    if optional and not path.exists():
        return {}
    value = atomic.read_json(path, most=MAX_BYTES)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it does not contain a JSON object")
    return value


def languages_in(settings: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, str]:
    """Return the language codes under these keys of a file; `keys`: the file's key for each of our settings."""
    named = {ours: settings.get(theirs) for ours, theirs in keys.items()}
    return {ours: code for ours, code in named.items() if isinstance(code, str) and _CODE.fullmatch(code)}


def weight_files(folder: Path) -> list[Path]:
    """Find the files with a folder's weights: a single file, or all files of an index; safetensors are preferred.

    `RunFolderError` if a file is missing or not a regular file.
    """
    for name in (SAFE, PICKLED):
        index = folder / f"{name}.index.json"
        if not (folder / name).exists() and not index.exists():
            continue
        paths = [folder / name]
        if not paths[0].exists():
            shards = read_object(index).get("weight_map")
            if not isinstance(shards, dict) or not all(map(_is_shard, map(str, shards.values()))):
                raise RunFolderError(f"{index} is damaged: it does not list files with weights in its folder")
            paths = [folder / shard for shard in sorted(set(shards.values()))]
        for path in paths:
            if not path.is_file():
                raise RunFolderError(f"{path} {'is not a file' if path.exists() else 'is missing'}")
        return paths
    raise RunFolderError(f"{folder} has no weights: neither {SAFE} nor {PICKLED} exists")


def read_weights(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Read a folder's weights, except tensors whose names end in `without`.

    `UserError` if a file is missing, damaged or refused.
    """
    tensors = dict[str, Tensor]()
    for path in weight_files(folder):
        tensors |= load_tensors(path) if path.suffix == ".safetensors" else _read_pickled(path)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Read a pickled file with `weights_only`, PyTorch's restricted reader, which runs no code."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that are then refused
            tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file can cause any error in the reader
        why = " ".join(str(error).split("WeightsUnpickler error:")[-1].split()[:14])[:300]
        raise UserError(
            f"{path} is refused: it contains more than tensors, or is damaged ({why or type(error).__name__}); in "
            "transformers, model.save_pretrained(FOLDER) writes the weights as safetensors"
        ) from None
    if not isinstance(tensors, dict):
        raise UserError(f"{path} is refused: it does not contain named tensors")
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not isinstance(name, str) or not plain or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{path} is refused: {str(name)[:200]} is not a dense tensor with a name")
    return tensors


def _is_shard(name: str) -> bool:
    """Whether an index's entry names a weight file in its own folder, not a path elsewhere."""
    return Path(name).name == name and "\\" not in name and Path(name).suffix in (".safetensors", ".bin")
