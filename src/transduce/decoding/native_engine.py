"""The engine that runs Transformers in our C++ library (`native/`), several times faster than PyTorch.

`native_engine` gives one, or the reason why there is none: then PyTorch's engine does the work. The library is compiled
when the package is installed, if there is a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from transduce.config.decoding import DecodingOptions
from transduce.config.kinds import resolve_preset
from transduce.data.examples import Example, RowExample
from transduce.decoding.alignment import guided_head
from transduce.decoding.engine import BATCH_TOKENS, Batcher, DecodingInput, Deliver, Hypothesis, OnToken
from transduce.decoding.native_decoder import NativeBatcher, NativeDecoder
from transduce.decoding.native_model import LONGEST_TEXT, NativeModel, NativePrecision, NativeSettings, why_not
from transduce.decoding.native_scoring import Head, NativeScorer
from transduce.errors import SettingsError
from transduce.native.library import load_library
from transduce.process import n_threads_to_use
from transduce.runs.folder import RunFolder
from transduce.text.tokenizer import Tokenizers


class NativeEngine:
    """Search, sampling and scoring in C++ on all cores.

    The hypotheses of a sentence depend on the sentence, the model and the options only: they are the same bit for bit
    alone, in any batch, and with any number of threads.
    """

    device = "cpu"

    def __init__(self, native: NativeModel, *, pytorch_model: Callable[[], Any], n_threads: int | None = None) -> None:
        """An engine for a model in the library.

        Args:
            native: The model.
            pytorch_model: Gives the same model in PyTorch, for inspection; called when it is first asked for.
            n_threads: All cores, if not given.
        """
        n_threads = n_threads or n_threads_to_use()
        self.pytorch_model = cache(pytorch_model)
        self._decoder = NativeDecoder(native, n_threads=n_threads)
        self._scorer = NativeScorer(native, n_threads=n_threads)

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """See `Engine.score`."""
        return self._scorer.score(pairs)

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
        """See `Engine.score_rows`."""
        return self._scorer.score_rows(rows, separate=separate)

    def attention(self, pairs: Sequence[Example], heads: Sequence[Head]) -> list[np.ndarray]:
        """See `Engine.attention`."""
        return self._scorer.attention(pairs, heads)

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, *, on_token: OnToken | None = None
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate`."""
        return self._decoder.translate(sources, options, on_token=on_token)

    def open_batcher(self, deliver: Deliver) -> Batcher:
        """See `Engine.open_batcher`."""
        return NativeBatcher(self._decoder, deliver)


def native_engine(
    folder: RunFolder, tokenizers: Tokenizers, *, precision: NativePrecision, pytorch_model: Callable[[], Any]
) -> NativeEngine | str:
    """An engine for the model of a run, or the reason why there is none; `pytorch_model` as for `NativeEngine`.

    Raises `RunFolderError`: the weights are damaged.
    """
    library, settings = load_library(), resolve_preset(folder.settings.model)
    if isinstance(library, str):
        return library
    if not isinstance(settings, NativeSettings):
        return f"the native library does not support model.kind = '{settings.kind}'"
    if reason := why_not(settings):
        return f"the native library does not support {reason}"
    if (context := folder.settings.data.context or 0) > LONGEST_TEXT:
        return f"the native library does not support data.context = {context}"
    sizes = {"n_src": tokenizers.n_src, "n_tgt": tokenizers.n_tgt}
    try:
        native = NativeModel(
            folder.load_arrays(),
            settings,
            precision=precision,
            guided_head=guided_head(folder.settings),
            **sizes,
        )
    except SettingsError as error:  # PyTorch may know more
        return f"the native library cannot use these weights: {error}"
    return NativeEngine(native, pytorch_model=pytorch_model)
