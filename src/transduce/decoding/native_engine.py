"""The engine that runs Transformers in our C++ library (`native/`), several times faster than PyTorch.

`native_engine` gives one, or the reason why there is none: then PyTorch's engine does the work. The library is compiled
when the package is installed, if there is a C++ compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transduce.config.architectures import GPTSettings
from transduce.config.decoding import DecodingOptions
from transduce.config.kinds import resolve_preset
from transduce.config.section import MAX_TOKENS
from transduce.data.examples import Example, RowExample
from transduce.decoding.alignment import guided_head
from transduce.decoding.dynamic_batcher import DynamicBatcher
from transduce.decoding.engine import (
    BATCH_TOKENS,
    MOST_SOURCE,
    Batcher,
    DecodingInput,
    Deliver,
    Engine,
    Hypothesis,
    OnToken,
)
from transduce.decoding.native_batcher import NativeBatcher
from transduce.decoding.native_decoder import NativeDecoder, native_options
from transduce.decoding.native_model import NativeModel, NativePrecision, NativeSettings, why_not
from transduce.decoding.native_scoring import Head, NativeScorer
from transduce.errors import SettingsError
from transduce.native.library import load_library
from transduce.process import n_threads_to_use
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import load_arrays
from transduce.text.special import PAD
from transduce.text.tokenizer import Tokenizers


class NativeEngine:
    """Search, sampling and scoring in C++ on all cores; PyTorch's engine does the few things that are not supported.

    The hypotheses of a sentence depend on the sentence, the model and the options only: they are the same bit for bit
    alone, in any batch, and with any number of threads.
    """

    device = "cpu"

    def __init__(
        self,
        native: NativeModel,
        *,
        reference: Callable[[], Engine],
        n_threads: int | None = None,
    ) -> None:
        """An engine for a model in the library.

        Args:
            native: The model.
            reference: Gives PyTorch's engine for the same model; called once, if it is needed.
            n_threads: All cores, if not given.
        """
        limit = native.settings.position_limit
        self._longest = MOST_SOURCE + 1 if limit is None else limit
        self._limit = MAX_TOKENS if limit is None else limit
        self._is_language_model = isinstance(native.settings, GPTSettings)
        n_threads = n_threads or n_threads_to_use()
        self._decoder = NativeDecoder(native, n_threads=n_threads)
        self._scorer = NativeScorer(native, longest=self._longest, n_threads=n_threads)
        self._make_reference, self._lock = reference, threading.Lock()
        self._found: Engine | None = None

    def _reference(self) -> Engine:
        """PyTorch's engine, which does what the library does not support."""
        with self._lock:
            if self._found is None:
                self._found = self._make_reference()
            return self._found

    def pytorch_model(self) -> Any:
        """See `Engine.pytorch_model`."""
        return self._reference().pytorch_model()

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """See `Engine.score`."""
        if not all(self._scorer.takes(pair.src, pair.tgt) for pair in pairs):
            return self._reference().score(pairs, batch_tokens=batch_tokens)
        return self._scorer.score(pairs)

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
        """See `Engine.score_rows`."""
        if not all(len(row.ids) and self._scorer.takes(row.ids[1:]) for row in rows):
            return self._reference().score_rows(rows, separate=separate, batch_tokens=batch_tokens)
        return self._scorer.score_rows(rows, separate=separate)

    def attention(self, pairs: Sequence[Example], heads: Sequence[Head]) -> list[np.ndarray]:
        """See `Engine.attention`."""
        if not all(self._scorer.takes(pair.src, pair.tgt) for pair in pairs):
            return self._reference().attention(pairs, heads)
        return self._scorer.attention(pairs, heads)

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, *, on_token: OnToken | None = None
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate`."""
        if not all(self._takes(source, options) for source in sources):
            return self._reference().translate(sources, options, on_token=on_token)
        given = native_options(options, stream=on_token is not None)
        return self._decoder.translate(sources, given, seed=options.seed, on_token=on_token)

    def open_batcher(self, deliver: Deliver) -> Batcher:
        """See `Engine.open_batcher`."""
        other = DynamicBatcher(self.translate, deliver)
        return NativeBatcher(self._decoder, deliver, takes=self._takes, other=other)

    def _takes(self, source: DecodingInput, options: DecodingOptions) -> bool:
        drawn_prefix = options.sample and bool(source.prefix)
        return not drawn_prefix and not self._is_out_of_range(source)

    def _is_out_of_range(self, source: DecodingInput) -> bool:
        """Whether only PyTorch can process a sentence: padding inside, or longer than the library takes."""
        if self._is_language_model:  # the last token is written, and never read
            return not source.ids or len(source.ids) + source.limit - 1 > self._longest or PAD in source.ids
        return len(source.ids) >= self._longest or source.limit > self._limit or PAD in source.ids


def native_engine(
    folder: RunFolder, tokenizers: Tokenizers, *, precision: NativePrecision, reference: Callable[[], Engine]
) -> NativeEngine | str:
    """An engine for the model of a run, or the reason why there is none; `reference` as for `NativeEngine`.

    Raises `RunFolderError`: the weights are damaged.
    """
    library, settings = load_library(), resolve_preset(folder.settings.model)
    if isinstance(library, str):
        return library
    if not isinstance(settings, NativeSettings):
        return f"the native library does not support model.kind = '{settings.kind}'"
    if reason := why_not(settings):
        return f"the native library does not support {reason}"
    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        native = NativeModel(
            load_arrays(folder.path / "model.safetensors"),
            settings,
            precision=precision,
            guided_head=guided_head(folder.settings),
            **sizes,
        )
    except SettingsError as error:  # PyTorch may know more
        return f"the native library cannot use these weights: {error}"
    return NativeEngine(native, reference=reference)
