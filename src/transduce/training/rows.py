"""Feeders of running text: rows of a text store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from transduce.config import TrainingSettings
from transduce.data.batch import RowBatch, RowExample, collate_rows
from transduce.data.packing import offset_of, plan_rows, plan_streams, row_end, row_starts
from transduce.data.store import TextStore
from transduce.errors import DataError
from transduce.text.special import PAD
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import Feed, Feeder, Position, padded

RowObjective = Callable[[np.ndarray, np.random.Generator], RowExample]
"""Turns the ids of a row into what goes in and what should come out; the generator is the row's own in its epoch."""


class RowFeeder(Feeder):
    """Rows of `context` targets each, as an objective asks for them."""

    def __init__(
        self,
        store: TextStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        context: int,
        objective: RowObjective,
        separate: bool = False,
    ) -> None:
        """A row is given the id before its first target. `separate`: batches tell which document a token belongs to."""
        super().__init__(settings, device=device)
        self.store, self.context, self.objective, self.separate = store, context, objective, separate

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, as the places in the store of their rows' first targets."""
        batches = plan_rows(
            len(self.store),
            context=self.context,
            n_rows=self.budget // self.context,
            seed=self.seed,
            epoch=epoch,
        )
        if not batches:
            raise DataError("there is no text to train on, or to validate with")
        return batches

    def padding(self) -> float:
        """The share of padding in the batches of the first epoch: of two rows at most."""
        n_rows = sum(map(len, self.plan(0)))
        return 1 - (len(self.store) - 1) / (n_rows * self.context)

    def texts(self, index: int, tokenizers: Tokenizers) -> list[str]:
        """The text around a row: where an epoch cuts it may lie anywhere in here."""
        return [tokenizers.tgt.decode(self.store.ids[max(0, index - 1) : index + self.context].tolist())]

    def in_order(self) -> Iterator[RowBatch]:
        """All rows from the beginning to the end of the text, each in the middle of nothing: what validation reads."""
        starts = row_starts(len(self.store), context=self.context, offset=0)
        n_rows = max(1, self.micro_budget // self.context)
        for first in range(0, len(starts), n_rows):
            rows = [self._row(int(start), Position(), offset=0) for start in starts[first : first + n_rows]]
            yield collate_rows(rows, separate=self.separate).to(self.device)

    def _feed(self, indices: np.ndarray, position: Position, *, n_batches: int) -> Feed:
        offset = offset_of(self.context, seed=self.seed, epoch=position.epoch)
        rows = [self._row(int(start), position, offset=offset) for start in indices]
        n_rows = max(1, self.micro_budget // self.context)
        shares = [
            np.array_split(share, -(-len(share) // n_rows)) if len(share) else []
            for share in np.array_split(np.arange(len(rows)), self.n_ranks)
        ]
        lengths = np.array([len(row.ids) for row in rows])
        return self._made(
            indices,
            [collate_rows([rows[i] for i in part], separate=self.separate) for part in shares[self.rank]],
            position,
            n_batches=n_batches,
            n_targets=sum(int(np.count_nonzero(np.asarray(row.targets) != PAD)) for row in rows),
            n_tokens=int(lengths.sum()),
            n_slots=padded(lengths, shares),
        )

    def _row(self, start: int, position: Position, *, offset: int) -> RowExample:
        return self._cut(start, row_end(start, len(self.store), context=self.context, offset=offset), position)

    def _cut(self, start: int, end: int, position: Position) -> RowExample:
        """The row with the targets start .. end."""
        ids = np.asarray(self.store.ids[start - 1 : end], dtype=np.int64)
        return self.objective(ids, np.random.default_rng([self.seed & (2**63 - 1), position.epoch, start]))


class StreamFeeder(RowFeeder):
    """Contiguous streams of text, for models that carry state from one batch to the next.

    The text is divided into as many equal parts as fit into a batch. Row r of every batch belongs to part r and begins
    where row r of the batch before ended. An epoch reads every part from its start.
    """

    @property
    def n_streams(self) -> int:
        """Rows of a batch: a multiple of the number of ranks, so that each rank keeps its streams."""
        return max(1, self.budget // self.context // self.n_ranks) * self.n_ranks

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch in the order of the text, as the places of their rows' first targets."""
        batches = plan_streams(len(self.store), context=self.context, n_streams=self.n_streams)
        if not batches:
            raise DataError("there is no text to train on, or to validate with")
        return batches

    def padding(self) -> float:
        """0: all rows of a batch have the same length."""
        return 0.0

    def in_order(self) -> Iterator[RowBatch]:
        """The whole text as one stream, batch by batch: for validation with a carry."""
        for start in range(1, len(self.store), self.context):
            row = self._cut(start, min(start + self.context, len(self.store)), Position())
            yield collate_rows([row], separate=self.separate).to(self.device)

    def _row(self, start: int, position: Position, *, offset: int) -> RowExample:
        length = (len(self.store) - 1) // self.n_streams
        end_of_stream = 1 + length * ((start - 1) // length + 1)
        return self._cut(start, min(start + self.context, end_of_stream), position)
