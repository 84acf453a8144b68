"""The engine that runs PyTorch models."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.decoding import DecodingOptions
from transduce.data.batch import TrainingBatch, collate, collate_rows, pad_sources
from transduce.data.examples import Example, RowExample
from transduce.decoding.dynamic_batcher import MAX_ROWS, DynamicBatcher
from transduce.decoding.engine import BATCH_TOKENS, Batcher, DecodingInput, Deliver, Hypothesis, OnToken
from transduce.decoding.sampling import sample
from transduce.decoding.search import beam_search
from transduce.models.registry import ARCHITECTURES
from transduce.nn.recording import recorded_heads
from transduce.text.special import PAD

MAX_WORKERS = 4  # with more, threads mostly wait for each other's Python
_SAMPLED_ROWS = 64  # prompts per batch: each has keys and values of a whole context
_SCORED_ROWS = 1024  # of logits in memory at once when outputs are scored

_LANGUAGE_MODELS = {one.build for one in ARCHITECTURES.values() if one.shape == "decoder"}

_POOL_LOCK = threading.Lock()
InT = TypeVar("InT")
OutT = TypeVar("OutT")


class TorchEngine:
    """The reference engine: a model of this package, on the CPU or a GPU.

    On a CPU, batches are decoded by a few threads that share the cores. The threads are made once, when they are first
    needed, and live as long as the engine; the number of threads that PyTorch uses elsewhere does not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model  # of any architecture in the registry
        self._workers: ThreadPoolExecutor | None = None

    @property
    def device(self) -> str:
        """The device of the model."""
        return str(next(self.model.parameters()).device)

    def pytorch_model(self) -> Any:
        """See `Engine.pytorch_model`."""
        return self.model

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, *, on_token: OnToken | None = None
    ) -> list[list[Hypothesis]]:
        """See `Engine.translate`. The order and the batch of a source do not change its hypotheses."""
        assert not self.model.training, "a model translates in eval mode"
        if type(self.model) in _LANGUAGE_MODELS:
            assert options.sample, "a language model draws what continues a source"
            return self._continue(sources, options, on_token)
        width = options.n_best if options.sample else options.beam
        batches = make_batches(
            sources,
            budget=options.batch_tokens,
            most=max(1, MAX_ROWS // width),
            width=lambda source: len(source.ids) + 1,
        )
        found: list[list[Hypothesis]] = [[] for _ in sources]
        results = self._map(lambda batch: self._translate([s for _, s in batch], options), batches)
        for batch, hypotheses in zip(batches, results, strict=True):
            for (place, _), of_source in zip(batch, hypotheses, strict=True):
                found[place] = of_source
        return found

    def open_batcher(self, deliver: Deliver) -> Batcher:
        """See `Engine.open_batcher`."""
        return DynamicBatcher(self.translate, deliver)

    def _translate(self, batch: Sequence[DecodingInput], options: DecodingOptions) -> list[list[Hypothesis]]:
        src, limits = pad_sources([source.ids for source in batch]).to(self.device), [source.limit for source in batch]
        prefixes = [source.prefix for source in batch]
        if options.sample:
            keys = [source.key for source in batch]
            return sample(self.model, src, options, max_length=limits, keys=keys, prefixes=prefixes)
        allowed = [source.allowed for source in batch] if any(s.allowed is not None for s in batch) else None
        return beam_search(self.model, src, options, max_length=limits, prefixes=prefixes, allowed=allowed)

    def _continue(
        self, prompts: Sequence[DecodingInput], options: DecodingOptions, on_token: OnToken | None
    ) -> list[list[Hypothesis]]:
        """Samples of a language model, in batches of prompts of one length."""
        found: list[list[Hypothesis]] = [[] for _ in prompts]
        of_length: dict[int, list[int]] = defaultdict(list)
        for place, prompt in enumerate(prompts):
            of_length[len(prompt.ids)].append(place)
        for alike in of_length.values():
            for at in range(0, len(alike), _SAMPLED_ROWS):
                places = alike[at : at + _SAMPLED_ROWS]
                batch = [prompts[place] for place in places]
                ids = torch.tensor([prompt.ids for prompt in batch], device=self.device)
                drawn = sample(
                    self.model,
                    ids[:, :-1],
                    options,
                    prompts=ids,
                    max_length=[prompt.limit for prompt in batch],
                    keys=[prompt.key for prompt in batch],
                    on_token=on_token and partial(_at_place, on_token, places),
                )
                for place, hypotheses in zip(places, drawn, strict=True):
                    found[place] = hypotheses
        return found

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """See `Engine.score`."""
        return self._score(
            pairs,
            collate,
            n_targets=lambda pair: len(pair.tgt) + 1,
            width=lambda pair: max(len(pair.src), len(pair.tgt)) + 1,
            batch_tokens=batch_tokens,
        )

    def attention(self, pairs: Sequence[Example], heads: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """See `Engine.attention`."""
        found: list[Any] = [None] * len(pairs)
        batches = make_batches(
            pairs,
            budget=BATCH_TOKENS,
            most=BATCH_TOKENS,
            width=lambda pair: max(len(pair.src), len(pair.tgt)) + 1,
        )
        for batch in batches:
            tensors = collate([pair for _, pair in batch]).to(self.device)
            with torch.inference_mode(), recorded_heads(self.model, heads) as weights:
                self.model(*tensors.inputs)
                all_weights = weights().float().cpu().numpy()
            for (place, pair), one in zip(batch, all_weights, strict=True):
                found[place] = one[:, : len(pair.tgt) + 1, : len(pair.src) + 1]
        return found

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
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
        batch_tokens: int,
    ) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in examples]
        for batch in make_batches(examples, budget=batch_tokens, most=batch_tokens, width=width):
            tensors = collated([example for _, example in batch]).to(self.device)
            known = _token_log_probs(self.model, tensors).tolist()
            for (place, example), row in zip(batch, known, strict=True):
                found[place] = row[: n_targets(example)]
        return found

    def _map(self, work: Callable[[InT], OutT], batches: Sequence[InT]) -> list[OutT]:
        """The result of `work` for each batch, in order; in the caller's thread where threads gain nothing."""
        if len(batches) < 2 or self.device != "cpu" or torch.get_num_threads() < 2:
            return [work(batch) for batch in batches]
        with _POOL_LOCK:
            if self._workers is None:
                self._workers = _start_workers(torch.get_num_threads())
        return list(self._workers.map(work, batches))


