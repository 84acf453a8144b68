"""A model in the C++ library: which models it supports, and their weights as it takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Literal

import numpy as np

from transduce.config.architectures import GPTSettings, TransformerSettings
from transduce.errors import SettingsError
from transduce.native.library import loaded_library
from transduce.text.special import BOS, EOS, PAD

NativePrecision = Literal["float32", "float32-fast", "int8"]
PRECISIONS: tuple[NativePrecision, ...] = ("float32", "float32-fast", "int8")
"""The fastest last. The order is that of the codes of the native library."""

LONGEST_TEXT = 1 << 16
"""Tokens of a source or of a row of text, with its end."""

_NORMS, _ACTIVATIONS = ("layer", "rms"), ("relu", "gelu", "gelu_tanh", "silu")
_POSITIONS = ("none", "sinusoidal", "sinusoidal_halves", "learned", "rotary")
_FEED_FORWARDS = ("plain", "gated", "conv")
_NONE = np.empty(0)

NativeSettings = TransformerSettings | GPTSettings
"""Of the architectures that the library supports."""

Weights = Mapping[str, np.ndarray]
"""Arrays of float32 with the names of PyTorch's parameters."""


class Config(ctypes.Structure):
    """`transduce_config` of native/src/transduce_native.h; also the order of the fields."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("d_model", "d_ff", "n_heads", "n_kv_heads")),
        *((name, ctypes.c_int32) for name in ("n_encoder_layers", "n_decoder_layers", "n_src", "n_tgt")),
        *((name, ctypes.c_int32) for name in ("max_positions", "pre_norm", "norm", "embedding_norm")),
        *((name, ctypes.c_int32) for name in ("positions", "activation", "gated")),
        *((name, ctypes.c_float) for name in ("norm_eps", "embedding_scale")),
        *((name, ctypes.c_int32) for name in ("pad", "bos", "eos", "precision", "decoder_only", "recurrent", "tied")),
        *((name, ctypes.c_int32) for name in ("guided_layer", "guided_head")),
    ]


class NamedTensor(ctypes.Structure):
    """`transduce_tensor` of native/src/transduce_native.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    ]


def why_not(settings: NativeSettings) -> str | None:
    """The part of a model with these settings that the library does not support; None if it supports all."""
    s = settings
    unsupported = {
        f"model.positions = '{s.positions}'": s.positions not in _POSITIONS,
        f"model.feed_forward = '{s.feed_forward}'": s.feed_forward not in _FEED_FORWARDS or s.kernel_size > 1,
        f"model.activation = '{s.activation}'": s.activation not in _ACTIVATIONS,
        f"model.norm = '{s.norm}'": s.norm not in _NORMS,
        f"model.residual = '{s.residual}'": s.residual not in ("post", "pre"),
        f"model.decoder_pattern = '{s.decoder_pattern}'": s.decoder_pattern != "full",
        "model.encoder_pattern": isinstance(s, TransformerSettings) and s.encoder_pattern != "full",
        "model.source = 'vectors'": s.reads_vectors,
        f"model.d_key = {s.d_key}": s.key_width != s.d_head,
    }
    return next((name for name, found in unsupported.items() if found), None)


class NativeModel:
    """A model whose packed weights the library reads.

    handle: for its functions. start: the token that it reads as BOS.
    """

    def __init__(
        self,
        weights: Weights,
        settings: NativeSettings,
        *,
        n_src: int,
        n_tgt: int,
        precision: NativePrecision = "float32",
        guided_head: tuple[int, int] | None = None,
    ) -> None:
        """Pack the weights of a supported model.

        Args:
            weights: Not used after this call.
            settings: Of the model.
            n_src: Size of the source vocabulary.
            n_tgt: Size of the target vocabulary.
            precision: Of the matrix products.
            guided_head: Decoder layer and head that were trained to align, if any.

        Raises:
            SettingsError: The weights do not fit the settings.
        """
        self.library, self.handle, self.settings = loaded_library(), ctypes.c_void_p(), settings
        self.start = EOS if isinstance(settings, GPTSettings) and settings.one_end else BOS
        config = native_config(settings, precision, n_src=n_src, n_tgt=n_tgt, guided_head=guided_head)
        given = plain_weights(weights, settings)
        tensors = (NamedTensor * len(given))(
            *(NamedTensor(name.encode(), array.ctypes.data, *_matrix_shape(array)) for name, array in given.items())
        )
        self.library.transduce_model_new(ctypes.byref(config), tensors, len(tensors), ctypes.byref(self.handle))

    def __del__(self) -> None:
        if self.handle:
            self.library.transduce_model_free(self.handle)


