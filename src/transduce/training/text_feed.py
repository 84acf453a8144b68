"""Feeders for running text: rows of a text store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from transduce.config.settings import TrainingSettings
from transduce.data.batch import RowBatch, causal, collate_rows
from transduce.data.batching import offset_of, plan_rows, plan_streams, row_end, row_starts
from transduce.data.examples import RowExample
from transduce.data.store import TextStore
from transduce.text.special import PAD
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import DataPosition, Feeder, Loaded


class RowFeeder(Feeder):
    """Rows of `context` targets each."""

    def __init__(
        self,
        store: TextStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        context: int,
        separate: bool = False,
    ) -> None:
        """`separate`: batches say which document each token belongs to."""
        super().__init__(settings, device=device)
        self.store, self.context, self.separate = store, context, separate

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The positions in the store of the rows' first targets."""
        n_rows = self.budget // self.context
        return plan_rows(len(self.store), context=self.context, n_rows=n_rows, seed=self.seed, epoch=epoch)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """The text that contains a row; epochs cut it at different positions."""
        return [tokenizers.tgt.decode(self.store.ids[max(0, index - 1) : index + self.context].tolist())]

    def in_order(self) -> Iterator[RowBatch]:
        """All rows in the order of the text, for validation."""
        starts = row_starts(len(self.store), context=self.context, offset=0)
        n_rows = max(1, self.micro_budget // self.context)
        for first in range(0, len(starts), n_rows):
            rows = [self._row(int(start), offset=0) for start in starts[first : first + n_rows]]
            yield collate_rows(rows, separate=self.separate).to(self.device)

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        offset = offset_of(self.context, seed=self.seed, epoch=position.epoch)
        rows = [self._row(int(start), offset=offset) for start in indices]
        n_targets = sum(int(np.count_nonzero(np.asarray(row.targets) != PAD)) for row in rows)
        lengths = np.array([len(row.ids) for row in rows])
        return (lengths,), n_targets, lambda part: collate_rows([rows[i] for i in part], separate=self.separate)

    def _shares(self, sides: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        n_rows = max(1, self.micro_budget // self.context)
        shares = np.array_split(np.arange(len(sides[0])), self.n_ranks)
        return [np.array_split(share, -(-len(share) // n_rows)) if len(share) else [] for share in shares]

    def _row(self, start: int, *, offset: int) -> RowExample:
        return self._cut(start, row_end(start, len(self.store), context=self.context, offset=offset))

    def _cut(self, start: int, end: int) -> RowExample:
        """The row with the targets from `start` to before `end`. Its first input is the id before `start`."""
        return causal(np.asarray(self.store.ids[start - 1 : end], dtype=np.int64))


class StreamFeeder(RowFeeder):
    """Contiguous streams of text, for models that carry state from one batch to the next.

    The text is divided into as many equal parts as fit into a batch. Row r of every batch belongs to part r and begins
    where row r of the batch before ended. An epoch reads every part from its start, cut at other positions.
    """

    @property
    def n_streams(self) -> int:
        """Rows of a batch: a multiple of the number of ranks, so that each rank keeps its streams.

        A text shorter than a batch gives streams of at least one token.
        """
        n = min(self.budget // self.context, len(self.store) - 1)
        return max(1, n // self.n_ranks) * self.n_ranks

    def _plan(self, epoch: int) -> list[np.ndarray]:
        """The same, in the order of the text."""
        offset = offset_of(self.context, seed=self.seed, epoch=epoch)
        return plan_streams(len(self.store), context=self.context, n_streams=self.n_streams, offset=offset)

    def in_order(self) -> Iterator[RowBatch]:
        """The whole text as one stream, batch by batch: for validation with a carry."""
        for start in range(1, len(self.store), self.context):
            row = self._cut(start, min(start + self.context, len(self.store)))
            yield collate_rows([row], separate=self.separate).to(self.device)

    def _row(self, start: int, *, offset: int) -> RowExample:
        length = (len(self.store) - 1) // self.n_streams
        stream, begin = divmod(start - 1, length)
        end = row_end(begin + 1, length + 1, context=self.context, offset=offset)
        return self._cut(start, stream * length + end)
