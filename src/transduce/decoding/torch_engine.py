"""The engine for PyTorch models, single or in an ensemble, and its dynamic batching for a `DecodingQueue`."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.decoding import DecodingOptions
from transduce.data.batch import TrainingBatch, collate, collate_rows, pad_sources
from transduce.data.store import Example, RowExample
from transduce.decoding.constraints import Beginning
from transduce.decoding.engine import (
    BATCH_TOKENS,
    Batcher,
    DecodingInput,
    Deliver,
    Event,
    Hypothesis,
    IsWanted,
    cost_of,
)
from transduce.decoding.sampling import sample
from transduce.decoding.search import beam_search
from transduce.models.registry import ARCHITECTURES
from transduce.nn.masks import SourceInput
from transduce.nn.recording import recorded_heads
from transduce.nn.state import DecodingState
from transduce.text.special import PAD


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """The state of an ensemble: the `DecodingState` of each model."""

    states: Sequence[DecodingState]

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        for state in self.states:
            state.reorder(rows)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        for state in self.states:
            state.select(sentences)


class Ensemble(nn.Module):
    """Encoder-decoders with the same vocabularies, of any architectures and sizes, as a single model.

    The probability of a token is the arithmetic mean of the models' probabilities, as in fairseq and Sockeye. The mean
    is a distribution, so that scores are log-probabilities and samples can be drawn. The mean of the logarithms, the
    default of Marian and OpenNMT-py, is no distribution, and lets each model rule out a token.

    The hidden states of the ensemble are the concatenated hidden states of the models.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        """`models`: `EncoderDecoder`s."""
        super().__init__()
        self.models: Any = nn.ModuleList(models)
        self._widths = [model.output_weight.shape[1] for model in models]

    def start(self, src: SourceInput, *, capacity: int, n_beams: int) -> EnsembleState:
        return EnsembleState([model.start(src, capacity=capacity, n_beams=n_beams) for model in self.models])

    def advance(self, ids: Int[Tensor, "N T"], state: EnsembleState) -> Float[Tensor, "N T D"]:
        steps = zip(self.models, state.states, strict=True)
        return torch.cat([model.advance(ids, own) for model, own in steps], -1)

    def read(self, *inputs: Tensor) -> Iterator[Float[Tensor, "B T D"]]:
        """Yield hidden states for scoring; see `TokenPredictor.read`."""
        yield torch.cat([model(*inputs) for model in self.models], -1)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Logarithms of the mean of the models' probabilities, float32."""
        parts = zip(self.models, hidden.split(self._widths, -1), strict=True)
        log_probs = [model.logits(part.contiguous()).float().log_softmax(-1) for model, part in parts]
        return mean_log_probs(log_probs)


def mean_log_probs(log_probs: Sequence[Float[Tensor, "*B V"]]) -> Float[Tensor, "*B V"]:
    """Average probabilities that are given as logarithms; return the logarithms of the means.

    The result of a row does not depend on other rows. On a CPU that is not true of PyTorch's `logsumexp` and
    `logaddexp`, which may round a number differently at another position of a tensor.
    """
    highest = reduce(torch.maximum, log_probs)
    total = reduce(torch.add, [(values - highest).exp() for values in log_probs])
    return highest + (total / len(log_probs)).log()


MAX_WORKERS = 4  # more threads would mostly wait for the interpreter lock
MAX_ROWS = 320  # hypotheses per batch: enough for wide matrix products, few enough for a CPU's caches
_SAMPLED_ROWS = 64  # prompts per batch: each has keys and values of a whole context
_SCORED_ROWS = 1024  # rows of logits in memory at once when outputs are scored
_GATHER = 0.002  # seconds that a batch waits for more inputs
_MAX_COST_RATIO = 4  # largest cost in a batch relative to its first input: all inputs wait for the costliest
_LAST_STEP = 5.0  # seconds that closing waits for the current step

_LANGUAGE_MODELS = {entry.build for entry in ARCHITECTURES.values() if entry.shape == "decoder"}

_POOL_LOCK = threading.Lock()
InT = TypeVar("InT")
OutT = TypeVar("OutT")
Batch = list[tuple[int, InT]]
"""Items of a batch, each with its index in the whole input."""


