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
    """A value of a model: `array` float32, the names of its axes, and a title.

    rows, columns: the sides whose tokens the last two axes belong to, see `Sentence.sides`; None for other axes.
    """

    array: np.ndarray
    axes: tuple[str, ...]
    title: str
    rows: str | None = None
    columns: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype) if copy else np.asarray(self.array, dtype=dtype)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={n}" for axis, n in zip(self.axes, self.shape, strict=True))
        return f"<{self.title}: {sizes}>"


def to_numpy(value: Tensor) -> np.ndarray:
    """A tensor as float32; what hides a key in a bias becomes -inf."""
    found = value.detach().float().cpu().numpy()
    return np.where(found < HIDDEN / 2, -np.inf, found) if (found < HIDDEN / 2).any() else found


def pack(array: np.ndarray | Tensor) -> dict[str, Any]:
    """Plain data: shape, dtype and the bytes in C order, little-endian, as base64.

    float16, which has three significant digits, or float32 where the numbers are too large for it; uint8 for bool.
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
    """The inverse of `pack`."""
    return np.frombuffer(base64.b64decode(packed["data"]), dtype=packed["dtype"]).reshape(packed["shape"])
