"""Arrays with named axes, and their form in JSON: base64 of their bytes."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from transduce.nn.masks import HIDDEN

_LARGEST_HALF = 6e4


@dataclass(frozen=True, slots=True, eq=False)
class NamedArray:
    """A value of a model: a float32 `array`, the names of its axes, and a title.

    rows, columns: sides of `Sentence.sides` whose tokens are along the last two axes; None for other axes.
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
    """Convert a tensor to float32. The large negative scores of hidden keys become -inf."""
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
    """Read the result of `pack`."""
    return np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"]).reshape(packed["shape"])
