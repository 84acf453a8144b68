"""The engine that runs encoder-decoder Transformers in our C++ library (`native/`), several times faster than PyTorch.

`native_engine` gives one, or the reason why there is none: then PyTorch's engine does the work. The library is built by
`make` where there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from transduce.config import DecodingSettings, GPTSettings, TransformerSettings
from transduce.decoding.engine import Source, TorchEngine
from transduce.decoding.options import TranslationOptions
from transduce.decoding.search import Hypothesis
from transduce.errors import SettingsError, TransduceError
from transduce.nn.block import norm_eps
from transduce.text.special import BOS, EOS, PAD

NativePrecision = Literal["float32", "float32-fast", "int8"]
PRECISIONS: tuple[NativePrecision, ...] = ("float32", "float32-fast", "int8")

_ABI_VERSION = 2
_LIBRARY = Path(__file__).with_name("libtransduce_native.so")
_NORMS, _ACTIVATIONS = ("layer", "rms"), ("relu", "gelu", "gelu_tanh", "silu")
_POSITIONS = ("none", "sinusoidal", "sinusoidal_halves", "learned", "rotary")
_FEED_FORWARDS = ("plain", "gated", "conv")
_MODELS = (TransformerSettings, GPTSettings)
_INVALID = 1
_MOST_SOURCE = 1 << 16  # tokens of a sentence


class _Config(ctypes.Structure):
    """`transduce_config` of native/src/transduce_native.h; also the order of the fields."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("d_model", "d_ff", "n_heads", "n_kv_heads")),
        *((name, ctypes.c_int32) for name in ("n_encoder_layers", "n_decoder_layers", "n_src", "n_tgt")),
        *((name, ctypes.c_int32) for name in ("max_positions", "pre_norm", "norm", "embedding_norm")),
        *((name, ctypes.c_int32) for name in ("positions", "activation", "gated")),
        *((name, ctypes.c_float) for name in ("norm_eps", "embedding_scale")),
        *((name, ctypes.c_int32) for name in ("pad", "bos", "eos", "precision", "decoder_only")),
    ]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("beam", ctypes.c_int32),
        ("n_best", ctypes.c_int32),
        ("scores", ctypes.c_int32),
        ("length_penalty", ctypes.c_float),
    ]


@cache
def load_library() -> ctypes.CDLL | str:
    """The library, or the reason why it cannot be used. TRANSDUCE_NATIVE_LIBRARY names another file."""
    path = Path(os.environ.get("TRANSDUCE_NATIVE_LIBRARY") or _LIBRARY)
    if not path.exists():
        return "the native library is not built; `make native` builds it where there is a C++ compiler"
    try:
        library = ctypes.CDLL(str(path))
        version = library.transduce_abi_version()
    except (OSError, AttributeError) as error:
        return f"the native library cannot be loaded: {error}"
    if version != _ABI_VERSION:
        return "the native library is of another version; `make native` builds it again"
    library.transduce_last_error.restype = library.transduce_isa.restype = ctypes.c_char_p
    pointer, int64 = ctypes.c_void_p, ctypes.c_int64
    library.transduce_model_new.argtypes = [pointer, pointer, int64, pointer]
    library.transduce_job_new.argtypes = [*[pointer] * 5, int64, ctypes.c_int32, pointer]
    library.transduce_job_sizes.argtypes = [pointer] * 3
    library.transduce_job_results.argtypes = [pointer] * 7
    for name in ("model_free", "job_free", "job_cancel", "job_run"):
        getattr(library, f"transduce_{name}").argtypes = [pointer]
    if library.transduce_isa() is None:
        raise SettingsError(library.transduce_last_error().decode())
    return library


def why_not(settings: TransformerSettings | GPTSettings) -> str | None:
    """What the library does not support of a model with these settings; None if it supports all."""
    s = settings
    unsupported = {
        f"model.positions = '{s.positions}'": s.positions not in _POSITIONS,
        f"model.feed_forward = '{s.feed_forward}'": s.feed_forward not in _FEED_FORWARDS or s.kernel_size > 1,
        f"model.activation = '{s.activation}'": s.activation not in _ACTIVATIONS,
        f"model.norm = '{s.norm}'": s.norm not in _NORMS,
        f"model.residual = '{s.residual}'": s.residual not in ("post", "pre"),
        f"model.window = {s.window}": s.window is not None,
        "model.decoder_self = 'ssru'": isinstance(s, TransformerSettings) and s.decoder_self == "ssru",
    }
    return next((name for name, found in unsupported.items() if found), None)


