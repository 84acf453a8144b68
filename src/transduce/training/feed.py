"""Feeders: the planned batches of epoch after epoch, from any position, on the device."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

import numpy as np
import torch

from transduce.config import TrainingSettings
from transduce.data.batch import Example, TrainingBatch, collate
from transduce.data.batching import padding_share, plan, share_out, split
from transduce.data.store import TokenStore
from transduce.errors import DataError
from transduce.text.special import UNK, Vocabulary
from transduce.text.tokenizer import Tokenizers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run in its data: the epoch and the next batch in its plan, both from 0."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """One update's examples. `at` is its position, `after` that of the next; `epochs` the passes made then.

    `batches` are the micro-batches of this process; all else, the numbers too, is about the whole update.
    """

    at: Position
    indices: np.ndarray
    batches: tuple[TrainingBatch, ...]
    n_targets: int
    n_tokens: int
    n_slots: int
    after: Position
    epochs: float
    starts_epoch: bool = False


Segmenter = Callable[[list[Example], Position], list[Example]]
"""Turns the stored examples of the batch at a position into those that are trained on: a pure function."""


@dataclass(frozen=True, slots=True)
class SubwordSampling:
    """Subword regularisation (Kudo 2018; Provilkov et al. 2020): the text of a batch, segmented anew in each epoch.

    A deterministic function of (seed, epoch, batch), so that a resumed run sees the same pieces. Batches are planned by
    the lengths of the best segmentation; sampled ones are longer, so an update holds somewhat more tokens than its
    budget, while micro-batches are cut by the real lengths. A sentence with unknown pieces cannot be read back from its
    ids and keeps its best segmentation, as does one that would become longer than `max_length`.
    """

    tokenizers: Tokenizers
    amount: float
    seed: int
    max_length: int

    def __call__(self, examples: list[Example], position: Position) -> list[Example]:
        """The same sentences in other pieces."""
        entropy = (self.seed, position.epoch, position.index)
        src_seed, tgt_seed = (int(n) for n in np.random.SeedSequence(entropy).generate_state(2))
        src = self._side(self.tokenizers.src, [np.asarray(e.src).tolist() for e in examples], src_seed)
        tgt = self._side(self.tokenizers.tgt, [np.asarray(e.tgt).tolist() for e in examples], tgt_seed)
        return [Example(src=s, tgt=t) for s, t in zip(src, tgt, strict=True)]

    def _side(self, tokenizer: Vocabulary, stored: Sequence[list[int]], seed: int) -> list[list[int]]:
        sampled = tokenizer.sample([tokenizer.decode(ids) for ids in stored], amount=self.amount, seed=seed)
        return [
            new if new and len(new) < self.max_length and UNK not in old else old
            for old, new in zip(stored, sampled, strict=True)
        ]


class Feeder(ABC):
    """Batches for the training loop. Those of an epoch are a function of (settings, seed, epoch).

    A feeder yields the share of `rank` among `n_ranks` of each batch; both are set where several processes train.
    """

    rank, n_ranks = 0, 1

    def __init__(self, settings: TrainingSettings, *, device: torch.device) -> None:
        """`settings` with batch sizes chosen."""
        assert settings.batch_tokens is not None, "choose the batch size first"
        self.device, self.seed, self.budget = device, settings.seed, settings.batch_tokens
        self.micro_budget = settings.micro_batch_tokens or settings.batch_tokens

    @abstractmethod
    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, as numbers of examples; a `DataError` where there is none."""

    @abstractmethod
    def padding(self) -> float:
        """The share of padding in the batches of the first epoch."""

    @abstractmethod
    def texts(self, index: int, tokenizers: Tokenizers) -> list[str]:
        """The text of the example of this number."""

    @abstractmethod
    def _feed(self, indices: np.ndarray, position: Position, *, n_batches: int) -> Feed:
        """The batch at a position of a plan of `n_batches`."""

    def batches(self, epoch: int = 0) -> Iterator[TrainingBatch]:
        """All examples of one epoch, without the limits of an update."""
        for indices in self.plan(epoch):
            yield from self._feed(indices, Position(epoch), n_batches=1).batches

    def feeds(self, start: Position, *, skip: Collection[Position] = ()) -> Iterator[Feed]:
        """Yield batches from `start` on, endlessly, without those at the positions `skip`."""
        for epoch in count(start.epoch):
            batches = self.plan(epoch)
            first = start.index if epoch == start.epoch else 0
            is_first = first == 0
            for index in range(first, len(batches)):
                if Position(epoch, index) in skip:
                    continue
                feed = self._feed(batches[index], Position(epoch, index), n_batches=len(batches))
                yield replace(feed, starts_epoch=is_first)
                is_first = False

    def _made(
        self,
        indices: np.ndarray,
        batches: Sequence[TrainingBatch],
        position: Position,
        *,
        n_batches: int,
        n_targets: int,
        n_tokens: int,
        n_slots: int,
    ) -> Feed:
        """The feed of these micro-batches, on the device; the numbers are those of all processes."""
        last = position.index + 1 == n_batches
        return Feed(
            at=position,
            indices=indices,
            batches=tuple(batch.to(self.device) for batch in batches),
            n_targets=n_targets,
            n_tokens=n_tokens,
            n_slots=n_slots,
            after=Position(position.epoch + 1) if last else Position(position.epoch, position.index + 1),
            epochs=position.epoch + (position.index + 1) / n_batches,
        )


