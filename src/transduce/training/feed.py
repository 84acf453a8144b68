"""Feeders: planned batches of all epochs, from any position, on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import Field

from transduce.config.section import resolved
from transduce.config.settings import TrainingSettings
from transduce.data.batch import TrainingBatch, collate
from transduce.data.batching import plan, share_out, split
from transduce.data.examples import Example
from transduce.data.shared_plan import shared_plan
from transduce.data.store import AlignedStore, TokenStore
from transduce.errors import DataError
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=1 << 40)]


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position in the data: the epoch and the index of the next batch in its plan, both from 0."""

    epoch: Count = 0
    index: Count = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """The examples of the update at a position, the position of the next one, and the number of epochs after it.

    `batches` are the micro-batches of this rank; `dummies` fill them up to the largest number that a rank has.
    Everything else is about the whole update.
    """

    indices: np.ndarray
    position: DataPosition
    batches: tuple[TrainingBatch, ...]
    dummies: tuple[TrainingBatch, ...]
    n_targets: int
    n_tokens: int
    n_slots: int
    after: DataPosition
    epochs: float


Loaded = tuple[Sequence[np.ndarray], int, Callable[[np.ndarray], TrainingBatch]]
"""The examples of an update: their lengths (of both sides, or of rows), the number of targets, and what makes a
micro-batch of some of them, given by their places."""


@dataclass(frozen=True, slots=True)
class SubwordSampling:
    """Subword regularisation (Kudo 2018; Provilkov et al. 2020): a new segmentation of each batch in every epoch.

    A pure function of (seed, epoch, batch), so that a resumed run has the same pieces. Batches are planned by the
    lengths of the best segmentation. Sampled ones are longer, so an update may exceed its budget; micro-batches are
    cut by the real lengths. A sentence keeps its best segmentation if it has unknown pieces, as its ids cannot be
    decoded, or if the new one is longer than `max_length`.
    """

    tokenizers: Tokenizers
    amount: float
    seed: int
    max_length: int

    def __call__(self, examples: list[Example], position: DataPosition) -> list[Example]:
        """Segment the same sentences again."""
        entropy = (self.seed, position.epoch, position.index)
        src_seed, tgt_seed = (int(n) for n in np.random.SeedSequence(entropy).generate_state(2))
        src = self._side(self.tokenizers.src, [np.asarray(e.src).tolist() for e in examples], src_seed)
        tgt = self._side(self.tokenizers.tgt, [np.asarray(e.tgt).tolist() for e in examples], tgt_seed)
        return [Example(src=s, tgt=t) for s, t in zip(src, tgt, strict=True)]

    def _side(self, tokenizer: Vocabulary, stored: Sequence[list[int]], seed: int) -> list[list[int]]:
        sampled = tokenizer.sample([tokenizer.decode(ids) for ids in stored], amount=self.amount, seed=seed)
        return [
            new if new and len(new) <= self.max_length and UNK not in old else old
            for old, new in zip(stored, sampled, strict=True)
        ]


