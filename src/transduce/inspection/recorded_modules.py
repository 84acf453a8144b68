"""The modules of a model with their recorded values, and the dot product that computed a cell of a value.

Values are arrays with named axes. In JSON, an array is the base64 of its bytes.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import transduce
from transduce.errors import SettingsError
from transduce.inspection.module_descriptions import SCORES, ModuleDescription, Value, description_of, specialized
from transduce.nn.masks import HIDDEN
from transduce.nn.recording import Recording, title
from transduce.nn.recurrent import RecurrentEncoder
from transduce.nn.stack import PreNorm

_LARGEST_HALF = 6e4


@dataclass(frozen=True, slots=True, eq=False)
class NamedArray:
    """A value of a model: a float32 `array`, the names of its axes, and a title.

    rows, columns: names of the sides of a `Sentence` whose tokens are along the last two axes; None for other axes.
    """

    array: np.ndarray
    axes: tuple[str, ...]
    title: str
    rows: str | None = None
    columns: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:  # any index of a NumPy array
        return self.array[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={n}" for axis, n in zip(self.axes, self.shape, strict=True))
        return f"<{self.title}: {sizes}>"


def to_numpy(value: Tensor) -> np.ndarray:
    """Convert a tensor to a float32 array. The large negative scores of masked keys become -inf."""
    array = value.detach().float().cpu().numpy()
    is_hidden = array < HIDDEN / 2
    return np.where(is_hidden, -np.inf, array) if is_hidden.any() else array


def pack(array: np.ndarray | Tensor) -> dict[str, Any]:
    """Return plain data: shape, dtype, and the bytes in C order, little-endian, as base64.

    Numbers are stored in float16, with three significant digits, or in float32 if they are too large; bool in uint8.
    """
    values = to_numpy(array) if isinstance(array, Tensor) else array
    if values.dtype == bool:
        values = values.astype(np.uint8)
    elif values.dtype != np.uint8:
        finite = np.abs(values[np.isfinite(values)])
        values = values.astype("<f4" if finite.size and finite.max() > _LARGEST_HALF else "<f2")
    return {
        "shape": list(values.shape),
        "dtype": values.dtype.name,
        "data": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii"),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Restore an array from the result of `pack`."""
    return np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"]).reshape(packed["shape"])


@dataclass(frozen=True, slots=True)
class RecordedModule:
    """A module of the model with its recorded values by name.

    side, keys: names of the sides of a `Sentence` along its positions and its keys.
    """

    name: str
    kind: ModuleDescription
    module: nn.Module
    side: str
    keys: str
    stack: str  # encoder or decoder
    shape: tuple[int, ...] = ()  # shape of its output
    is_backward: bool = False  # a recurrent unit that reads from the end
    values: Mapping[str, NamedArray] = field(default_factory=dict, repr=False)

    @property
    def title(self) -> str:
        return title(self.name) + (", backward" if self.is_backward else "")

    @property
    def layer(self) -> int | None:
        return next((int(word) for word in self.name.split(".") if word.isdigit()), None)

    def point(self, name: str) -> Value:
        return next(point for point in self.kind.points if self.full_name(point.name) == name)

    def full_name(self, point: str) -> str:
        return f"{self.name}.{point}" if point else self.name

    def source(self) -> dict[str, Any]:
        """Return the file in this package, the line and the code of the computation."""
        return source_of(self.kind.source or type(self.module).forward)

    def line(self, name: str) -> tuple[dict[str, Any], int] | None:
        """Return the source that computes a value, and the line's index in it, from 0; None if it is not known."""
        if (line := self.point(name).line) is None:
            return None
        code = source_of(line[0]) if line[0] else self.source()
        numbers = [number for number, text in enumerate(code["code"].split("\n")) if line[1] in text]
        return (code, numbers[-1]) if numbers else None


@cache
def source_of(function: Callable[..., Any]) -> dict[str, Any]:
    lines, line = inspect.getsourcelines(function)
    file = Path(inspect.getsourcefile(function) or "")
    root = Path(transduce.__file__).parent
    inside = file.relative_to(root) if file.is_relative_to(root) else Path(*file.parts[-4:])
    return {"file": inside.as_posix(), "line": line, "code": inspect.cleandoc("\n" + "".join(lines))}


