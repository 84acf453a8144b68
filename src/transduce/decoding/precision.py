"""The precisions of an engine."""

from __future__ import annotations

from typing import Literal

from transduce.decoding.native_model import PRECISIONS, NativePrecision
from transduce.errors import SettingsError

TorchPrecision = Literal["float32", "bfloat16"]
"""Of weights in PyTorch."""
AnyPrecision = TorchPrecision | NativePrecision


def check_precision(precision: str, *, on_cpu: bool) -> None:
    """Raise `SettingsError` unless this is one of `AnyPrecision` that the device has."""
    if precision not in (allowed := (*PRECISIONS, "bfloat16")):
        raise SettingsError(f"precision = {precision!r}: allowed are {', '.join(allowed)}")
    if not on_cpu and precision not in ("float32", "bfloat16"):
        raise SettingsError(f"precision = {precision!r} needs device = 'cpu'; or use float32 or bfloat16")