def _at_place(on_token: OnToken, places: Sequence[int], row: int, token: int) -> None:
    on_token(places[row], token)


def make_batches(
    items: Sequence[InT], *, budget: int, most: int, width: Callable[[InT], int]
) -> list[list[tuple[int, InT]]]:
    """Batches of (place in `items`, item), widest first.

    Each has at most `most` items and at most `budget` padded tokens, but at least one item.
    """
    batches: list[list[tuple[int, InT]]] = []
    room = 0
    for place, item in sorted(enumerate(items), key=lambda pair: width(pair[1]), reverse=True):
        if not room:
            room = max(1, min(most, budget // max(1, width(item))))
            batches.append([])
        batches[-1].append((place, item))
        room -= 1
    return batches


def _start_workers(n_threads: int) -> ThreadPoolExecutor:
    """A few threads that share PyTorch's `n_threads`: small products gain little from more than one core."""
    n_workers = min(MAX_WORKERS, n_threads)
    pool = ThreadPoolExecutor(n_workers, thread_name_prefix="decode")
    started = threading.Barrier(n_workers)

    def start() -> None:
        torch.set_num_threads(n_threads // n_workers)  # of this thread, and of threads that begin from now on
        started.wait()

    for future in [pool.submit(start) for _ in range(n_workers)]:
        future.result()
    torch.set_num_threads(n_threads)  # threads that begin later have as many as before
    return pool


def _token_log_probs(model: Any, batch: TrainingBatch) -> Float[Tensor, "B T"]:
    """Log-probability (nats) of each target, given what the model sees of the inputs there; 0 at padding."""
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
        known = model.logits(hidden[rows]).float().log_softmax(-1)
        scored[real[rows]] = known.gather(1, gold[rows, None]).squeeze(1)
    return scored.view_as(targets)
