"""Examples become tensors: padded, shifted and framed once, here. Models never shift, and see padding as id 0 only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from transduce.data.objectives import Example, Ids
from transduce.text.tokenizer import BOS, EOS, PAD


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences of one batch, padded on the right with `PAD`."""

    src: Int64[Tensor, "B S"]  # ids EOS
    tgt_in: Int64[Tensor, "B T"]  # BOS ids
    tgt_out: Int64[Tensor, "B T"]  # ids EOS
    n_targets: int  # real tokens of tgt_out: what a loss is divided by

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. To a GPU it goes from pinned memory, without waiting."""
        device = torch.device(device)
        if device.type == self.src.device.type == "cpu":
            return self

        def send(tensor: Tensor) -> Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return Batch(send(self.src), send(self.tgt_in), send(self.tgt_out), self.n_targets)


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
