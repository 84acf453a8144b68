"""Feeders for encoders: rows of similar length with masked tokens, or with labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from transduce.config.settings import TrainingSettings
from transduce.data.batch import LabelBatch, MaskedBatch, collate_labelled, collate_masked
from transduce.data.batching import generator
from transduce.data.examples import RowExample
from transduce.data.sentence_pairs import Packed, PairPlan, fit, pack, plan_pairs, plan_runs
from transduce.data.store import LabelStore, SentenceStore
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import DataPosition, LengthFeeder, Loaded


class LabelFeeder(LengthFeeder):
    """Labelled texts, each once in an epoch."""

    def __init__(self, store: LabelStore, settings: TrainingSettings, *, device: torch.device) -> None:
        super().__init__(settings, device=device)
        self.store = store

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        return (self.store.lengths,)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """The texts of an example."""
        one = self.store[index]
        return [
            tokenizers.tgt.decode(one.ids[one.segments == number].tolist()) for number in range(one.segments[-1] + 1)
        ]

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        examples, labels = [self.store[int(i)] for i in indices], self.store.labels[indices].tolist()

        def collated(part: np.ndarray) -> LabelBatch:
            return collate_labelled([examples[i] for i in part], [labels[i] for i in part])

        return (self.store.lengths[indices],), len(indices), collated


class MaskedFeeder(LengthFeeder):
    """Masked text, in single segments or in pairs. Segments and masks differ in every epoch."""

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
        """`context`: tokens of a row with its special tokens. `masked`: `mask` with its options."""
        super().__init__(settings, device=device)
        self.store, self.context, self.masked, self.pairs = store, context, masked, pairs
        self._known: tuple[int, list[PairPlan]] = (-1, [])

    @property
    def room(self) -> int:
        """Tokens of a row without its special tokens."""
        return self.context - (3 if self.pairs else 2)

    def _lengths(self, epoch: int) -> tuple[np.ndarray, ...]:
        ends, sides = np.asarray(self.store.offsets), [(*p.a, *p.b) for p in self._plans(epoch)]
        a, a_end, b, b_end = np.array(sides, dtype=np.int64).reshape(-1, 4).T
        text = ends[a_end] - ends[a] + ends[b_end] - ends[b]
        return (np.minimum(text, self.room) + self.context - self.room,)

    def texts(self, index: int, tokenizers: Tokenizers, *, epoch: int) -> list[str]:
        """The text of a row."""
        one = self._plans(epoch)[index]
        return [tokenizers.tgt.decode(self.store.span(*side).tolist()) for side in (one.a, one.b) if side[0] < side[1]]

    def _plans(self, epoch: int) -> list[PairPlan]:
        """The rows of an epoch; those of the last epoch asked for are cached."""
        known, plans = self._known  # read once: batches are made ahead in another thread
        if known != epoch:
            make = plan_pairs if self.pairs else plan_runs
            plans = make(self.store.lengths, self.store.documents, room=self.room, seed=self.seed, epoch=epoch)
            self._known = (epoch, plans)
        return plans

    def _load(self, indices: np.ndarray, position: DataPosition) -> Loaded:
        plans = [self._plans(position.epoch)[int(i)] for i in indices]
        packed, hidden = zip(*(self._example(one, position.epoch) for one in plans), strict=True)
        n_targets = sum(int(np.count_nonzero(row.targets)) for row in hidden)

        def collated(part: np.ndarray) -> MaskedBatch:
            return collate_masked(
                [hidden[i] for i in part],
                [packed[i].segments for i in part],
                [plans[i].label for i in part],
                targets_per_pair=n_targets / len(plans),
            )

        return (np.array([len(row.ids) for row in hidden]),), n_targets, collated

    def _example(self, one: PairPlan, epoch: int) -> tuple[Packed, RowExample]:
        draw = generator(self.seed, epoch, one.place, use="masking")
        a, b = self.store.span(*one.a), self.store.span(*one.b)
        if self.pairs:
            cut_a, cut_b = fit(len(a), len(b), self.room, draw)
            packed = pack(a[cut_a], b[cut_b])
        else:
            packed = pack(a[: self.room])
        return packed, self.masked(packed.ids, draw)
