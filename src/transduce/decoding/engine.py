"""The engine protocol, and the engine that runs PyTorch models: token ids in, hypotheses out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from transduce.config import DecodingSettings
from transduce.data.batch import Example, RowExample, TrainingBatch, collate, collate_rows, pad_sources
from transduce.decoding.batches import Source, make_batches
from transduce.decoding.options import Sampling, TranslationOptions
from transduce.decoding.sample import Watch, sample
from transduce.decoding.score import token_log_probs
from transduce.decoding.search import Hypothesis, beam_search

MAX_ROWS = 320  # hypotheses per batch: enough for wide matrix products, few enough for a CPU's caches
MAX_WORKERS = 4  # with more, threads mostly wait for each other's Python

_POOL_LOCK = threading.Lock()
InT = TypeVar("InT")
OutT = TypeVar("OutT")


@runtime_checkable
class Engine(Protocol):
    """What `Translator` and `Generator` need of a model. Safe to call from several threads."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def translate(self, sources: Sequence[Source], options: TranslationOptions) -> list[list[Hypothesis]]:
        """`options.n_best` hypotheses per source, best first; drawn instead where `options.sampling` is set."""

    def sample(
        self, prompts: Sequence[Source], sampling: Sampling, *, seed: int, watch: Watch | None = None
    ) -> list[Hypothesis]:
        """One continuation per prompt. All prompts have the same number of tokens."""

    def score(self, pairs: Sequence[Example], *, batch_tokens: int | None = None) -> list[list[float]]:
        """Log-probabilities (nats) of every target token and of the end, given the source."""

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int | None = None
    ) -> list[list[float]]:
        """Log-probabilities (nats) of every target of rows of running text; see `collate_rows` for `separate`."""


class TorchEngine:
    """The reference engine: a model of this package, on the CPU or a GPU.

    On a CPU, batches are decoded by a few threads that share the cores. The threads are made once, when they are first
    needed, and live as long as the engine; the number of threads that PyTorch uses elsewhere does not change.
    """

    def __init__(self, model: nn.Module, settings: DecodingSettings) -> None:
        """`settings`: the values of options that are not given."""
        self.model: Any = model  # of any architecture in the registry
        self.settings = settings
        self._workers: _Workers | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def translate(self, sources: Sequence[Source], options: TranslationOptions) -> list[list[Hypothesis]]:
        """See `Engine.translate`. The order and the batch of a source do not change its hypotheses."""
        assert not self.model.training, "a model translates in eval mode"
        decoding = options.over(self.settings)
        width = decoding.beam if options.sampling is None else options.n_best
        batches = make_batches(
            sources,
            budget=decoding.batch_tokens,
            most=max(1, MAX_ROWS // width),
            width=lambda source: len(source.ids) + 1,
        )
        found: list[list[Hypothesis]] = [[] for _ in sources]
        results = self._map(lambda batch: self._translate([s for _, s in batch], options, decoding), batches)
        for batch, hypotheses in zip(batches, results, strict=True):
            for (place, _), of_source in zip(batch, hypotheses, strict=True):
                found[place] = of_source
        return found

    def _translate(
        self, batch: Sequence[Source], options: TranslationOptions, decoding: DecodingSettings
    ) -> list[list[Hypothesis]]:
        src, limits = pad_sources([source.ids for source in batch]).to(self.device), [source.limit for source in batch]
        if options.sampling is not None:
            seeds = [(options.seed, *source.key) for source in batch]
            return sample(
                self.model,
                src,
                max_length=limits,
                seeds=seeds,
                sampling=options.sampling,
                n_samples=options.n_best,
            )
        return beam_search(
            self.model,
            src,
            max_length=limits,
            beam=decoding.beam,
            n_best=options.n_best,
            length_penalty=decoding.length_penalty,
        )

    def sample(
        self, prompts: Sequence[Source], sampling: Sampling, *, seed: int, watch: Watch | None = None
    ) -> list[Hypothesis]:
        """See `Engine.sample`."""
        ids = torch.tensor([prompt.ids for prompt in prompts], device=self.device)
        found = sample(
            self.model,
            ids[:, :-1],
            first=ids[:, -1],
            max_length=[prompt.limit for prompt in prompts],
            seeds=[(seed, *prompt.key) for prompt in prompts],
            sampling=sampling,
            watch=watch,
        )
        return [hypothesis for (hypothesis,) in found]

    def score(self, pairs: Sequence[Example], *, batch_tokens: int | None = None) -> list[list[float]]:
        """See `Engine.score`."""
        return self._score(
            pairs,
            collate,
            n_targets=lambda pair: len(pair.tgt) + 1,
            width=lambda pair: max(len(pair.src), len(pair.tgt)) + 1,
            batch_tokens=batch_tokens,
        )

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int | None = None
    ) -> list[list[float]]:
        """See `Engine.score_rows`."""
        return self._score(
            rows,
            lambda batch: collate_rows(batch, separate=separate),
            n_targets=lambda row: len(row.targets),
            width=lambda row: len(row.targets),
            batch_tokens=batch_tokens,
        )

    def _score(
        self,
        examples: Sequence[InT],
        collated: Callable[[Sequence[InT]], TrainingBatch],
        *,
        n_targets: Callable[[InT], int],
        width: Callable[[InT], int],
        batch_tokens: int | None,
    ) -> list[list[float]]:
        budget = batch_tokens or self.settings.batch_tokens
        found: list[list[float]] = [[] for _ in examples]
        for batch in make_batches(examples, budget=budget, most=budget, width=width):
            tensors = collated([example for _, example in batch]).to(self.device)
            known = token_log_probs(self.model, tensors.inputs, tensors.targets).tolist()
            for (place, example), row in zip(batch, known, strict=True):
                found[place] = row[: n_targets(example)]
        return found

    def _map(self, work: Callable[[InT], OutT], batches: Sequence[InT]) -> list[OutT]:
        """The result of `work` for each batch, in order; in the caller's thread where threads gain nothing."""
        if len(batches) < 2 or self.device.type != "cpu" or torch.get_num_threads() < 2:
            return [work(batch) for batch in batches]
        with _POOL_LOCK:
            if self._workers is None:
                self._workers = _Workers(torch.get_num_threads())
        return self._workers.map(work, batches)


class _Workers:
    """A few threads, each with its share of PyTorch's threads: small products gain little from more than one core."""

    def __init__(self, n_threads: int) -> None:
        """`n_threads`: PyTorch's, to be shared."""
        n_workers = min(MAX_WORKERS, n_threads)
        self._pool = ThreadPoolExecutor(n_workers, thread_name_prefix="decode")
        started = threading.Barrier(n_workers)

        def start() -> None:
            torch.set_num_threads(n_threads // n_workers)  # of this thread, and of threads that begin from now on
            started.wait()

        for future in [self._pool.submit(start) for _ in range(n_workers)]:
            future.result()
        torch.set_num_threads(n_threads)  # threads that begin later have as many as before

    def map(self, work: Callable[[InT], OutT], batches: Sequence[InT]) -> list[OutT]:
        """The result of `work` for each batch, in order. After an error, batches that have not begun are dropped."""
        return list(self._pool.map(work, batches))
