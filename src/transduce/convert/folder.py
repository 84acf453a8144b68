"""A folder in the form of the Hugging Face hub: config.json, weights, and whatever its tokenizer needs."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from transduce.convert.limits import check_is_file, read_bytes
from transduce.errors import RunFolderError, UserError
from transduce.runs.tensors import load_tensors

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
_TIMES = 8
"""How often, at most, the tensors of a pickle may name the same numbers: tied weights stand there several times."""


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `RunFolderError` where it is missing (unless optional) or damaged."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged: {why_no_json(error)}") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it does not hold a JSON object")
    return value


def why_no_json(error: Exception) -> str:
    """What is wrong with a JSON file, for people: Python's own words only where they tell of the file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error) if isinstance(error, json.JSONDecodeError) else "it holds a number with too many digits"


def _kind_of(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """model_type, and the first of the architectures if it says any."""
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else None
    return str(config.get("model_type")), architecture


def check_model_type(folder: Path, config: Mapping[str, Any], supported: Mapping[str, Sequence[str]]) -> None:
    """Refuse a model of another kind; `supported`: architectures by model_type; a file may leave its own out."""
    found, architecture = _kind_of(config)
    if architecture not in (*supported.get(found, ()), None) or found not in supported:
        known = "; ".join(f"model_type {kind}: {', '.join(names)}" for kind, names in supported.items())
        raise UserError(f"{folder} holds {architecture or 'a model'} (model_type {found}); supported here: {known}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weights; a `UserError` where the file is missing, damaged or refused.

    A pickled file is read by PyTorch's restricted reader, which makes tensors and runs nothing; one that asks for more
    is refused, and so is one that would become larger in memory than it is.
    """
    if (folder / SAFE).exists():
        check_is_file(folder / SAFE)
        return load_tensors(folder / SAFE, sealed=False)
    path = folder / PICKLED
    if not path.exists():
        parts = sorted(p.name for p in folder.glob("*.index.json"))
        why = f" (weights in several files, as {parts[0]} lists them, are not read)" if parts else ""
        raise RunFolderError(f"{folder} has no weights: neither {SAFE} nor {PICKLED} is there{why}")
    check_is_file(path)
    _check_archive(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        why = _short(str(error).split("WeightsUnpickler error:")[-1])
        raise UserError(
            f"{path} is refused: it is a pickle that holds more than tensors, or is damaged ({why})"
        ) from None
    except Exception as error:  # what a reader of hostile files raises has no end
        if "weights_only" in str(error):
            raise UserError(f"{path} is refused: it is no plain file of tensors ({_short(str(error))})") from None
        raise RunFolderError(f"{path} is damaged: {_short(str(error)) or type(error).__name__}") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in tensors.items()
    ):
        raise UserError(f"{path} is refused: it does not hold named tensors")
    _check_memory(tensors, path)
    return dict(tensors)


def _check_archive(path: Path) -> None:
    """Refuse a zip file, which newer pickles are, that would grow: PyTorch stores its tensors as they are."""
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise RunFolderError(f"{path} is damaged: {_short(str(error))}") from None
    grown = sum(entry.file_size for entry in entries)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or grown > path.stat().st_size:
        raise UserError(f"{path} is refused: it is a compressed archive, of {grown:,} bytes once unpacked")


def _check_memory(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that are not dense ones in main memory, and such as take more of it than the file has bytes."""
    for name, tensor in tensors.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
            raise UserError(f"{path} is refused: {name[:200]} is no dense tensor of numbers")
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > _TIMES * path.stat().st_size:
        raise UserError(f"{path} is refused: its tensors would take {total:,} bytes, many times as many as it has")


def _short(text: str) -> str:
    return " ".join(text.split()[:14])[:300]