class Feeder(ABC):
    """Batches for the training loop. The plan of an epoch is a pure function of (settings, epoch, number of ranks).

    A feeder yields the share of `rank` among `n_ranks` of each batch. `plans`: where ranks share their plans.
    """

    rank, n_ranks = 0, 1
    plans: Path | None = None
    unit = "text"  # what to call missing examples

    def __init__(self, settings: TrainingSettings, *, device: torch.device) -> None:
        """`settings` with batch sizes chosen."""
        self.device, self.seed = device, settings.seed
        self.budget = resolved(settings.batch_tokens, "training.batch_tokens")
        self.micro_budget = settings.micro_batch_tokens or self.budget

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, as indices of examples; a `DataError` if there are none."""
        if self.plans is None:
            batches = self._plan(epoch)
        else:
            batches = shared_plan(self.plans, epoch, self._plan, n_ranks=self.n_ranks)
        if not batches:
            raise DataError(f"there is no {self.unit} to train on, or to validate with")
        return batches

    @abstractmethod
    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, possibly none."""

    @abstractmethod
    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """The text of the example with this index in the plan of an epoch."""

    @abstractmethod
    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        """Load the examples of the batch at a position."""

    @abstractmethod
    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """The micro-batches of each rank for examples of these lengths, as their places."""

    def _feed(self, indices: np.ndarray, position: DataPosition, *, n_batches: int) -> Feed:
        """Make the batch at a position of a plan with `n_batches`, on the device."""
        sides, n_targets, collate = self._load(indices, position)
        shares = self._shares(sides)
        n_missing = max(map(len, shares)) - len(shares[self.rank])
        first = [part[:1] for parts in shares for part in parts][:1] * n_missing
        is_last = position.index + 1 == n_batches
        return Feed(
            indices=indices,
            position=position,
            batches=tuple(collate(part).to(self.device) for part in shares[self.rank]),
            dummies=tuple(collate(part).to(self.device) for part in first),
            n_targets=n_targets,
            n_tokens=sum(int(lengths.sum()) for lengths in sides),
            n_slots=sum(len(p) * int(lengths[p].max()) for lengths in sides for parts in shares for p in parts),
            after=DataPosition(position.epoch + 1) if is_last else DataPosition(position.epoch, position.index + 1),
            epochs=position.epoch + (position.index + 1) / n_batches,
        )

    def batches(self, epoch: int = 0) -> Iterator[TrainingBatch]:
        """All examples of one epoch, in micro-batches."""
        for indices in self.plan(epoch):
            yield from self._feed(indices, DataPosition(epoch), n_batches=1).batches

    def feeds(self, start: DataPosition) -> Iterator[Feed]:
        """Yield batches from `start` on, without end."""
        for epoch in count(start.epoch):
            batches = self.plan(epoch)
            first = start.index if epoch == start.epoch else 0
            for index in range(first, len(batches)):
                yield self._feed(batches[index], DataPosition(epoch, index), n_batches=len(batches))


class LengthFeeder(Feeder):
    """Examples of known lengths, in batches of similar length under a budget of padded tokens."""

    weights: np.ndarray | None = None

    @abstractmethod
    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        """Lengths of all examples of an epoch: of both sides, or of rows."""

    def _plan(self, epoch: int) -> list[np.ndarray]:
        sides = self._lengths(epoch)
        return plan(sides[0], sides[-1], budget=self.budget, seed=self.seed, epoch=epoch, weights=self.weights)

    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        src, tgt = sides[0], sides[-1]
        return [split(share, src, tgt, budget=self.micro_budget) for share in share_out(src, tgt, self.n_ranks)]


class PairFeeder(LengthFeeder):
    """Sentence pairs, for translation."""

    unit = "sentence pair in the data"

    def __init__(
        self,
        store: TokenStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        weights: np.ndarray | None = None,
        segment: SubwordSampling | None = None,
    ) -> None:
        """`weights`: how often each pair occurs in an epoch."""
        super().__init__(settings, device=device)
        self.store, self.weights, self.segment = store, weights, segment

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        return self.store.src_lengths, self.store.tgt_lengths

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """Both sides of a pair."""
        src, tgt = self.store[index]
        return [tokenizers.src.decode(src.tolist()), tokenizers.tgt.decode(tgt.tolist())]

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        if self.segment is None:  # the other ranks' sentences are not read
            sides = self.store.lengths_of(indices)
            return sides, int(sides[1].sum()), lambda part: collate([self._example(i) for i in indices[part].tolist()])
        examples = self.segment([self._example(i) for i in indices.tolist()], position)
        src = np.array([len(e.src) + 1 for e in examples])
        tgt = np.array([len(e.tgt) + 1 for e in examples])
        return (src, tgt), int(tgt.sum()), lambda part: collate([examples[i] for i in part])

    def _example(self, index: int) -> Example:
        links = [self.store.links_of(index)] if isinstance(self.store, AlignedStore) else []
        return Example(*self.store[index], *links)


@contextmanager
def ahead(items: Iterator[T], *, n: int) -> Iterator[Iterator[T]]:
    """Make up to `n` of the `items` ahead in a thread, so that a GPU does not wait; 0: no thread.

    An error in the thread is raised to the consumer in place of the item. Leaving the context ends the thread.
    """
    if n == 0:
        yield items
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches-ahead")
    end = object()

    def received() -> Iterator[T]:
        waiting = deque(pool.submit(next, items, end) for _ in range(n))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]  # not the end

    try:
        yield received()
    finally:
        pool.shutdown(cancel_futures=True)
