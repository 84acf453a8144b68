"""Batches of encoder-only models: rows of ids and segments, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from transduce.data.batch import sent, trimmed
from transduce.data.masking import Masked
from transduce.data.sentence_pairs import Packed
from transduce.text.special import PAD


@dataclass(frozen=True, slots=True)
class MaskedBatch:
    """Texts with masked tokens. `places`: row * S + column of each token to predict; `targets`: those tokens.

    `labels` [B]: whether B followed A. `targets_a_pair`: masked tokens for each pair in the whole update, so that both
    losses are means over the update however it was cut.
    """

    ids: Int64[Tensor, "B S"]
    segments: Int64[Tensor, "B S"]
    places: Int64[Tensor, " N"]
    targets: Int64[Tensor, " N"]
    labels: Int64[Tensor, " B"]
    targets_a_pair: float

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model's `forward` takes."""
        return self.ids, self.segments, self.places

    @property
    def n_targets(self) -> int:
        """Tokens to predict."""
        return len(self.targets)

    @property
    def n_rows(self) -> int:
        """Texts."""
        return len(self.ids)

    def part(self, start: int, stop: int) -> MaskedBatch:
        """Some of the texts, with what is asked of them."""
        ids = trimmed(self.ids[start:stop])
        row, column = self.places // self.ids.shape[1], self.places % self.ids.shape[1]
        here = (row >= start) & (row < stop)
        places = (row[here] - start) * ids.shape[1] + column[here]
        segments, labels = self.segments[start:stop, : ids.shape[1]], self.labels[start:stop]
        return MaskedBatch(ids, segments, places, self.targets[here], labels, self.targets_a_pair)

    def to(self, device: torch.device | str) -> MaskedBatch:
        """The batch on a device."""
        tensors = (self.ids, self.segments, self.places, self.targets, self.labels)
        ids, segments, places, targets, labels = sent(tensors, device)
        return MaskedBatch(ids, segments, places, targets, labels, self.targets_a_pair)


@dataclass(frozen=True, slots=True)
class LabelBatch:
    """Texts, and the number of each one's label."""

    ids: Int64[Tensor, "B S"]
    segments: Int64[Tensor, "B S"]
    targets: Int64[Tensor, " B"]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model's `forward` takes."""
        return self.ids, self.segments

    @property
    def n_targets(self) -> int:
        """Texts."""
        return len(self.targets)

    @property
    def n_rows(self) -> int:
        """Texts."""
        return len(self.ids)

    def part(self, start: int, stop: int) -> LabelBatch:
        """Some of the texts."""
        ids = trimmed(self.ids[start:stop])
        return LabelBatch(ids, self.segments[start:stop, : ids.shape[1]], self.targets[start:stop])

    def to(self, device: torch.device | str) -> LabelBatch:
        """The batch on a device."""
        return LabelBatch(*sent((self.ids, self.segments, self.targets), device))


def collate_masked(
    rows: Sequence[Masked], segments: Sequence[np.ndarray], labels: Sequence[int], *, targets_a_pair: float
) -> MaskedBatch:
    """Pad to the longest row."""
    ids, kinds = pad_rows([row.ids for row in rows]), pad_rows(segments)
    targets = pad_rows([row.targets for row in rows]).flatten()
    places = (targets != PAD).nonzero()[:, 0]
    return MaskedBatch(ids, kinds, places, targets[places], torch.tensor(list(labels)), targets_a_pair)


def collate_labelled(examples: Sequence[Packed], labels: Sequence[int]) -> LabelBatch:
    """Pad to the longest text."""
    ids, segments = pad_rows([one.ids for one in examples]), pad_rows([one.segments for one in examples])
    return LabelBatch(ids, segments, torch.tensor(list(labels), dtype=torch.long))


def pad_rows(rows: Sequence[np.ndarray]) -> Int64[Tensor, "B S"]:
    """One tensor of all rows, with zeros on the right.

    >>> pad_rows([np.array([5]), np.array([6, 7])]).tolist()
    [[5, 0], [6, 7]]
    """
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return torch.from_numpy(padded)
