"""The engine that runs encoder-decoder Transformers in our C++ library (`native/`), several times faster than PyTorch.

`native_engine` gives one, or the reason why there is none: then PyTorch's engine does the work. The library is built by
`make` where there is a C++ compiler.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from transduce.config import DecodingSettings, resolve_preset
from transduce.data.examples import Example, RowExample
from transduce.decoding.engine import Engine, Hypothesis, Source, Watch
from transduce.decoding.native_library import check, load_library
from transduce.decoding.native_model import NativeModel, NativePrecision, NativeSettings, why_not
from transduce.decoding.options import Sampling, TranslationOptions
from transduce.errors import SettingsError
from transduce.process import n_threads_to_use
from transduce.runs.folder import RunFolder
from transduce.runs.tensor_file import load_arrays
from transduce.text.special import EOS, PAD
from transduce.text.tokenizer import Tokenizers

_MOST_SOURCE = 1 << 16  # tokens of a sentence


class _Options(ctypes.Structure):
    _fields_ = [
        ("beam", ctypes.c_int32),
        ("n_best", ctypes.c_int32),
        ("scores", ctypes.c_int32),
        ("length_penalty", ctypes.c_float),
    ]


class NativeEngine:
    """Greedy and beam search in C++ on all cores; sampling and scoring are PyTorch's.

    The hypotheses of a sentence depend on the sentence, the model and the options only: they are the same bit for bit
    alone, in any batch, and with any number of threads.
    """

    device = "cpu"

    def __init__(
        self,
        native: NativeModel,
        settings: DecodingSettings,
        *,
        reference: Callable[[], Engine],
        n_threads: int | None = None,
    ) -> None:
        """An engine for a model in the library.

        Args:
            native: The model.
            settings: The values of options that are not given.
            reference: Gives PyTorch's engine for the same model; called once, if it is needed.
            n_threads: All cores, if not given.
        """
        self.settings = settings
        self._native, self._library = native, native.library
        learned = native.settings.positions == "learned"
        self._longest = native.settings.max_positions if learned else _MOST_SOURCE
        self._limit = self._longest if learned else 1_000_000
        self._n_threads = n_threads or n_threads_to_use()
        self._pool: ThreadPoolExecutor | None = None
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

    def sample(
        self, prompts: Sequence[Source], sampling: Sampling, *, seed: int, watch: Watch | None = None
    ) -> list[Hypothesis]:
        """See `Engine.sample`."""
        return self._reference().sample(prompts, sampling, seed=seed, watch=watch)

    def score(self, pairs: Sequence[Example], *, batch_tokens: int | None = None) -> list[list[float]]:
        """See `Engine.score`."""
        return self._reference().score(pairs, batch_tokens=batch_tokens)

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int | None = None
    ) -> list[list[float]]:
        """See `Engine.score_rows`."""
        return self._reference().score_rows(rows, separate=separate, batch_tokens=batch_tokens)

    def translate(self, sources: Sequence[Source], options: TranslationOptions) -> list[list[Hypothesis]]:
        """See `Engine.translate`."""
        if options.sampling is not None or any(self._is_out_of_range(source) for source in sources):
            return self._reference().translate(sources, options)
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
        check(
            self._library,
            self._library.transduce_job_new(
                self._native.handle, ctypes.byref(given), *arrays, len(sources), n_threads, ctypes.byref(job)
            ),
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
            check(self._library, self._library.transduce_job_run(job))
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
        check(self._library, self._library.transduce_job_run(job))

    def _results(self, job: ctypes.c_void_p, n_sentences: int) -> list[list[Hypothesis]]:
        n_hypotheses, n_tokens = ctypes.c_int64(), ctypes.c_int64()
        check(self._library, self._library.transduce_job_sizes(job, ctypes.byref(n_hypotheses), ctypes.byref(n_tokens)))
        counts = np.empty(n_sentences, np.int32)
        n = n_hypotheses.value
        lengths, finished = np.empty(n, np.int32), np.empty(n, np.bool_)
        log_probs, scores = np.empty(n, np.float32), np.empty(n, np.float32)
        tokens = np.empty(n_tokens.value, np.int32)
        arrays = (counts, lengths, log_probs, scores, finished, tokens)
        check(self._library, self._library.transduce_job_results(job, *(array.ctypes.data for array in arrays)))
        ids, ends = tokens.tolist(), lengths.cumsum().tolist()
        columns = zip(ends, lengths.tolist(), log_probs.tolist(), scores.tolist(), finished.tolist(), strict=True)
        found = [
            Hypothesis(tuple(ids[end - length : end]), log_prob, score, done)
            for end, length, log_prob, score, done in columns
        ]
        stops = counts.cumsum().tolist()
        return [found[stop - count : stop] for stop, count in zip(stops, counts.tolist(), strict=True)]


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
        weights = load_arrays(folder.path / "model.safetensors")
        native = NativeModel(weights, settings, precision=precision, **sizes)
    except SettingsError as error:  # PyTorch may know more
        return f"the native library cannot use these weights: {error}"
    return NativeEngine(native, folder.settings.decoding, reference=reference)