class TorchEngine:
    """The reference engine: a model of this package, on the CPU or a GPU.

    On a CPU, a few threads, which share the cores, decode batches. They are started on first use and live as long as
    the engine. PyTorch's number of threads does not change elsewhere.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model  # a model of any architecture in the registry, or an `Ensemble`
        self._workers: ThreadPoolExecutor | None = None

    @property
    def device(self) -> str:
        return str(next(self.model.parameters()).device)

    def pytorch_model(self) -> Any:
        return self.model

    def translate(
        self,
        sources: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        is_wanted: IsWanted | None = None,
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate`. A source's hypotheses do not depend on its batch or on the order of the sources.

        When `is_wanted` is False for all open sources of a batch, the batch ends without hypotheses for them.
        """
        assert not self.model.training, "a model translates in eval mode"
        is_language_model = type(self.model) in _LANGUAGE_MODELS
        assert options.sample or not is_language_model, "a language model samples"
        if is_language_model:
            batches = _batches_of_one_length(sources)
        else:
            width = options.n_best if options.sample else options.beam
            batches = make_batches(
                sources,
                budget=options.batch_tokens,
                most=max(1, MAX_ROWS // width),
                width=lambda source: len(source.ids) + 1,
            )

        def decode(batch: Batch[DecodingInput]) -> list[list[Hypothesis]]:
            return self._decode(batch, options, is_wanted)

        return _in_order(batches, map(decode, batches) if is_language_model else self._map(decode, batches))

    def open_batcher(self, deliver: Deliver) -> Batcher:
        return DynamicBatcher(self.translate, deliver)

    def _decode(
        self, batch: Batch[DecodingInput], options: DecodingOptions, is_wanted: IsWanted | None
    ) -> list[list[Hypothesis]]:
        indices, inputs = [index for index, _ in batch], [source for _, source in batch]
        prompts: Tensor | None = None
        if type(self.model) in _LANGUAGE_MODELS:
            prompts = torch.tensor([source.ids for source in inputs], device=self.device)
            src: SourceInput = prompts[:, :-1]
        else:
            src = pad_sources([source.ids for source in inputs]).to(self.device)
        limits, copies = [source.limit for source in inputs], [source.copies for source in inputs]
        beginnings = [Beginning(source.prefix, source.spelling, source.n_unscored) for source in inputs]
        of_batch = is_wanted and (lambda row: is_wanted(indices[row]))
        if not options.sample:
            return beam_search(
                self.model, src, options, max_length=limits, beginnings=beginnings, copies=copies, is_wanted=of_batch
            )
        return sample(
            self.model,
            src,
            options,
            prompts=prompts,
            max_length=limits,
            keys=[source.key for source in inputs],
            beginnings=beginnings,
            copies=copies,
            is_wanted=of_batch,
        )

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        return self._score(
            pairs,
            collate,
            n_targets=lambda pair: len(pair.tgt) + 1,
            width=_width_of_pair,
            batch_tokens=batch_tokens,
        )

    def attention(self, pairs: Sequence[Example], heads: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """See `Engine.attention`. For an ensemble, the attention of its first model."""
        model = self.model.models[0] if isinstance(self.model, Ensemble) else self.model

        def record(batch: Batch[Example]) -> list[np.ndarray]:
            tensors = collate([pair for _, pair in batch]).to(self.device)
            with torch.inference_mode(), recorded_heads(model, heads) as weights:
                model(*tensors.inputs)
                padded = weights().float().cpu().numpy()
            rows_of_pairs = zip(batch, padded, strict=True)
            return [rows[:, : len(pair.tgt) + 1, : len(pair.src) + 1] for (_, pair), rows in rows_of_pairs]

        batches = make_batches(pairs, budget=BATCH_TOKENS, most=BATCH_TOKENS, width=_width_of_pair)
        return _in_order(batches, map(record, batches))

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
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
        batch_tokens: int,
    ) -> list[list[float]]:
        def score(batch: Batch[InT]) -> list[list[float]]:
            tensors = collated([example for _, example in batch]).to(self.device)
            rows = _token_log_probs(self.model, tensors).tolist()
            return [row[: n_targets(example)] for (_, example), row in zip(batch, rows, strict=True)]

        batches = make_batches(examples, budget=batch_tokens, most=batch_tokens, width=width)
        return _in_order(batches, map(score, batches))

    def _map(self, work: Callable[[InT], OutT], batches: Sequence[InT]) -> list[OutT]:
        """Return the result of `work` for each batch, in order. On a CPU, several batches are spread over threads."""
        if len(batches) < 2 or self.device != "cpu" or torch.get_num_threads() < 2:
            return [work(batch) for batch in batches]
        with _POOL_LOCK:
            if self._workers is None:
                self._workers = _start_workers(torch.get_num_threads())
        return list(self._workers.map(work, batches))


def make_batches(items: Sequence[InT], *, budget: int, most: int, width: Callable[[InT], int]) -> list[Batch[InT]]:
    """Group items into batches of (index in `items`, item), widest items first.

    A batch has at most `most` items and at most `budget` padded tokens, but at least one item.
    """
    batches: list[Batch[InT]] = []
    room = 0
    for index, item in sorted(enumerate(items), key=lambda pair: width(pair[1]), reverse=True):
        if not room:
            room = max(1, min(most, budget // max(1, width(item))))
            batches.append([])
        batches[-1].append((index, item))
        room -= 1
    return batches


def _batches_of_one_length(prompts: Sequence[DecodingInput]) -> list[Batch[DecodingInput]]:
    by_length: dict[int, Batch[DecodingInput]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt.ids)].append((index, prompt))
    return [
        same_length[start : start + _SAMPLED_ROWS]
        for same_length in by_length.values()
        for start in range(0, len(same_length), _SAMPLED_ROWS)
    ]


def _in_order(batches: Sequence[Batch[InT]], results: Iterable[Sequence[OutT]]) -> list[OutT]:
    """Put the results of all batches back into the order of the items."""
    indexed = [
        (index, result)
        for batch, results_of_batch in zip(batches, results, strict=True)
        for (index, _), result in zip(batch, results_of_batch, strict=True)
    ]
    return [result for _, result in sorted(indexed, key=itemgetter(0))]


def _width_of_pair(pair: Example) -> int:
    return max(len(pair.src), len(pair.tgt)) + 1


def _start_workers(n_threads: int) -> ThreadPoolExecutor:
    """Start a few threads that share PyTorch's `n_threads`: small products gain little from several cores."""
    n_workers = min(MAX_WORKERS, n_threads)
    # The initializer sets the number for its thread and for all threads that start later.
    pool = ThreadPoolExecutor(
        n_workers, "decode", initializer=torch.set_num_threads, initargs=(n_threads // n_workers,)
    )
    started = threading.Barrier(n_workers)
    for future in [pool.submit(started.wait) for _ in range(n_workers)]:
        future.result()
    torch.set_num_threads(n_threads)  # restore the number for threads that start later
    return pool


def _token_log_probs(model: Any, batch: TrainingBatch) -> Float[Tensor, "B T"]:
    """Log-probability (nats) of each target given the inputs of the batch; 0 at padding."""
    targets = batch.targets
    with torch.inference_mode():
        scored, end = torch.zeros(targets.shape, device=targets.device), 0
        for hidden in model.read(*batch.inputs):
            start, end = end, end + hidden.shape[1]
            scored[:, start:end] = _log_probs_of(model, hidden, targets[:, start:end])
        return scored


def _log_probs_of(model: Any, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Log-probability of each target, a few rows of logits at a time; 0 at padding."""
    real = (targets != PAD).flatten().nonzero().squeeze(1)
    hidden, gold = hidden.flatten(0, 1).index_select(0, real), targets.flatten().index_select(0, real)
    scored = torch.zeros(targets.numel(), device=hidden.device)
    for rows in torch.arange(len(real), device=real.device).split(_SCORED_ROWS):
        log_probs = model.logits(hidden[rows]).float().log_softmax(-1)
        scored[real[rows]] = log_probs.gather(1, gold[rows, None]).squeeze(1)
    return scored.view_as(targets)


@dataclass(frozen=True, slots=True, eq=False)
class _Submitted:
    """A submitted input that has not ended."""

    ticket: int
    input: DecodingInput
    options: DecodingOptions
    order: float

    @property
    def cost(self) -> float:
        return cost_of([self.input], self.options)


class DynamicBatcher:
    """Decodes waiting inputs in one thread, at most 2 ms after the first arrived. It does not stream.

    Between two steps of a batch, it decodes new inputs whose `order` is smaller than that of the batch's last input.
    """

    def __init__(self, translate: Callable[..., list[list[Hypothesis]]], deliver: Deliver) -> None:
        """`translate`: the method `TorchEngine.translate`."""
        self._translate, self._deliver = translate, deliver
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._waiting: dict[int, _Submitted] = {}
        self._running: dict[int, _Submitted] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(
        self,
        first_ticket: int,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        order: float,
        stream: bool,
    ) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="translate", daemon=True)
            self._thread.start()
        with self._changed:
            for ticket, source in enumerate(inputs, first_ticket):
                self._waiting[ticket] = _Submitted(ticket, source, options, order)
            self._changed.notify()

    def cancel(self, ticket: int) -> None:
        """See `Batcher.cancel`. A batch ends when nobody waits for any of its inputs."""
        with self._changed:
            submitted = self._waiting.pop(ticket, None) or self._running.pop(ticket, None)
        if submitted is not None:
            self._deliver(Event(ticket, "cancelled"))

    def workload(self) -> dict[str, int]:
        return {"n_waiting": len(self._waiting)}

    async def close(self) -> None:
        """See `Batcher.close`. The thread ends at the next step of its batch."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        for ticket in [*self._waiting, *self._running]:
            self.cancel(ticket)
        if self._thread is not None:  # wait: the interpreter may abort if it exits during a step
            await asyncio.to_thread(self._thread.join, _LAST_STEP)

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._changed.wait_for(lambda: self._closed, timeout=_GATHER)
            self._decode_next()

    def _decode_next(self, *, before: float = math.inf) -> None:
        """Decode the first waiting inputs with an `order` below `before`, and deliver their results."""
        if batch := self._take_batch(before):
            events = self._decode(batch)
            with self._changed:  # the event loop stays open until this batcher is closed
                if not self._closed:
                    self._loop.call_soon_threadsafe(self._deliver_all, events)

    def _take_batch(self, before: float) -> list[_Submitted]:
        """Take the first waiting input of `order` below `before`, and others of equal options and similar cost."""
        with self._changed:
            candidates = (item for item in self._waiting.values() if item.order < before)
            waiting = sorted(candidates, key=lambda item: item.order)
            batch = [
                item
                for item in waiting
                if item.options == waiting[0].options and item.cost <= _MAX_COST_RATIO * waiting[0].cost
            ]
            if batch:
                options, longest = batch[0].options, max(len(item.input.ids) for item in batch)
                most = MAX_ROWS // options.beam
                if before < math.inf:  # other threads of the engine may wait for this thread
                    most = min(most, options.batch_tokens // (longest + 1))
                batch = batch[: max(1, most)]
            for item in batch:
                self._running[item.ticket] = self._waiting.pop(item.ticket)
        return batch

    def _decode(self, batch: Sequence[_Submitted]) -> list[Event]:
        def is_wanted(index: int) -> bool:
            self._decode_next(before=batch[-1].order)
            return batch[index].ticket in self._running

        try:
            results = self._translate([item.input for item in batch], batch[0].options, is_wanted=is_wanted)
        except Exception as error:
            if len(batch) > 1:  # an undecodable input, or out of memory: other inputs must not fail
                half = len(batch) // 2
                return [*self._decode(batch[:half]), *self._decode(batch[half:])]
            return [Event(batch[0].ticket, "failed", reason=str(error) or type(error).__name__)]
        return [Event(item.ticket, "done", hypotheses) for item, hypotheses in zip(batch, results, strict=True)]

    def _deliver_all(self, events: Sequence[Event]) -> None:
        for event in events:
            if self._running.pop(event.ticket, None) is not None:  # else it was cancelled
                self._deliver(event)