def native_engine(
    model: nn.Module, settings: Any, decoding: DecodingSettings, *, precision: NativePrecision = "float32"
) -> NativeEngine | str:
    """An engine for a model with these settings, or the reason why there is none. The weights are copied."""
    library = load_library()
    if isinstance(library, str):
        return library
    if not isinstance(settings, _MODELS):
        return f"the native library does not support model.kind = '{settings.kind}'"
    if reason := why_not(settings):
        return f"the native library does not support {reason}"
    if next(model.parameters()).device.type != "cpu":
        return "the native library runs on the CPU only"
    return NativeEngine(model, settings, decoding, precision=precision)


class NativeEngine(TorchEngine):
    """Greedy and beam search in C++ on all cores; sampling and scoring are PyTorch's.

    The hypotheses of a sentence depend on the sentence, the model and the options only: they are the same bit for bit
    alone, in any batch, and with any number of threads.
    """

    def __init__(
        self,
        model: nn.Module,
        model_settings: TransformerSettings | GPTSettings,
        decoding: DecodingSettings,
        *,
        precision: NativePrecision = "float32",
        n_threads: int | None = None,
    ) -> None:
        """`n_threads`: as many as PyTorch uses, if not given."""
        super().__init__(model, decoding)
        library = load_library()
        assert not isinstance(library, str), library
        self._library = library
        self._longest = model_settings.max_positions if model_settings.positions == "learned" else _MOST_SOURCE
        self._limit = self._longest if model_settings.positions == "learned" else 1_000_000
        self._n_threads = n_threads or torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._handle = ctypes.c_void_p()
        tensors = _as_float32(model.state_dict(), model_settings)
        given = (_Tensor * len(tensors))(
            *(
                _Tensor(name.encode(), tensor.data_ptr(), tensor.shape[0] if tensor.dim() == 2 else 1, tensor.shape[-1])
                for name, tensor in tensors.items()
            )
        )
        config = _config(model_settings, tensors, precision)
        self._check(library.transduce_model_new(ctypes.byref(config), given, len(tensors), ctypes.byref(self._handle)))

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.transduce_model_free(handle)

    def _check(self, code: int) -> None:
        if code:
            message = self._library.transduce_last_error().decode(errors="replace")
            raise SettingsError(message) if code == _INVALID else TransduceError(f"native library: {message}")

    def translate(self, sources: Sequence[Source], options: TranslationOptions) -> list[list[Hypothesis]]:
        """See `Engine.translate`."""
        if options.sampling is not None or any(self._is_out_of_range(source) for source in sources):
            return super().translate(sources, options)
        decoding = options.over(self.settings)
        scores = options.scores or decoding.beam > 1
        given = _Options(decoding.beam, options.n_best, scores, decoding.length_penalty)
        lengths = np.fromiter((len(source.ids) + 1 for source in sources), np.int64, len(sources))
        offsets = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
        ids = np.fromiter((i for source in sources for i in (*source.ids, EOS)), np.int32, int(offsets[-1]))
        limits = np.fromiter((source.limit for source in sources), np.int32, len(sources))
        n_threads = max(1, min(self._n_threads, len(sources)))
        job = ctypes.c_void_p()
        arrays = (array.ctypes.data for array in (ids, offsets, limits))
        self._check(
            self._library.transduce_job_new(
                self._handle, ctypes.byref(given), *arrays, len(sources), n_threads, ctypes.byref(job)
            )
        )
        try:
            self._run(job, n_threads)
            return self._results(job, len(sources))
        finally:
            self._library.transduce_job_free(job)

    def _is_out_of_range(self, source: Source) -> bool:
        """Whether only PyTorch knows what to do with a sentence: padding inside, or longer than the library takes."""
        return len(source.ids) >= self._longest or source.limit > self._limit or PAD in source.ids

    def _run(self, job: ctypes.c_void_p, n_threads: int) -> None:
        if n_threads == 1:
            self._check(self._library.transduce_job_run(job))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._n_threads, thread_name_prefix="native")
        runs = [self._pool.submit(self._work, job) for _ in range(n_threads)]
        try:
            for run in runs:
                run.result()
        finally:
            self._library.transduce_job_cancel(job)
            for run in runs:
                run.exception()

    def _work(self, job: ctypes.c_void_p) -> None:
        self._check(self._library.transduce_job_run(job))

    def _results(self, job: ctypes.c_void_p, n_sentences: int) -> list[list[Hypothesis]]:
        n_hypotheses, n_tokens = ctypes.c_int64(), ctypes.c_int64()
        self._check(self._library.transduce_job_sizes(job, ctypes.byref(n_hypotheses), ctypes.byref(n_tokens)))
        counts = np.empty(n_sentences, np.int32)
        n = n_hypotheses.value
        lengths, finished = np.empty(n, np.int32), np.empty(n, np.bool_)
        log_probs, scores = np.empty(n, np.float32), np.empty(n, np.float32)
        tokens = np.empty(n_tokens.value, np.int32)
        arrays = (counts, lengths, log_probs, scores, finished, tokens)
        self._check(self._library.transduce_job_results(job, *(array.ctypes.data for array in arrays)))
        ids, ends = tokens.tolist(), lengths.cumsum().tolist()
        columns = zip(ends, lengths.tolist(), log_probs.tolist(), scores.tolist(), finished.tolist(), strict=True)
        found = [
            Hypothesis(tuple(ids[end - length : end]), log_prob, score, done)
            for end, length, log_prob, score, done in columns
        ]
        stops = counts.cumsum().tolist()
        return [found[stop - count : stop] for stop, count in zip(stops, counts.tolist(), strict=True)]


