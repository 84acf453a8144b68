"""Folders of other programs: reading one in Hugging Face's layout, and making one. What is read is untrusted data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Largest JSON file or vocabulary that is read: 64 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class Imported:
    """A model of another program in the form of a run folder; `notes` go into its card."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: dict[str, Tensor]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A run to be exported: `model`, in eval mode, has these settings and tensors."""

    settings: Settings
    tokenizers: Tokenizers
    tensors: Mapping[str, Tensor]
    model: Any  # of any architecture
    quantization: str | None = None


def check_free(path: Path) -> None:
    """`UserError` where the place of a new folder is taken. An empty folder is free."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists already; give another folder, or remove it")


def make_parents(path: Path) -> None:
    """Create the parents of a new folder, after everything was checked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {path.parent}: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """The content of a file; `RunFolderError` where it is missing, not a regular file, or too large."""
    return atomic.read_bytes(path, most=MAX_BYTES)


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `RunFolderError` where it is missing (unless `optional`) or damaged."""
    if optional and not path.exists():
        return {}
    value = atomic.read_json(path, most=MAX_BYTES)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it does not contain a JSON object")
    return value


def check_model_type(folder: Path, config: Mapping[str, Any], supported: Mapping[str, Sequence[str]]) -> None:
    """Refuse a config.json of another model. `supported`: architectures by model_type; a file may name none."""
    model_type, named = str(config.get("model_type")), config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else None
    if model_type not in supported or architecture not in (*supported[model_type], None):
        known = "; ".join(f"model_type {kind}: {', '.join(names)}" for kind, names in supported.items())
        found = f"{architecture or 'a model'} (model_type {model_type})"
        raise UserError(f"{folder} contains {found}; supported here: {known}")


def read_weights(folder: Path, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a folder's weights whose names do not end in `without`.

    `UserError` where the file is missing, damaged or refused.
    """
    path = next((path for name in (SAFE, PICKLED) if (path := folder / name).exists()), None)
    if path is None:
        parts = next(folder.glob("*.index.json"), None)
        why = f" (weights in several files, listed in {parts.name}, are not supported)" if parts else ""
        raise RunFolderError(f"{folder} has no weights: neither {SAFE} nor {PICKLED} exists{why}")
    if not path.is_file():
        raise RunFolderError(f"{path} is not a file")
    tensors = load_tensors(path, sealed=False) if path.name == SAFE else _read_pickled(path)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Read with `weights_only`, PyTorch's restricted reader, which runs no code."""
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a hostile file can cause any error in the reader
        why = " ".join(str(error).split("WeightsUnpickler error:")[-1].split()[:14])[:300]
        raise UserError(
            f"{path} is refused: it contains more than tensors, or is damaged ({why or type(error).__name__})"
        ) from None
    if not isinstance(tensors, dict):
        raise UserError(f"{path} is refused: it does not contain named tensors")
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not isinstance(name, str) or not plain or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{path} is refused: {str(name)[:200]} is not a dense tensor with a name")
    return tensors
