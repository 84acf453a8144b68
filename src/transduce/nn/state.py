"""The protocol of a decoder's state for search and sampling, and the state of decoders that keep plain tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

Carry = tuple[Tensor, ...]
"""State of a model that flows from one batch of contiguous text to the next: tensors [B, ...], one row per stream.

An example is Transformer-XL's memory. `()` is the start of a text, and the carry of
models that have none. No gradient flows through it.
"""


def rows_of(sentences: Int[Tensor, " b"], n_beams: int) -> Int[Tensor, " N"]:
    """The rows of all beams of these sentences.

    >>> rows_of(torch.tensor([0, 2]), 2).tolist()
    [0, 1, 4, 5]
    """
    return (sentences[:, None] * n_beams + torch.arange(n_beams, device=sentences.device)).flatten()


@runtime_checkable
class DecodingState(Protocol):
    """The state of a decoder between steps: passed in, changed in place, never stored in a module.

    Row = sentence * n_beams + beam.
    """

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        """Row r continues the history of rows[r], which must belong to the same sentence."""

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        """Keep only these sentences, with all their beams."""


@dataclass(slots=True)
class RowState:
    """A state of tensors by name: `rows` [N, ...] of each row, `sentences` [B, ...] that the beams of a sentence share.

    Recurrent units and convolutions keep their last outputs or inputs in `rows`, and the memory in `sentences`.
    """

    rows: dict[str, Tensor]
    sentences: dict[str, Tensor] = field(default_factory=dict)
    n_beams: int = 1
    length: int = 0

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        self.rows = {name: kept.index_select(0, rows) for name, kept in self.rows.items()}

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        self.reorder(rows_of(sentences, self.n_beams))
        self.sentences = {name: kept.index_select(0, sentences) for name, kept in self.sentences.items()}