def _matrix_shape(array: np.ndarray) -> tuple[int, ...]:
    """Rows and columns; a vector is a row, and no matrix has more dimensions."""
    return array.shape if array.ndim == 2 else (1, array.size) if array.ndim == 1 else (0, 0)


def plain_weights(weights: Weights, settings: NativeSettings) -> dict[str, np.ndarray]:
    """The weights as the library reads them: whole matrices, contiguous and aligned."""
    plain: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        if name == "output_embedding.weight" and settings.tie != "none":
            continue
        if ".parts." in name:  # of a projection that all heads share
            continue
        name = f"tgt_{name}" if name.startswith("embedding.") else name  # a decoder alone has one embedding
        plain[name] = array[..., 0] if array.shape[2:] == (1,) else array  # a convolution of width 1
    for prefix in {name.split(".parts.")[0] for name in weights if ".parts." in name}:
        n_parts = sum(name.startswith(f"{prefix}.parts.") and name.endswith(".weight") for name in weights)
        parts = [f"{prefix}.parts.{i}" for i in range(n_parts)]
        if any(weights.get(f"{part}.weight", _NONE).shape != (settings.d_head,) * 2 for part in parts):
            raise SettingsError(f"{prefix} has no square matrices of model.d_model / model.n_heads rows")
        heads = np.eye(settings.n_heads, dtype=np.float32)  # the same matrix for each
        plain[f"{prefix}.weight"] = np.concatenate([np.kron(heads, weights[f"{part}.weight"]) for part in parts])
        if settings.bias:
            plain[f"{prefix}.bias"] = np.concatenate([np.tile(weights[f"{p}.bias"], settings.n_heads) for p in parts])
    return {name: np.require(array, np.float32, ["C", "A"]) for name, array in plain.items()}


def native_config(
    settings: NativeSettings,
    precision: NativePrecision,
    *,
    n_src: int,
    n_tgt: int,
    guided_head: tuple[int, int] | None = None,
) -> Config:
    """The settings of a supported model as the library takes them."""
    s, (guided_layer, head) = settings, guided_head or (-1, -1)
    return Config(
        d_model=s.d_model,
        d_ff=s.d_ff,
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads or s.n_heads,
        n_encoder_layers=s.n_encoder_layers if isinstance(s, TransformerSettings) else 0,
        n_decoder_layers=s.n_decoder_layers,
        n_src=n_src,
        n_tgt=n_tgt,
        max_positions=s.max_positions,
        pre_norm=s.residual == "pre",
        norm=_NORMS.index(s.norm),
        embedding_norm=s.embedding_norm,
        positions=_POSITIONS.index(s.positions),
        activation=_ACTIVATIONS.index(s.activation),
        gated=s.feed_forward == "gated",
        norm_eps=s.epsilon,
        embedding_scale=s.d_model**0.5 if s.scale_embeddings else 1.0,
        pad=PAD,
        bos=BOS,
        eos=EOS,
        precision=PRECISIONS.index(precision),
        decoder_only=isinstance(s, GPTSettings),
        recurrent=s.replaces_self_attention,
        tied=s.tie != "none",
        guided_layer=guided_layer,
        guided_head=head,
    )
