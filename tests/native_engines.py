"""The native engine for a PyTorch model in memory, and none at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from torch import nn

from transduce.config.settings import Settings
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_library import load_library
from transduce.decoding.native_model import NativeModel, NativePrecision
from transduce.decoding.torch_engine import TorchEngine


def engine_for(
    model: nn.Module, settings: Settings, *, precision: NativePrecision = "float32", n_threads: int | None = None
) -> NativeEngine:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tables = {side: weights.get(f"{side}_embedding.table.weight") for side in ("src", "tgt")}
    sizes = {f"n_{side}": len(weights["embedding.table.weight"] if t is None else t) for side, t in tables.items()}
    native = NativeModel(weights, settings.model, precision=precision, **sizes)  # type: ignore[arg-type]
    reference = TorchEngine(model)
    return NativeEngine(native, reference=lambda: reference, n_threads=n_threads)


@contextlib.contextmanager
def library_missing() -> Iterator[None]:
    """Let this process decode as if the library were not installed."""
    with mock.patch.dict(os.environ, TRANSDUCE_NATIVE_LIBRARY="/no"):
        load_library.cache_clear()
        try:
            yield
        finally:
            load_library.cache_clear()
