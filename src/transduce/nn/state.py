"""What search and sampling need of a decoder's state, and the state of decoders that keep plain tensors."""

from __future__ import annotations

from collections.abc import Callable
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
    """What a decoder keeps between steps: passed in, changed in place, never stored in a module.

    Row = sentence * n_beams + beam.
    """

    n_beams: int
    length: int
    """Number of tokens of every row so far."""

    @property
    def n_rows(self) -> int:
        """Hypotheses in the batch: sentences x beams."""

    def fan_out(self, n_beams: int) -> None:
        """Turn a state of one beam into one of `n_beams`, which share everything so far."""

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

    def fan_out(self, n_beams: int) -> None:
        assert self.n_beams == 1, "this state has fanned out already"
        self.n_beams = n_beams
        self._change_rows(lambda kept: kept.repeat_interleave(n_beams, dim=0))

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        self._change_rows(lambda kept: kept.index_select(0, rows))

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        rows = rows_of(sentences, self.n_beams)
        self._change_rows(lambda kept: kept.index_select(0, rows))
        self.sentences = {name: kept.index_select(0, sentences) for name, kept in self.sentences.items()}

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {name: change(kept) for name, kept in self.rows.items()}