def parts_of(
    model: nn.Module, recording: Recording, side_of: Callable[[str], tuple[str, str]]
) -> Iterator[RecordedModule]:
    """Yield the modules to show, in the order of computation, with their recorded values.

    `side_of`: maps a module's name to the names of the sides along its positions and its keys.
    """
    modules = dict(model.named_modules())
    shown: dict[str, ModuleDescription] = {}
    for value in recording:
        owner = value
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        kind = description_of(modules[owner]) if owner else None
        nested = any(owner.startswith(f"{other}.") for other in _owners(owner, modules))
        if kind is not None and not nested:
            shown.setdefault(owner, kind)
    order = {owner: number for number, value in enumerate(recording) for owner in _prefixes(value)}
    for name, kind in sorted(shown.items(), key=lambda item: order[item[0]]):
        side, keys = side_of(name)
        stack = "encoder" if name.startswith(("encoder", "src_embedding")) or side == "src" else "decoder"
        kind = specialized(kind, modules[name], modules.get(f"{name}_residual"))
        part = RecordedModule(name, kind, modules[name], side, keys, stack, is_backward=_is_backward(name, modules))
        values = dict(_values(part, recording))
        yield replace(part, values=values, shape=list(values.values())[-1].shape if values else ())


def _is_backward(name: str, modules: Mapping[str, nn.Module]) -> bool:
    encoder = modules.get(name.partition(".layers.")[0])
    return isinstance(encoder, RecurrentEncoder) and encoder.reverse[int(name.rpartition(".")[2])]


def _owners(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the modules that contain this module and are shown. If there are any, this module is not shown separately.

    A norm after a residual connection is shown with its sub-layer; a norm before a sub-layer is shown separately.
    """
    while name := name.rpartition(".")[0]:
        if description_of(modules[name]) is not None and not isinstance(modules[name], PreNorm):
            yield name


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a value, outermost first, then its own name."""
    words = name.split(".")
    return (".".join(words[:n]) for n in range(1, len(words) + 1))


def _values(part: RecordedModule, recording: Recording) -> Iterator[tuple[str, NamedArray]]:
    for point in part.kind.points:
        name = part.full_name(point.name)
        if point.name == "heads":
            if f"{part.name}.output.input" not in recording:
                continue
            merged = recording.value(f"{part.name}.output.input")
            value = merged.unflatten(-1, (-1, part.module.d_head)).transpose(1, 2)
        elif name in recording:
            # The memory does not change between steps of a decoder.
            value = recording[name][0] if point.of_keys else recording.value(name)
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
        if point.name == "bias":  # the bias is broadcast over heads and, if it only hides padding, over queries
            array = np.broadcast_to(array, recording.value(f"{part.name}.weights").shape[1:])
        rows = part.keys if point.of_keys else part.side
        yield name, NamedArray(array, point.axes, point.title, rows, part.keys if point.axes == SCORES else None)


@dataclass(frozen=True, slots=True)
class Operands:
    """The factors of a value: each cell is scale * left[..., i, :] . right[..., j, :] + bias[..., j]."""

    left: np.ndarray
    right: np.ndarray
    bias: np.ndarray | None
    scale: float


def operands(part: RecordedModule, name: str) -> Operands | None:
    """Return the factors of a value that is a matrix product; None for any other value.

    Examples of other values: rotated queries and keys, relations added to values, heads that share a projection.
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
        if value.ndim == 3:  # heads may share keys and values: repeat their weights for each head
            n_groups, width = len(right) // value.shape[-1], value.shape[-1]
            repeats = len(value) // n_groups
            right = right.reshape(n_groups, width, -1).repeat(repeats, 0)
            bias = None if bias is None else bias.reshape(n_groups, width).repeat(repeats, 0)
    if (left.shape[-2], right.shape[-2]) != value.shape[-2:] or left.shape[-1] != right.shape[-1]:
        return None  # with a segment memory, keys belong to the memory too, not only to the text
    scale = left.shape[-1] ** -0.5 if product.scaled else 1.0
    result = scale * (left @ right.swapaxes(-1, -2)) + (0.0 if bias is None else np.expand_dims(bias, -2))
    if not np.allclose(result, value, rtol=1e-4, atol=1e-4):
        return None
    return Operands(left, right, bias, scale)


def cell(part: RecordedModule, name: str, index: tuple[int, ...]) -> dict[str, Any] | None:
    """Return the terms, scale and bias of the dot product that computed a cell; None if there are no `operands`.

    Raises:
        SettingsError: There is no such cell.
    """
    shape = part.values[name].shape
    if len(index) != len(shape) or not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
        raise SettingsError(f"{list(index)}: {name} has no such cell; its shape is {list(shape)}")
    factors, product = operands(part, name), part.point(name).product
    if factors is None or product is None:
        return None
    *head, row, column = index
    a, b = (x[(*head[: x.ndim - 2], index)] for x, index in ((factors.left, row), (factors.right, column)))
    bias = None if factors.bias is None else float(factors.bias[(*head, column)])
    result = float(factors.scale * (a.astype("f8") @ b.astype("f8")) + (bias or 0.0))
    terms = [[float(x), float(y)] for x, y in zip(a, b, strict=True)]
    text = f"{product.left} · {product.right or 'weights'}"
    return {"terms": terms, "scale": factors.scale, "bias": bias, "result": result, "text": text}
