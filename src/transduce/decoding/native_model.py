"""A model in the C++ library: supported settings, and conversion of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Literal

import numpy as np

from transduce.config.architectures import GPTSettings, TransformerSettings
from transduce.errors import RunFolderError, SettingsError, TransduceError
from transduce.kernels.library import loaded_library
from transduce.runs.tensor_file import StoredTensor
from transduce.text.special import BOS, EOS, PAD, PLACEHOLDER_IDS, UNK

NativePrecision = Literal["float32", "float32-fast", "int8"]
PRECISIONS: tuple[NativePrecision, ...] = ("float32", "float32-fast", "int8")
"""Precisions of the native library, in the order of its codes; the fastest is last."""

LONGEST_TEXT = 1 << 16
"""Maximum number of tokens of a source or of a row of text, including its end."""

_NORMS, _ACTIVATIONS = ("layer", "rms"), ("relu", "gelu", "gelu_tanh", "silu")
_SINUSOIDS = ("sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "sinusoidal_marian")
_POSITIONS = ("none", "learned", "rotary", "t5", "alibi", *_SINUSOIDS)
_NONE = np.empty(0)

NativeSettings = TransformerSettings | GPTSettings
"""Settings of the architectures that the library supports."""

Weights = Mapping[str, np.ndarray | StoredTensor]
"""Float32 weights by the names of PyTorch's parameters."""

READ = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, ctypes.c_void_p)
"""The callback type `transduce_read` of transduce_native.h."""


class Config(ctypes.Structure):
    """The struct `transduce_config` of native/src/transduce_native.h, with fields in its order."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("d_model", "d_ff", "n_heads", "n_kv_heads", "d_key", "d_value")),
        *((name, ctypes.c_int32) for name in ("n_encoder_layers", "n_decoder_layers", "n_src", "n_tgt")),
        *((name, ctypes.c_int32) for name in ("max_positions", "pre_norm", "norm", "embedding_norm")),
        *((name, ctypes.c_int32) for name in ("positions", "activation", "gated")),
        *((name, ctypes.c_float) for name in ("norm_eps", "embedding_scale")),
        *((name, ctypes.c_int32) for name in ("pad", "unk", "bos", "eos", "start", "placeholder")),
        *((name, ctypes.c_int32) for name in ("precision", "decoder_only", "recurrent", "tied", "tied_inputs")),
        *((name, ctypes.c_int32) for name in ("guided_layer", "guided_head")),
    ]


class NamedTensor(ctypes.Structure):
    """The struct `transduce_tensor` of native/src/transduce_native.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    ]


def why_not(settings: NativeSettings) -> str | None:
    """Name the first unsupported part of a model; None if the library supports the settings."""
    s = settings
    unsupported = {
        f"model.positions = '{s.positions}'": s.positions not in _POSITIONS,
        f"model.feed_forward = '{s.feed_forward}'": s.kernel_size > 1,
        f"model.activation = '{s.activation}'": s.activation not in _ACTIVATIONS,
        f"model.norm = '{s.norm}'": s.norm not in _NORMS,
        f"model.residual = '{s.residual}'": s.residual not in ("post", "pre"),
        f"model.decoder_pattern = '{s.decoder_pattern}'": s.decoder_pattern != "full",
        "model.encoder_pattern": isinstance(s, TransformerSettings) and s.encoder_pattern != "full",
        "model.source": isinstance(s, TransformerSettings) and s.source != "tokens",
    }
    return next((name for name, is_unsupported in unsupported.items() if is_unsupported), None)


