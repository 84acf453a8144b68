"""The native engine for a PyTorch model in memory, models to test it with, and no library at all."""

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
from torch import nn

from oracle.stand_in import untrained
from transduce.config.architectures import TransformerSettings
from transduce.config.settings import Settings
from transduce.decoding.native_engine import NativeEngine
from transduce.decoding.native_model import NativeModel, NativePrecision
from transduce.decoding.torch_engine import TorchEngine
from transduce.kernels.calls import precisions
from transduce.kernels.library import load_library

needs_training_kernels = pytest.mark.skipif(not precisions(), reason="this CPU has no kernels of training")
needs_library = pytest.mark.skipif(isinstance(load_library(), str), reason="the native library is not built")

N_TOKENS = 700
TRANSLATORS: dict[str, dict[str, Any]] = {
    "paper": {},
    "modern": {
        **{"residual": "pre", "norm": "rms", "positions": "rotary", "feed_forward": "gated", "activation": "silu"},
        **{"n_kv_heads": 1, "bias": False},
    },
    "odd": {
        **{"d_model": 42, "d_ff": 33, "n_heads": 6, "n_kv_heads": 3, "n_encoder_layers": 1, "n_decoder_layers": 3},
        **{"positions": "learned", "max_positions": 90, "activation": "gelu", "embedding_norm": True, "tie": "none"},
        **{"residual": "pre", "output_bias": True, "norm_eps": 1e-3, "scale_embeddings": False},
    },
    "ssru": {"d_model": 72, "decoder_self": "ssru", "residual": "pre", "n_encoder_layers": 3},
    "t5": {
        **{"n_heads": 5, "d_key": 11, "d_value": 7, "positions": "t5", "activation": "gelu_tanh", "residual": "pre"},
        **{"norm": "rms", "bias": False, "tie": "none", "scale_embeddings": False},
    },
}
GPTS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "max_positions": 150, "one_end": True, "activation": "gelu_tanh"},
    "rotary": {"positions": "rotary", "n_heads": 8, "n_kv_heads": 2, "norm": "rms", "bias": False, "tie": "none"},
    "gpt with ALiBi": {"positions": "alibi", "n_heads": 6, "d_key": 24, "d_value": 24},
    "gpt with T5's positions": {"positions": "t5", "n_heads": 8, "n_kv_heads": 4},
}


def instruction_sets() -> list[str]:
    """Those that this CPU has, the fastest last."""
    library = load_library()
    assert not isinstance(library, str), library
    available = []
    for name in ("portable", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "amx"):
        with mock.patch.dict(os.environ, TRANSDUCE_NATIVE_ISA=name):
            if library.transduce_isa():
                available.append(name)
    return available


def translator_settings(**model: Any) -> Settings:
    sizes = {"d_model": 64, "d_ff": 128, "n_heads": 2, "n_encoder_layers": 2, "n_decoder_layers": 2}
    return Settings.from_mapping({"model": sizes | model})


@cache
def model_of(name: str) -> tuple[nn.Module, Settings]:
    """One of the models above, with N_TOKENS pieces on both sides."""
    if name in GPTS:
        sizes = {"kind": "gpt", "d_model": 64, "d_ff": 96, "n_heads": 2, "n_decoder_layers": 2, "residual": "pre"}
        settings = Settings.from_mapping({"task": "causal", "model": sizes | GPTS[name]})
    else:
        settings = translator_settings(**TRANSLATORS[name])
    return untrained(settings, n_src=N_TOKENS, n_tgt=N_TOKENS), settings


def engine_of(name: str, *, precision: NativePrecision = "float32", n_threads: int | None = None) -> NativeEngine:
    return engine_for(*model_of(name), precision=precision, n_threads=n_threads)


def pytorch_of(name: str) -> TorchEngine:
    return TorchEngine(model_of(name)[0])


def engine_for(
    model: nn.Module,
    settings: Settings,
    *,
    precision: NativePrecision = "float32",
    n_threads: int | None = None,
    placeholders: bool = False,
) -> NativeEngine:
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    tables = {side: weights.get(f"{side}_embedding.table.weight") for side in ("src", "tgt")}
    sizes = {f"n_{side}": len(weights["embedding.table.weight"] if t is None else t) for side, t in tables.items()}
    head = settings.model.guided_head if isinstance(settings.model, TransformerSettings) else None
    native = NativeModel(
        weights,
        settings.model,
        precision=precision,
        guided_head=head,
        placeholders=placeholders,
        **sizes,  # type: ignore[arg-type]
    )
    return NativeEngine(native, pytorch_model=lambda: model, n_threads=n_threads)


@contextlib.contextmanager
def library_missing() -> Iterator[None]:
    """Let this process decode as if the library were not installed."""
    with mock.patch.dict(os.environ, TRANSDUCE_NATIVE_LIBRARY="/no"):
        load_library.cache_clear()
        try:
            yield
        finally:
            load_library.cache_clear()