class PairFeeder(Feeder):
    """Sentence pairs, for translation."""

    def __init__(
        self,
        store: TokenStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        weights: np.ndarray | None = None,
        segment: Segmenter | None = None,
    ) -> None:
        """`weights`: how often an epoch passes over each pair."""
        super().__init__(settings, device=device)
        self.store, self.weights, self.segment = store, weights, segment

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, as indices into the store."""
        lengths = self.store.src_lengths, self.store.tgt_lengths
        batches = plan(*lengths, budget=self.budget, seed=self.seed, epoch=epoch, weights=self.weights)
        if not batches:
            raise DataError("there is no sentence pair in the data to train on, or to validate with")
        return batches

    def padding(self) -> float:
        """The share of padding in the batches of the first epoch."""
        return padding_share(self.plan(0), self.store.src_lengths, self.store.tgt_lengths)

    def texts(self, index: int, tokenizers: Tokenizers) -> list[str]:
        """Both sides of a pair."""
        src, tgt = self.store[index]
        return [tokenizers.src.decode(src.tolist()), tokenizers.tgt.decode(tgt.tolist())]

    def _feed(self, indices: np.ndarray, position: Position, *, n_batches: int) -> Feed:
        examples = [Example(*self.store[int(i)]) for i in indices]
        if self.segment is not None:
            examples = self.segment(examples, position)
        src = np.array([len(e.src) + 1 for e in examples], dtype=np.int32)
        tgt = np.array([len(e.tgt) + 1 for e in examples], dtype=np.int32)
        shares = [split(share, src, tgt, budget=self.micro_budget) for share in share_out(src, tgt, self.n_ranks)]
        return self._made(
            indices,
            [collate([examples[i] for i in part]) for part in shares[self.rank]],
            position,
            n_batches=n_batches,
            n_targets=int(tgt.sum()),
            n_tokens=int(src.sum() + tgt.sum()),
            n_slots=sum(padded(side, shares) for side in (src, tgt)),
        )


def padded(lengths: np.ndarray, shares: Sequence[Sequence[np.ndarray]]) -> int:
    """Positions of all micro-batches of all processes, with the padding."""
    return sum(len(part) * int(lengths[part].max()) for parts in shares for part in parts)


@contextmanager
def ahead(items: Iterator[T], *, n: int) -> Iterator[Iterator[T]]:
    """`items`, with up to `n` of them made ahead by a thread, so that a GPU does not wait; 0: no thread.

    An error in the thread is raised where the item would have come. Leaving the context ends the thread.
    """
    if n == 0:
        yield items
        return
    waiting: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=n)
    left = threading.Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not left.is_set():
            try:
                return waiting.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if left.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # told to the consumer, whatever it is
            put(None, error)

    def received() -> Iterator[T]:
        while True:
            item, error = waiting.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # an item comes without an error

    thread = threading.Thread(target=work, name="batches-ahead", daemon=True)
    thread.start()
    try:
        yield received()
    finally:
        left.set()
        thread.join()
