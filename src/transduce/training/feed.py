"""Feeders put the batches of all epochs on the device, from any position on; one class for each kind of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import Field

from transduce.config.section import resolved
from transduce.config.settings import TrainingSettings
from transduce.data import batching
from transduce.data.batch import (
    LabelBatch,
    MaskedBatch,
    RowBatch,
    TrainingBatch,
    causal,
    collate,
    collate_labelled,
    collate_masked,
    collate_rows,
)
from transduce.data.store import (
    AlignedStore,
    Example,
    LabelStore,
    Packed,
    RowExample,
    SentenceStore,
    TextStore,
    TokenStore,
    pack,
)
from transduce.errors import DataError
from transduce.text.special import PAD, UNK, Vocabulary
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
    """The batches of one update, for one rank.

    batches: micro-batches of this rank. dummies: batches to add so that all ranks have equally many.

    The other fields describe the update of all ranks. indices: its examples. n_targets: target tokens or labels.
    n_tokens: tokens of all sides. n_slots: tokens and padding. after: position of the next update. epochs: number of
    epochs after this update, with a fraction.
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
"""Examples of an update: lengths of each side, the number of targets, and a function from positions among the examples
to a micro-batch."""


@dataclass(frozen=True, slots=True)
class SubwordSampling:
    """Subword regularization (Kudo 2018; Provilkov et al. 2020): new segmentations of each batch in every epoch.

    They are a pure function of (seed, epoch, batch), so that a resumed run has the same pieces. Batches are planned by
    the lengths of the best segmentation. Sampled segmentations are longer, so an update may exceed its budget;
    micro-batches are cut by the real lengths. A sentence keeps its best segmentation if it has unknown pieces, as its
    ids cannot be decoded, or if the sampled segmentation is longer than `max_length`.
    """

    tokenizers: Tokenizers
    amount: float
    seed: int
    max_length: int

    def __call__(self, examples: list[Example], position: DataPosition) -> list[Example]:
        entropy = (self.seed, position.epoch, position.index)
        src_seed, tgt_seed = (int(n) for n in np.random.SeedSequence(entropy).generate_state(2))
        src = self._side(self.tokenizers.src, [np.asarray(e.src).tolist() for e in examples], src_seed)
        tgt = self._side(self.tokenizers.tgt, [np.asarray(e.tgt).tolist() for e in examples], tgt_seed)
        return [Example(src=s, tgt=t) for s, t in zip(src, tgt, strict=True)]

    def _side(self, tokenizer: Vocabulary, stored: Sequence[list[int]], seed: int) -> list[list[int]]:
        texts = list(map(tokenizer.decode, stored))
        sampled = tokenizer.with_frame(()).sample(texts, amount=self.amount, seed=seed)
        framed = [[*old[: tokenizer.n_frame(old)], *new] for old, new in zip(stored, sampled, strict=True)]
        return [
            new if pieces and len(new) <= self.max_length and UNK not in old else old
            for old, pieces, new in zip(stored, sampled, framed, strict=True)
        ]


