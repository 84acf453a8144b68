"""Turn examples into tensors. Padding, shifting and special ids are applied here, and only here.

`TrainingBatch` is what training needs of a batch of any task: inputs, targets, their number, a move to a device, and a
part of the rows, for updates that do not fit into memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from transduce.data.objectives import Example, Ids, RowExample
from transduce.text.tokenizer import BOS, EOS, PAD


@runtime_checkable
class TrainingBatch(Protocol):
    """What training and validation need of a batch, of any task."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model's `forward` takes, in order."""

    @property
    def targets(self) -> Tensor:
        """Int64 [B, T]: the targets for the hidden states [B, T, D] of `forward`; `PAD` where there is none."""

    @property
    def n_targets(self) -> int:
        """Targets that are not `PAD`; the loss is divided by their number."""

    @property
    def n_rows(self) -> int:
        """Examples, or rows of text."""

    def part(self, start: int, stop: int) -> TrainingBatch:
        """Rows `start` to `stop` as a batch, without columns of padding."""

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The batch on a device."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences of one batch, padded on the right with `PAD`."""

    src: Int64[Tensor, "B S"]  # ids EOS
    tgt_in: Int64[Tensor, "B T"]  # BOS ids
    tgt_out: Int64[Tensor, "B T"]  # ids EOS
    n_targets: int  # real tokens of tgt_out: what a loss is divided by

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Source and target as the model takes them."""
        return self.src, self.tgt_in

    @property
    def targets(self) -> Tensor:
        """The target sentences."""
        return self.tgt_out

    @property
    def n_rows(self) -> int:
        """Sentences."""
        return len(self.src)

    def part(self, start: int, stop: int) -> Batch:
        """Some of the sentences."""
        src, tgt_in, tgt_out = (trimmed(side[start:stop]) for side in (self.src, self.tgt_in, self.tgt_out))
        return Batch(src, tgt_in, tgt_out, int((tgt_out != PAD).sum()))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. To a GPU it goes from pinned memory, without waiting."""
        if _is_there(self.src, device):
            return self
        src, tgt_in, tgt_out = sent((self.src, self.tgt_in, self.tgt_out), device)
        return Batch(src, tgt_in, tgt_out, self.n_targets)


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of running text, padded on the right with `PAD`.

    inputs: ids [B, T]; and, where attention is limited to documents, the number of each token's document [B, T].
    """

    inputs: tuple[Tensor, ...]
    targets: Int64[Tensor, "B T"]
    n_targets: int

    @property
    def n_rows(self) -> int:
        """Rows of text."""
        return len(self.targets)

    def part(self, start: int, stop: int) -> RowBatch:
        """Some of the rows."""
        ids = trimmed(self.inputs[0][start:stop])
        width = ids.shape[1]
        targets = self.targets[start:stop, :width]
        inputs = (ids, *(tensor[start:stop, :width] for tensor in self.inputs[1:]))
        return RowBatch(inputs, targets, int((targets != PAD).sum()))

    def to(self, device: torch.device | str) -> RowBatch:
        """The batch on a device. To a GPU it goes from pinned memory, without waiting."""
        if _is_there(self.targets, device):
            return self
        *inputs, targets = sent((*self.inputs, self.targets), device)
        return RowBatch(tuple(inputs), targets, self.n_targets)


def collate(examples: Sequence[Example]) -> Batch:
    """Frame, shift and pad examples: at least one, of any lengths, empty ones too.

    >>> collate([Example(src=[5, 6], tgt=[7])]).tgt_in.tolist()
    [[2, 7]]
    """
    src, tgt = _flat([example.src for example in examples]), _flat([example.tgt for example in examples])
    src_rows, tgt_in, tgt_out = _ended(*src), _begun(*tgt), _ended(*tgt)
    n_targets = len(tgt[0]) + len(examples)
    return Batch(torch.from_numpy(src_rows), torch.from_numpy(tgt_in), torch.from_numpy(tgt_out), n_targets)


def pad_sources(sentences: Sequence[Ids]) -> Int64[Tensor, "B S"]:
    """Sources to decode from, as `collate` makes them: ids, EOS, padding."""
    return torch.from_numpy(_ended(*_flat(sentences)))


def collate_rows(examples: Sequence[RowExample], *, separate: bool = False) -> RowBatch:
    """Pad rows to the longest of them. `separate`: with the number of each token's document within its row.

    A document begins with `BOS`.

    >>> collate_rows([RowExample([2, 5], [5, 3]), RowExample([6], [7])]).targets.tolist()
    [[5, 3], [7, 0]]
    """
    ids, targets = (_rows(*_flat([side(e) for e in examples])) for side in (lambda e: e.ids, lambda e: e.targets))
    inputs = [torch.from_numpy(ids)]
    if separate:
        inputs.append(torch.from_numpy((ids == BOS).cumsum(1)))
    return RowBatch(tuple(inputs), torch.from_numpy(targets), int(np.count_nonzero(targets != PAD)))


def trimmed(rows: Int64[Tensor, "B S"]) -> Int64[Tensor, "B s"]:
    """Rows without the columns on the right that are padding in all of them.

    >>> trimmed(torch.tensor([[5, 0, 0], [6, 7, 0]])).tolist()
    [[5, 0], [6, 7]]
    """
    filled = (rows != PAD).any(0).nonzero()
    return rows[:, : int(filled[-1]) + 1 if len(filled) else 0]


def _is_there(tensor: Tensor, device: torch.device | str) -> bool:
    return torch.device(device).type == tensor.device.type == "cpu"


def sent(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Tensors on a device. To a GPU they go from pinned memory, without waiting."""
    to_gpu = torch.device(device).type == "cuda"
    return [(tensor.pin_memory() if to_gpu else tensor).to(device, non_blocking=True) for tensor in tensors]


def _rows(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of ids, padding."""
    rows = np.full((len(lengths), int(lengths.max(initial=0))), PAD, dtype=np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = ids
    return rows


def _flat(sentences: Sequence[Ids]) -> tuple[np.ndarray, np.ndarray]:
    """All ids of the sentences in one array, and the length of each."""
    lengths = np.fromiter(map(len, sentences), dtype=np.int64, count=len(sentences))
    if not sentences:
        return np.zeros(0, dtype=np.int64), lengths
    return np.concatenate(sentences, dtype=np.int64, casting="unsafe"), lengths


def _ended(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of ids, EOS, padding."""
    rows = np.full((len(lengths), int(lengths.max(initial=0)) + 1), PAD, dtype=np.int64)
    columns = np.arange(rows.shape[1])
    rows[columns < lengths[:, None]] = ids
    rows[columns == lengths[:, None]] = EOS
    return rows


def _begun(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of BOS, ids, padding."""
    rows = np.full((len(lengths), int(lengths.max(initial=0)) + 1), PAD, dtype=np.int64)
    rows[:, 0] = BOS
    rows[:, 1:][np.arange(rows.shape[1] - 1) < lengths[:, None]] = ids
    return rows
