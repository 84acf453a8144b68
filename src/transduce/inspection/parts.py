"""The parts of a model, with what was recorded of each; and the dot product behind a cell."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import transduce
from transduce.errors import SettingsError
from transduce.inspection.arrays import NamedArray, to_numpy
from transduce.inspection.part_kinds import PartKind, Point, kind_of
from transduce.nn.recording import Recording, title
from transduce.nn.recurrent import RecurrentEncoder


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model in the order of computation, with its recorded values by name."""

    name: str
    kind: PartKind
    module: nn.Module
    side: str
    keys: str
    stack: str  # encoder or decoder
    shape: tuple[int, ...] = ()  # of its output
    is_backward: bool = False  # a unit that reads from the end
    values: Mapping[str, NamedArray] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        return title(self.name) + (", backward" if self.is_backward else "")

    @property
    def layer(self) -> int | None:
        return next((int(word) for word in self.name.split(".") if word.isdigit()), None)

    def point(self, name: str) -> Point:
        """The point of a value of this part."""
        return next(point for point in self.kind.points if self.full_name(point) == name)

    def full_name(self, point: Point) -> str:
        """The name of a value."""
        return f"{self.name}.{point.name}" if point.name else self.name

    def source(self) -> dict[str, Any]:
        """The place of the computation: the file in this package, the line, and the code."""
        return source_of(self.kind.source or type(self.module).forward)


@cache
def source_of(function: Callable[..., Any]) -> dict[str, Any]:
    lines, line = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    root = Path(transduce.__file__).parent
    inside = file.relative_to(root) if file.is_relative_to(root) else Path(*file.parts[-4:])
    return {"file": inside.as_posix(), "line": line, "code": inspect.cleandoc("\n" + "".join(lines))}


def parts_of(model: nn.Module, found: Recording, side_of: Callable[[str], tuple[str, str]]) -> Iterator[Part]:
    """The parts of a model in the order of computation, with what was recorded of them.

    `side_of`: from a part's name, the sides that its positions and its keys belong to.
    """
    modules = dict(model.named_modules())
    shown: dict[str, PartKind] = {}
    for value in found:
        owner = value
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        kind = kind_of(modules[owner]) if owner else None
        nested = any(owner.startswith(f"{other}.") for other in _owners(owner, modules))
        if kind is not None and not nested:
            shown.setdefault(owner, kind)
    places = {owner: place for place, value in enumerate(found) for owner in _prefixes(value)}
    for name, kind in sorted(shown.items(), key=lambda item: places[item[0]]):
        side, keys = side_of(name)
        stack = "encoder" if name.startswith(("encoder", "src_embedding")) or side == "src" else "decoder"
        part = Part(name, kind, modules[name], side, keys, stack, is_backward=_is_backward(name, modules))
        values = dict(_values(part, found))
        yield replace(part, values=values, shape=list(values.values())[-1].shape if values else ())


def _is_backward(name: str, modules: Mapping[str, nn.Module]) -> bool:
    encoder = modules.get(name.partition(".layers.")[0])
    return isinstance(encoder, RecurrentEncoder) and encoder.reverse[int(name.rpartition(".")[2])]


def _owners(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The parts that contain a module: a norm inside a residual connection is not a separate part."""
    while name := name.rpartition(".")[0]:
        if kind_of(modules[name]) is not None:
            yield name


def _prefixes(name: str) -> Iterator[str]:
    """A value's own name and those of the modules around it; its last place is where a part is complete."""
    words = name.split(".")
    return (".".join(words[:n]) for n in range(1, len(words) + 1))


def _values(part: Part, found: Recording) -> Iterator[tuple[str, NamedArray]]:
    for point in part.kind.points:
        name = part.full_name(point)
        if point.name == "heads":
            if f"{part.name}.output.input" not in found:
                continue
            merged = found.value(f"{part.name}.output.input")
            value = merged.unflatten(-1, (-1, part.module.d_head)).transpose(1, 2)
        elif name in found:
            # The memory is the same at each step of a decoder.
            value = found[name][0] if point.of_keys else found.value(name)
        else:
            continue
        if point.name == "key" or point.name == "value":
            groups = getattr(part.module, "n_heads", 1) // value.shape[1]
            value = value.repeat_interleave(groups, 1)
        array = to_numpy(value)
        array = array[0] if array.shape[0] == 1 else array
        array = array[::-1] if part.is_backward else array
        while array.ndim > len(point.axes):
            array = array[0]
        if array.ndim < len(point.axes):
            continue
        if point.name == "bias":  # shared by heads and, where it only hides padding, by queries
            array = np.broadcast_to(array, found.value(f"{part.name}.weights").shape[1:])
        rows = part.keys if point.of_keys else part.side
        yield name, NamedArray(array, point.axes, point.title, rows, part.keys if point.keys else None)


@dataclass(frozen=True, slots=True)
class Operands:
    """The factors of a value: each cell is scale * left[..., i, :] . right[..., j, :] + bias[..., j]."""

    left: np.ndarray
    right: np.ndarray
    bias: np.ndarray | None
    scale: float


def operands(part: Part, name: str) -> Operands | None:
    """The operands of a value.

    None for a value that is not only a product: where queries and keys are rotated, where relations add to the values,
    and where heads share one projection.
    """
    value, product = part.values[name].array, part.point(name).product
    if product is None:
        return None
    left, bias = part.values[f"{part.name}.{product.left}"].array, None
    if product.weight is None:
        right = part.values[f"{part.name}.{product.right}"].array
        right = right if product.transposed else right.swapaxes(-1, -2)
    else:
        rows = product.weight(part.module)
        if rows is None:
            return None
        weight, biases = rows
        right, bias = to_numpy(weight), None if biases is None else to_numpy(biases)
        if value.ndim == 3:  # of heads, groups of which share keys and values
            n_groups, width = len(right) // value.shape[-1], value.shape[-1]
            repeats = len(value) // n_groups
            right = right.reshape(n_groups, width, -1).repeat(repeats, 0)
            bias = None if bias is None else bias.reshape(n_groups, width).repeat(repeats, 0)
    if (left.shape[-2], right.shape[-2]) != value.shape[-2:] or left.shape[-1] != right.shape[-1]:
        return None  # with segments, keys of the memory are not those of the text
    scale = product.scale(part.module)
    result = scale * (left @ right.swapaxes(-1, -2)) + (0.0 if bias is None else np.expand_dims(bias, -2))
    if not np.allclose(result, value, rtol=1e-4, atol=1e-4):
        return None
    return Operands(left, right, bias, scale)


def cell(part: Part, name: str, index: tuple[int, ...]) -> dict[str, Any] | None:
    """The dot product behind one cell of a value: its terms, scale and bias; None if it is none (see `operands`).

    Raises:
        SettingsError: There is no such cell.
    """
    shape = part.values[name].shape
    if len(index) != len(shape) or not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
        raise SettingsError(f"{list(index)}: {name} has no such cell; its shape is {list(shape)}")
    found, product = operands(part, name), part.point(name).product
    if found is None or product is None:
        return None
    *head, row, column = index
    a, b = (x[(*head[: x.ndim - 2], place)] for x, place in ((found.left, row), (found.right, column)))
    bias = None if found.bias is None else float(found.bias[(*head, column)])
    result = float(found.scale * (a.astype("f8") @ b.astype("f8")) + (bias or 0.0))
    terms = [[float(x), float(y)] for x, y in zip(a, b, strict=True)]
    text = f"{product.left} · {product.right or 'weights'}"
    return {"terms": terms, "scale": found.scale, "bias": bias, "result": result, "text": text}