class NativeModel:
    """A model in the library, with packed weights.

    handle: pointer for the library's functions. start: id of the token that starts a target.
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
        placeholders: bool = False,
    ) -> None:
        """Pack the weights of a supported model; they are not used after this call.

        `n_src`, `n_tgt`: sizes of the vocabularies. `guided_head`: decoder layer and head that were trained to align.
        `placeholders`: whether the vocabulary has any. Raises `SettingsError` if weights and settings do not match.
        """
        self.library, self.handle, self.settings = loaded_library(), ctypes.c_void_p(), settings
        config = native_config(settings, precision, n_src=n_src, n_tgt=n_tgt, guided_head=guided_head)
        self.start = config.start
        config.placeholder = PLACEHOLDER_IDS.start if placeholders else -1
        given, errors = plain_weights(weights, settings), list[Exception]()
        tensors = (NamedTensor * len(given))(*(_named_tensor(name, tensor) for name, tensor in given.items()))
        in_order = list(given.values())

        @READ
        def read(number: int, first: int, n: int, to: int) -> bool:
            columns = tensors[number].columns
            try:
                values = np.frombuffer((ctypes.c_float * (n * columns)).from_address(to), np.float32)
                if isinstance(tensor := in_order[number], StoredTensor):
                    tensor.read(first * columns, values)
                else:
                    values[:] = tensor.reshape(-1)[first * columns :][: n * columns]
            except RunFolderError as error:
                errors.append(error)
            return not errors

        try:
            self.library.transduce_model_new(
                ctypes.byref(config), tensors, len(tensors), read, ctypes.byref(self.handle)
            )
        except TransduceError as error:
            raise next(iter(errors), error) from None

    def __del__(self) -> None:
        if self.handle:
            self.library.transduce_model_free(self.handle)


def _named_tensor(name: str, tensor: np.ndarray | StoredTensor) -> NamedTensor:
    """Describe a matrix or, as one row, a vector. Other tensors get the size (0, 0), which fits no matrix."""
    shape = tensor.shape[:2] if tensor.shape[2:] == (1,) else tensor.shape  # a convolution of width 1
    return NamedTensor(name.encode(), *((1, *shape)[-2:] if 0 < len(shape) < 3 else (0, 0)))


def plain_weights(weights: Weights, settings: NativeSettings) -> Weights:
    """Rename weights, drop tied copies, and expand matrices that heads share, as the library expects."""
    tied = {"output_embedding.weight": settings.ties_output, "src_embedding.table.weight": settings.ties_inputs}
    plain: dict[str, np.ndarray | StoredTensor] = {}
    for name, array in weights.items():
        if tied.get(name) or ".parts." in name:  # a projection that all heads share is expanded below
            continue
        name = f"tgt_{name}" if name.startswith("embedding.") else name  # a decoder-only model has one embedding
        plain[name] = array
    for prefix in {name.split(".parts.")[0] for name in weights if ".parts." in name}:
        n_parts = sum(name.startswith(f"{prefix}.parts.") and name.endswith(".weight") for name in weights)
        parts = [f"{prefix}.parts.{i}" for i in range(n_parts)]
        if any(weights.get(f"{part}.weight", _NONE).shape != (settings.d_head,) * 2 for part in parts):
            raise SettingsError(f"{prefix} has no square matrices of model.d_model / model.n_heads rows")
        heads = np.eye(settings.n_heads, dtype=np.float32)  # each head gets its copy of the shared matrix
        plain[f"{prefix}.weight"] = np.concatenate([np.kron(heads, weights[f"{part}.weight"]) for part in parts])
        if settings.bias:
            plain[f"{prefix}.bias"] = np.concatenate([np.tile(weights[f"{p}.bias"], settings.n_heads) for p in parts])
    return plain


def native_config(
    settings: NativeSettings,
    precision: NativePrecision,
    *,
    n_src: int,
    n_tgt: int,
    guided_head: tuple[int, int] | None = None,
) -> Config:
    """Convert the settings of a supported model to the library's struct."""
    s, (guided_layer, head) = settings, guided_head or (-1, -1)
    return Config(
        d_model=s.d_model,
        d_ff=s.d_ff,
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads or s.n_heads,
        d_key=s.key_width,
        d_value=s.value_width,
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
        unk=UNK,
        bos=BOS,
        eos=EOS,
        start=EOS if s.one_end else BOS,
        placeholder=-1,
        precision=PRECISIONS.index(precision),
        decoder_only=isinstance(s, GPTSettings),
        recurrent=s.replaces_self_attention,
        tied=s.ties_output,
        tied_inputs=s.ties_inputs,
        guided_layer=guided_layer,
        guided_head=head,
    )
