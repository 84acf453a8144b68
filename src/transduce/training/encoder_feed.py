"""Feeders for encoders: rows of similar length with masked tokens, or with labels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch

from transduce.config import TrainingSettings
from transduce.data.batch import LabelBatch, MaskedBatch, collate_labelled, collate_masked
from transduce.data.batching import padding_share, plan, share_out, split
from transduce.data.masking import Masked, generator_of, mask
from transduce.data.sentence_pairs import Packed, PairPlan, fit, pack, plan_pairs, plan_runs
from transduce.data.store import LabelStore, SentenceStore
from transduce.errors import DataError
from transduce.text.tokenizer import Tokenizers
from transduce.training.feed import Feed, Feeder, Position, padded


class RowsOfLength(Feeder):
    """Batches of rows whose lengths are known, under a budget of padded tokens."""

    @abstractmethod
    def lengths(self, epoch: int) -> np.ndarray:
        """Tokens of every row of an epoch."""

    def plan(self, epoch: int) -> list[np.ndarray]:
        """The batches of an epoch, as numbers of its rows."""
        lengths = self.lengths(epoch)
        batches = plan(lengths, lengths, budget=self.budget, seed=self.seed, epoch=epoch)
        if not batches:
            raise DataError("there is no text to train on, or to validate with")
        return batches

    def padding(self) -> float:
        """The share of padding in the batches of the first epoch."""
        lengths = self.lengths(0)
        return padding_share(self.plan(0), lengths, lengths)

    def _of(
        self,
        indices: np.ndarray,
        lengths: np.ndarray,
        position: Position,
        n_batches: int,
        n_targets: int,
        collated: Callable[[np.ndarray], MaskedBatch | LabelBatch],
    ) -> Feed:
        """The feed of rows of these lengths; `collated` makes a micro-batch of those at the given places."""
        shares = [
            split(share, lengths, lengths, budget=self.micro_budget)
            for share in share_out(lengths, lengths, self.n_ranks)
        ]
        return self._made(
            indices,
            [collated(part) for part in shares[self.rank]],
            position,
            n_batches=n_batches,
            n_targets=n_targets,
            n_tokens=int(lengths.sum()),
            n_slots=padded(lengths, shares),
        )


class LabelFeeder(RowsOfLength):
    """Labelled texts; an epoch has each once."""

    def __init__(self, store: LabelStore, settings: TrainingSettings, *, device: torch.device) -> None:
        super().__init__(settings, device=device)
        self.store = store

    def lengths(self, epoch: int) -> np.ndarray:
        """The same in every epoch."""
        return self.store.lengths

    def texts(self, index: int, tokenizers: Tokenizers) -> list[str]:
        """The texts of an example."""
        one = self.store[index]
        return [
            tokenizers.tgt.decode(one.ids[one.segments == number].tolist()) for number in range(one.segments[-1] + 1)
        ]

    def _feed(self, indices: np.ndarray, position: Position, *, n_batches: int) -> Feed:
        examples, labels = [self.store[int(i)] for i in indices], self.store.labels[indices].tolist()

        def collated(part: np.ndarray) -> LabelBatch:
            return collate_labelled([examples[i] for i in part], [labels[i] for i in part])

        return self._of(indices, self.store.lengths[indices], position, n_batches, len(indices), collated)


class MaskedFeeder(RowsOfLength):
    """Text with gaps, in single segments or in pairs. Every epoch cuts and hides anew."""

    def __init__(
        self,
        store: SentenceStore,
        settings: TrainingSettings,
        *,
        device: torch.device,
        context: int,
        vocab_size: int,
        share: float,
        pairs: bool = False,
        starts: np.ndarray | None = None,
    ) -> None:
        """`context`: tokens of a row, frame counted. `share`: of the tokens to hide; `starts`: for whole words."""
        super().__init__(settings, device=device)
        self.store, self.context, self.pairs, self.share = store, context, pairs, share
        self.vocab_size, self.starts = vocab_size, starts
        self._known: tuple[int, list[PairPlan]] = (-1, [])

    @property
    def room(self) -> int:
        """Tokens of a row that are text."""
        return self.context - (3 if self.pairs else 2)

    def lengths(self, epoch: int) -> np.ndarray:
        """As the epoch's plan has them."""
        ends, sides = self._ends, [(*p.a, *p.b) for p in self._plans(epoch)]
        a, a_end, b, b_end = np.array(sides, dtype=np.int64).reshape(-1, 4).T
        text = ends[a_end] - ends[a] + ends[b_end] - ends[b]
        return np.minimum(text, self.room) + self.context - self.room

    def texts(self, index: int, tokenizers: Tokenizers) -> list[str]:
        """The text of a row of the epoch that was planned last."""
        plans = self._known[1] or self._plans(0)
        one = plans[min(index, len(plans) - 1)]
        return [tokenizers.tgt.decode(self.store.span(*side).tolist()) for side in (one.a, one.b) if side[0] < side[1]]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.asarray(self.store.offsets)

    def _plans(self, epoch: int) -> list[PairPlan]:
        """Of one epoch; the last that was asked for is remembered, as it follows from the epoch alone."""
        if self._known[0] != epoch:
            make = plan_pairs if self.pairs else plan_runs
            plans = make(self.store.lengths, self.store.documents, room=self.room, seed=self.seed, epoch=epoch)
            self._known = (epoch, plans)
        return self._known[1]

    def _feed(self, indices: np.ndarray, position: Position, *, n_batches: int) -> Feed:
        plans = [self._plans(position.epoch)[int(i)] for i in indices]
        packed, hidden = zip(*(self._example(one, position.epoch) for one in plans), strict=True)
        n_targets = sum(int(np.count_nonzero(row.targets)) for row in hidden)
        lengths = np.array([len(row.ids) for row in hidden])

        def collated(part: np.ndarray) -> MaskedBatch:
            return collate_masked(
                [hidden[i] for i in part],
                [packed[i].segments for i in part],
                [plans[i].label for i in part],
                targets_a_pair=n_targets / len(plans),
            )

        return self._of(indices, lengths, position, n_batches, n_targets, collated)

    def _example(self, one: PairPlan, epoch: int) -> tuple[Packed, Masked]:
        draw = generator_of(seed=self.seed, epoch=epoch, place=one.place)
        a, b = self.store.span(*one.a), self.store.span(*one.b)
        if self.pairs:
            cut_a, cut_b = fit(len(a), len(b), self.room, draw)
            packed = pack(a[cut_a], b[cut_b])
        else:
            packed = pack(a[: self.room])
        return packed, mask(packed.ids, draw, vocab_size=self.vocab_size, rate=self.share, starts=self.starts)