class Feeder(ABC):
    """Base of feeders, which make the batches for the training loop.

    The plan of an epoch is a pure function of (settings, epoch, number of ranks). A feeder yields the share of each
    batch that rank number `rank` of `n_ranks` trains on.
    """

    rank, n_ranks = 0, 1
    unit = "text"  # name of the examples, for the error of an empty epoch

    def __init__(self, settings: TrainingSettings, *, device: torch.device) -> None:
        """`settings`: training settings in which the batch sizes have been chosen."""
        self.device, self.seed = device, settings.seed
        self.budget = resolved(settings.batch_tokens, "training.batch_tokens")
        self.micro_budget = settings.micro_batch_tokens or self.budget

    def plan(self, epoch: int) -> list[np.ndarray]:
        """Return the batches of an epoch, as indices of examples. Raises `DataError` if there are none."""
        if not (batches := self._plan(epoch)):
            raise DataError(f"there is no {self.unit} to train on, or to validate with")
        return batches

    @abstractmethod
    def _plan(self, epoch: int) -> list[np.ndarray]:
        """Return the batches of an epoch, as indices of examples; the list may be empty."""

    @abstractmethod
    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """Return the text of the example with this index in the plan of an epoch, as one string for each side."""

    @abstractmethod
    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        """Load the examples with these indices, which are the batch at `position`."""

    @abstractmethod
    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Divide a batch; return the micro-batches of each rank, as positions among the examples.

        `sides`: the lengths of all examples, an array for each side.
        """

    def _feed(self, indices: np.ndarray, position: DataPosition, *, n_batches: int) -> Feed:
        """Make the batch of these examples, which has this position in a plan of `n_batches`, on the device."""
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
        """Yield all examples of one epoch, in micro-batches."""
        for indices in self.plan(epoch):
            yield from self._feed(indices, DataPosition(epoch), n_batches=1).batches

    def position_after(self, epochs: float) -> DataPosition:
        """Return the position after a number of epochs, which may have a fraction; it is rounded to whole batches."""
        epoch = int(epochs)
        n_batches = len(self.plan(epoch))
        return DataPosition(epoch, min(round((epochs - epoch) * n_batches), n_batches - 1))

    def feeds(self, start: DataPosition) -> Iterator[Feed]:
        """Yield the batches from `start` on, epoch after epoch, without end."""
        for epoch in count(start.epoch):
            batches = self.plan(epoch)
            first = start.index if epoch == start.epoch else 0
            for index in range(first, len(batches)):
                yield self._feed(batches[index], DataPosition(epoch, index), n_batches=len(batches))


class LengthFeeder(Feeder):
    """Base of feeders that batch examples of similar length, under a budget of padded tokens."""

    weights: np.ndarray | None = None

    @abstractmethod
    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        """Return the lengths of all examples of an epoch: an array for each side of pairs, or a single array."""

    def _plan(self, epoch: int) -> list[np.ndarray]:
        sides = self._lengths(epoch)
        return batching.plan(sides[0], sides[-1], budget=self.budget, seed=self.seed, epoch=epoch, weights=self.weights)

    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        src, tgt = sides[0], sides[-1]
        shares = batching.share_out(src, tgt, self.n_ranks)
        return [batching.split(share, src, tgt, budget=self.micro_budget) for share in shares]


class PairFeeder(LengthFeeder):
    """Feeder of sentence pairs, for translation."""

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
        """`weights`: how many times each pair occurs in an epoch (default: once). `segment`: samples segmentations."""
        super().__init__(settings, device=device)
        self.store, self.weights, self.segment = store, weights, segment

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        return self.store.src_lengths, self.store.tgt_lengths

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        src, tgt = self.store[index]
        return [tokenizers.src.decode(src.tolist()), tokenizers.tgt.decode(tgt.tolist())]

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        if self.segment is None:  # sentences of other ranks are not read
            sides = self.store.lengths_of(indices)
            return sides, int(sides[1].sum()), lambda part: collate([self._example(i) for i in indices[part].tolist()])
        examples = self.segment([self._example(i) for i in indices.tolist()], position)
        src = np.array([len(e.src) + 1 for e in examples])
        tgt = np.array([len(e.tgt) + 1 for e in examples])
        return (src, tgt), int(tgt.sum()), lambda part: collate([examples[i] for i in part])

    def _example(self, index: int) -> Example:
        links = [self.store.links_of(index)] if isinstance(self.store, AlignedStore) else []
        return Example(*self.store[index], *links)


class RowFeeder(Feeder):
    """Feeder of rows with `context` targets each, for language models."""

    def __init__(
        self,
        store: TextStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        context: int,
        separate: bool = False,
    ) -> None:
        """`separate`: whether batches contain each token's document number, so that documents are kept apart."""
        super().__init__(settings, device=device)
        self.store, self.context, self.separate = store, context, separate

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """Return the batches of an epoch; the index of a row is the position of its first target in the store."""
        n_rows = self.budget // self.context
        return batching.plan_rows(len(self.store), context=self.context, n_rows=n_rows, seed=self.seed, epoch=epoch)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        return [tokenizers.tgt.decode(self.store.ids[max(0, index - 1) : index + self.context].tolist())]

    def in_order(self) -> Iterator[RowBatch]:
        """Yield all rows in the order of the text, in batches, for validation."""
        starts = batching.row_starts(len(self.store), context=self.context, offset=0)
        n_rows = max(1, self.micro_budget // self.context)
        for first in range(0, len(starts), n_rows):
            rows = [self._row(int(start), offset=0) for start in starts[first : first + n_rows]]
            yield collate_rows(rows, separate=self.separate).to(self.device)

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        offset = batching.offset_of(self.context, seed=self.seed, epoch=position.epoch)
        rows = [self._row(int(start), offset=offset) for start in indices]
        n_targets = sum(int(np.count_nonzero(np.asarray(row.targets) != PAD)) for row in rows)
        lengths = np.array([len(row.ids) for row in rows])
        return (lengths,), n_targets, lambda part: collate_rows([rows[i] for i in part], separate=self.separate)

    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        n_rows = max(1, self.micro_budget // self.context)
        shares = np.array_split(np.arange(len(sides[0])), self.n_ranks)
        return [np.array_split(share, -(-len(share) // n_rows)) if len(share) else [] for share in shares]

    def _row(self, start: int, *, offset: int) -> RowExample:
        return self._cut(start, batching.row_end(start, len(self.store), context=self.context, offset=offset))

    def _cut(self, start: int, end: int) -> RowExample:
        """Return the row with the targets `start` to `end` - 1. Its first input is the id before `start`."""
        return causal(np.asarray(self.store.ids[start - 1 : end], dtype=np.int64))


class StreamFeeder(RowFeeder):
    """Feeder of contiguous streams of text, for models that carry state from one batch to the next.

    The text is divided into as many equal parts as a batch has rows. Row r of every batch belongs to part r and begins
    where row r of the previous batch ended. Every epoch reads each part from its start, but cuts it at new positions.
    """

    @property
    def n_streams(self) -> int:
        """Number of rows of a batch: a multiple of the number of ranks, so that each rank keeps its streams.

        If the text is shorter than a batch, each stream has at least one token.
        """
        n = min(self.budget // self.context, len(self.store) - 1)
        return max(1, n // self.n_ranks) * self.n_ranks

    def _plan(self, epoch: int) -> list[np.ndarray]:
        offset = batching.offset_of(self.context, seed=self.seed, epoch=epoch)
        return batching.plan_streams(len(self.store), context=self.context, n_streams=self.n_streams, offset=offset)

    def in_order(self) -> Iterator[RowBatch]:
        """Yield the whole text as one stream of batches, for validation with a carry."""
        for start in range(1, len(self.store), self.context):
            row = self._cut(start, min(start + self.context, len(self.store)))
            yield collate_rows([row], separate=self.separate).to(self.device)

    def _row(self, start: int, *, offset: int) -> RowExample:
        length = (len(self.store) - 1) // self.n_streams
        stream, begin = divmod(start - 1, length)
        end = batching.row_end(begin + 1, length + 1, context=self.context, offset=offset)
        return self._cut(start, stream * length + end)


class LabelFeeder(LengthFeeder):
    """Feeder of labelled texts, which all occur once in an epoch."""

    def __init__(self, store: LabelStore, settings: TrainingSettings, *, device: torch.device) -> None:
        super().__init__(settings, device=device)
        self.store = store

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        return (self.store.lengths,)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        ids, segments = (example := self.store[index]).ids, example.segments
        return [tokenizers.tgt.decode(ids[segments == number].tolist()) for number in range(segments[-1] + 1)]

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        examples, labels = [self.store[int(i)] for i in indices], self.store.labels[indices].tolist()

        def collated(part: np.ndarray) -> LabelBatch:
            return collate_labelled([examples[i] for i in part], [labels[i] for i in part])

        return (self.store.lengths[indices],), len(indices), collated


class MaskedFeeder(LengthFeeder):
    """Feeder of masked text, in single segments or in pairs. Segments and masks differ in every epoch."""

    def __init__(
        self,
        store: SentenceStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        context: int,
        masked: Callable[[np.ndarray, np.random.Generator], RowExample],
        pairs: bool = False,
    ) -> None:
        """`context`: tokens of a row, including special tokens. `masked`: function that masks some tokens of a row."""
        super().__init__(settings, device=device)
        self.store, self.context, self.masked, self.pairs = store, context, masked, pairs
        self._known: tuple[int, list[batching.PairPlan]] = (-1, [])

    @property
    def room(self) -> int:
        """Number of tokens of a row, excluding special tokens."""
        return self.context - (3 if self.pairs else 2)

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        ends, sides = np.asarray(self.store.offsets), [(*p.a, *p.b) for p in self._plans(epoch)]
        a, a_end, b, b_end = np.array(sides, dtype=np.int64).reshape(-1, 4).T
        text = ends[a_end] - ends[a] + ends[b_end] - ends[b]
        return (np.minimum(text, self.room) + self.context - self.room,)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        row = self._plans(epoch)[index]
        return [tokenizers.tgt.decode(self.store.span(*side).tolist()) for side in (row.a, row.b) if side[0] < side[1]]

    def _plans(self, epoch: int) -> list[batching.PairPlan]:
        """Return the plan of each row of an epoch. The last result is cached."""
        known, plans = self._known  # read the attribute once: another thread, which makes batches ahead, may change it
        if known != epoch:
            make = batching.plan_pairs if self.pairs else batching.plan_runs
            plans = make(self.store.lengths, self.store.documents, room=self.room, seed=self.seed, epoch=epoch)
            self._known = (epoch, plans)
        return plans

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        plans = [self._plans(position.epoch)[int(i)] for i in indices]
        packed, hidden = zip(*(self._example(row, position.epoch) for row in plans), strict=True)
        n_targets = sum(int(np.count_nonzero(row.targets)) for row in hidden)

        def collated(part: np.ndarray) -> MaskedBatch:
            return collate_masked(
                [hidden[i] for i in part],
                [packed[i].segments for i in part],
                [plans[i].label for i in part],
                targets_per_pair=n_targets / len(plans),
            )

        return (np.array([len(row.ids) for row in hidden]),), n_targets, collated

    def _example(self, row: batching.PairPlan, epoch: int) -> tuple[Packed, RowExample]:
        draw = batching.generator(self.seed, epoch, row.number, use="masking")
        a, b = self.store.span(*row.a), self.store.span(*row.b)
        if self.pairs:
            cut_a, cut_b = batching.fit(len(a), len(b), self.room, draw)
            packed = pack(a[cut_a], b[cut_b])
        else:
            packed = pack(a[: self.room])
        return packed, self.masked(packed.ids, draw)


@contextmanager
def ahead(items: Iterator[T], *, n: int) -> Iterator[Iterator[T]]:
    """Context manager that makes up to `n` of the `items` ahead in a thread, so that a GPU does not wait for batches.

    With n = 0 there is no thread. An error in the thread is raised to the consumer in place of the item. Leaving the
    context ends the thread.
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
