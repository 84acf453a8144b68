"""A folder in the form of the Hugging Face hub: config.json, weights, and whatever its tokenizer needs."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from transduce.errors import RunFolderError, UserError
from transduce.files import read_json
from transduce.tensors import load_tensors

MOST_VOCABULARY = 1 << 30
"""Bytes of the largest vocabulary file that is read."""

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; `RunFolderError` where it is missing (unless optional) or damaged."""
    if optional and not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it does not hold a JSON object")
    return value


def check_source(folder: Path) -> None:
    """Refuse a folder that is not there, or with pipes and devices in it: reading those may never end."""
    if not folder.is_dir():
        raise RunFolderError(f"there is no folder {folder}")
    for path in sorted(folder.iterdir()):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise RunFolderError(f"{path} is no file")


def check_architecture(folder: Path, config: Mapping[str, Any], supported: Mapping[str, str]) -> None:
    """Refuse a model of another kind; `supported`: architecture by model_type."""
    found = str(config.get("model_type"))
    architecture = _architecture(config)
    if found in supported and architecture in (supported[found], None):
        return
    known = ", ".join(f"{name} (model_type {kind})" for kind, name in supported.items())
    raise UserError(f"{folder} holds {architecture or 'a model'} (model_type {found}); supported here: {known}")


def _architecture(config: Mapping[str, Any]) -> str | None:
    named = config.get("architectures") or [None]
    return str(named[0]) if isinstance(named, list) and named[0] is not None else None


def check_model_type(folder: Path, config: Mapping[str, Any], supported: Mapping[str, Sequence[str]]) -> None:
    """Refuse a model of another kind; `supported`: architectures by model_type; a file may leave its own out."""
    found = str(config.get("model_type"))
    architecture = _architecture(config)
    if architecture not in (*supported.get(found, ()), None) or found not in supported:
        known = "; ".join(f"model_type {kind}: {', '.join(names)}" for kind, names in supported.items())
        raise UserError(f"{folder} holds {architecture or 'a model'} (model_type {found}); supported here: {known}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weights; `RunFolderError` where the file is missing or damaged.

    A pickled file is read by PyTorch's restricted reader, which makes tensors and runs nothing; one that asks for more
    is refused.
    """
    if (folder / SAFE).exists():
        return load_tensors(folder / SAFE, sealed=False)
    path = folder / PICKLED
    if not path.exists():
        raise RunFolderError(f"{folder} has no weights: neither {SAFE} nor {PICKLED} is there")
    _check_pickle(path)
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        why = " ".join(str(error).split("WeightsUnpickler error:")[-1].split()[:14])
        raise UserError(
            f"{path} is refused: it is a pickle that holds more than tensors, or is damaged ({why})"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # damage makes the reader stumble in every way that there is
        raise RunFolderError(f"{path} is damaged: {' '.join(str(error).split()[:14])}") from None
    if not isinstance(tensors, dict) or not all(isinstance(name, str) and _is_plain(t) for name, t in tensors.items()):
        raise UserError(f"{path} is refused: it does not hold named tensors, each with its own numbers")
    return tensors


def _check_pickle(path: Path) -> None:
    """Refuse an archive that is packed, which PyTorch's never are: a small one could become a huge one."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise RunFolderError(f"{path} is damaged: {' '.join(str(error).split()[:14])}") from None
    size = path.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size for entry in entries):
        raise UserError(f"{path} is refused: it is a packed archive; PyTorch writes them unpacked")


def _is_plain(value: object) -> bool:
    """Whether this is a tensor whose numbers are all in memory, and not a small one shown as a huge one."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.is_contiguous() or value.numel() * value.element_size() <= value.untyped_storage().nbytes()