def _as_float32(state: Mapping[str, Tensor], settings: TransformerSettings | GPTSettings) -> dict[str, Tensor]:
    """The weights as the library reads them: whole matrices, contiguous, in float32."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".parts." in name:  # of a projection that all heads share
            continue
        tensor = tensor.squeeze(-1) if tensor.dim() == 3 else tensor  # a convolution of width 1
        name = (
            f"tgt_{name}" if name.startswith("embedding.") else name
        )  # a decoder without an encoder has one embedding
        tensors[name] = tensor.detach().float().contiguous()
    for prefix in {name.split(".parts.")[0] for name in state if ".parts." in name}:
        n_parts = sum(name.startswith(f"{prefix}.parts.") and name.endswith(".weight") for name in state)
        parts = range(n_parts)
        weights = [torch.block_diag(*[state[f"{prefix}.parts.{i}.weight"]] * settings.n_heads) for i in parts]
        tensors[f"{prefix}.weight"] = torch.cat(weights).float().contiguous()
        if settings.bias:
            biases = [state[f"{prefix}.parts.{i}.bias"].repeat(settings.n_heads) for i in parts]
            tensors[f"{prefix}.bias"] = torch.cat(biases).float().contiguous()
    return tensors


def _config(
    settings: TransformerSettings | GPTSettings, tensors: Mapping[str, Tensor], precision: NativePrecision
) -> _Config:
    s = settings
    n_tgt = tensors["tgt_embedding.table.weight"].shape[0]
    decoder_only = isinstance(s, GPTSettings)
    return _Config(
        d_model=s.d_model,
        d_ff=s.d_ff,
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads or s.n_heads,
        n_encoder_layers=0 if decoder_only else s.depth[0],
        n_decoder_layers=s.n_decoder_layers,
        n_src=n_tgt if decoder_only else tensors["src_embedding.table.weight"].shape[0],
        n_tgt=n_tgt,
        max_positions=s.max_positions,
        pre_norm=s.residual == "pre",
        norm=_NORMS.index(s.norm),
        embedding_norm=s.embedding_norm,
        positions=_POSITIONS.index(s.positions),
        activation=_ACTIVATIONS.index(s.activation),
        gated=s.feed_forward == "gated",
        norm_eps=norm_eps(s.norm, s.norm_eps),
        embedding_scale=s.d_model**0.5 if s.scale_embeddings else 1.0,
        pad=PAD,
        bos=BOS,
        eos=EOS,
        precision=PRECISIONS.index(precision),
        decoder_only=decoder_only,
    )
