"""Reading a model folder in Hugging Face's layout: JSON files and weights. Everything in it is untrusted data."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from transduce.errors import RunFolderError, UserError
from transduce.runs import atomic
from transduce.runs.tensors import load_tensors

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"

MAX_BYTES = 1 << 26
"""Largest JSON file or vocabulary that is read: 64 MiB."""

_MAX_SHARING = 8
"""How much larger the tensors of a pickle may be than the file. Tied weights are stored once."""


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weights; `UserError` where the file is missing, damaged or refused.

    `pytorch_model.bin` is read with `weights_only`, PyTorch's restricted reader, which runs no code. A file that asks
    for anything but tensors is refused, and so is one whose tensors would be much larger than the file.
    """
    if (folder / SAFE).exists():
        if not (folder / SAFE).is_file():
            raise RunFolderError(f"{folder / SAFE} is not a file")
        return load_tensors(folder / SAFE, sealed=False)
    path = folder / PICKLED
    if not path.is_file():
        if path.exists():
            raise RunFolderError(f"{path} is not a file")
        parts = sorted(p.name for p in folder.glob("*.index.json"))
        why = f" (weights in several files, listed in {parts[0]}, are not supported)" if parts else ""
        raise RunFolderError(f"{folder} has no weights: neither {SAFE} nor {PICKLED} exists{why}")
    return _read_pickled(path)


def _read_pickled(path: Path) -> dict[str, Tensor]:
    _check_archive(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        why = _short(str(error).split("WeightsUnpickler error:")[-1])
        raise UserError(f"{path} is refused: it contains more than tensors, or is damaged ({why})") from None
    except Exception as error:  # a hostile file can cause any error in the reader
        if "weights_only" in str(error):
            raise UserError(f"{path} is refused: it is not a plain file of tensors ({_short(str(error))})") from None
        raise RunFolderError(f"{path} is damaged: {_short(str(error)) or type(error).__name__}") from None
    if not isinstance(tensors, dict):
        raise UserError(f"{path} is refused: it does not contain named tensors")
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not isinstance(name, str) or not plain or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{path} is refused: {str(name)[:200]} is not a dense tensor with a name")
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > _MAX_SHARING * path.stat().st_size:
        raise UserError(f"{path} is refused: its tensors would take {total:,} bytes, many times the size of the file")
    return dict(tensors)


def _check_archive(path: Path) -> None:
    """Refuse a compressed zip archive: PyTorch stores tensors uncompressed, so this one would grow in memory."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:  # a hostile file can cause any error in the reader
        raise RunFolderError(f"{path} is damaged: {_short(str(error))}") from None
    size = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or size > path.stat().st_size:
        raise UserError(f"{path} is refused: it is a compressed archive of {size:,} bytes")


def _short(text: str) -> str:
    return " ".join(text.split()[:14])[:300]
