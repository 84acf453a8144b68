"""Reader of a CTranslate2 model's untrusted files: model.bin with the variables, vocabularies, and config.json.

Quantized weights become float32: a weight q of 8 or 16 bits with the scale s of its row stands for q / s.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.convert.folder import MAX_BYTES, read_bytes, read_object
from transduce.errors import RunFolderError
from transduce.runs.atomic import read_json, reading

MODEL = "model.bin"
_VERSIONS = range(4, 7)
"""Versions of model.bin that store the type of each variable. CTranslate2 1.20 (2021) wrote the first of them."""
_TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFiles:
    """The content of a model: specification (`spec`), weights, numbers such as flags, and config.json.

    Names of weights and numbers are converted by `dotted`.
    """

    spec: str
    tensors: dict[str, Tensor]
    numbers: dict[str, float]
    config: Mapping[str, Any]


def dotted(name: str) -> str:
    """Convert the name of a variable to PyTorch's form.

    >>> dotted("encoder/layer_0/ffn/layer_norm/gamma")
    'encoder.layer_0.ffn.layer_norm.weight'
    """
    scope, _, last = name.replace("/", ".").rpartition(".")
    return f"{scope}.{ {'gamma': 'weight', 'beta': 'bias'}.get(last, last) }" if scope else last


def read_model(folder: Path) -> ModelFiles:
    """Read model.bin and config.json; `RunFolderError` if one of them is damaged or of an unknown version."""
    path = folder / MODEL
    try:
        with reading(path), path.open("rb") as file:
            content = bytearray(path.stat().st_size)
            file.readinto(content)
        spec, variables = _read_variables(memoryview(content))
    except (struct.error, ValueError, RuntimeError) as error:
        raise RunFolderError(f"{path} is damaged, or not a model of CTranslate2: {error}") from None
    tensors, numbers = dict[str, Tensor](), dict[str, float]()
    for name, value in variables.items():
        if name.endswith("weight_scale"):
            continue
        if value.dim() == 0:
            numbers[dotted(name)] = value.item()
            continue
        scale = variables.get(f"{name}_scale")
        if not value.is_floating_point():
            if scale is None or scale.numel() not in (1, len(value)):
                raise RunFolderError(f"{path}: {name} has integers without their scale")
            value = value.float() / scale.float().reshape(-1, *[1] * (value.dim() - 1))
        tensors[dotted(name)] = value
    return ModelFiles(spec, tensors, numbers, read_object(folder / "config.json", optional=True))


def _read_variables(content: memoryview) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the model's specification, and its variables; aliases are resolved."""
    position = 0

    def read(form: str) -> Any:
        nonlocal position
        values = struct.unpack_from(f"<{form}", content, position)
        position += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def read_text() -> str:
        return bytes(read(f"{read('H')}s")).rstrip(b"\0").decode("utf-8")

    if (version := read("I")) not in _VERSIONS:
        raise ValueError(f"its version is {version}; supported: {_VERSIONS[0]} to {_VERSIONS[-1]}")
    spec, _revision = read_text(), read("I")
    variables = dict[str, Tensor]()
    for _ in range(read("I")):
        name, n_dimensions = read_text(), read("B")
        shape = struct.unpack_from(f"<{n_dimensions}I", content, position)
        position += 4 * n_dimensions
        type_id, n_bytes = read("B"), read("I")
        if type_id >= len(_TYPES) or n_bytes != math.prod(shape) * _TYPES[type_id].itemsize or not n_bytes:
            raise ValueError(f"{name[:200]} of shape {list(shape)} and type {type_id} has {n_bytes:,} bytes")
        if position + n_bytes > len(content):
            raise ValueError("it is truncated")
        flat = torch.frombuffer(content, dtype=torch.uint8, count=n_bytes, offset=position).clone()
        variables[name] = flat.view(_TYPES[type_id]).reshape(shape)
        position += n_bytes
    for _ in range(read("I")):
        alias, name = read_text(), read_text()
        if name not in variables:
            raise ValueError(f"{alias[:200]} stands for {name[:200]}, which does not exist")
        variables[alias] = variables[name]
        if f"{name}_scale" in variables:
            variables[f"{alias}_scale"] = variables[f"{name}_scale"]
    return spec, variables


def read_vocabularies(folder: Path) -> tuple[list[str], list[str]]:
    """Read the pieces of source and target, in the order of their ids; a shared vocabulary is returned twice."""
    shared = _read_vocabulary(folder, "shared")
    if shared is not None:
        return shared, shared
    source, target = _read_vocabulary(folder, "source"), _read_vocabulary(folder, "target")
    if source is None or target is None:
        raise RunFolderError(f"{folder} has no vocabulary: neither shared_vocabulary.json nor source and target")
    return source, target


def _read_vocabulary(folder: Path, side: str) -> list[str] | None:
    """Read the vocabulary of a side from JSON or, in older models, text with a piece per line; None without a file."""
    path = folder / f"{side}_vocabulary.json"
    if path.exists():
        pieces = read_json(path, most=MAX_BYTES)
        if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
            raise RunFolderError(f"{path} is damaged: it is not a list of texts")
        return pieces
    path = folder / f"{side}_vocabulary.txt"
    if not path.exists():
        return None
    try:
        return read_bytes(path).decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        raise RunFolderError(f"{path} is not valid UTF-8") from None
