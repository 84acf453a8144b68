"""The state of a decoder between steps: the protocol that search and sampling use, and its implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.nn.bias import Bias, sequence_bias, step_bias
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import Pattern
from transduce.nn.positions import Positions

Carry = tuple[Tensor, ...]
"""State that a model passes from one batch of contiguous text to the next: tensors [B, ...], one row per text stream.

An example is Transformer-XL's memory. At the start of a text, and in models without such a state, it is `()`.
No gradient flows through it.
"""


def rows_of(sentences: Int[Tensor, " b"], n_beams: int) -> Int[Tensor, " N"]:
    """Return the row indices of all beams of these sentences; row = sentence * n_beams + beam.

    >>> rows_of(torch.tensor([0, 2]), 2).tolist()
    [0, 1, 4, 5]
    """
    return (sentences[:, None] * n_beams + torch.arange(n_beams, device=sentences.device)).flatten()


@runtime_checkable
class DecodingState(Protocol):
    """The state of a decoder between steps. It is an argument, changed in place, and never stored in a module.

    Each beam of a sentence is a row: row = sentence * n_beams + beam.
    """

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        """Replace the history of each row r by that of row rows[r], which must belong to the same sentence."""

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        """Keep only these sentences, with all their beams."""


@dataclass(slots=True)
class RowState:
    """The state of a decoder without attention caches: tensors by name, and the number of tokens so far (`length`).

    rows: tensors [N, ...] with one row per beam, such as the last states of recurrent units.
    sentences: tensors [B, ...] that the beams of a sentence share, such as the memory.
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


@dataclass(slots=True)
class LayerCache:
    """One decoder block's cached keys and values for B sentences; a sentence's beams are stored along the key axis.

    keys, values: [B, H_kv, capacity * n_beams, K], filled step by step: all beams' keys of the first step, then of the
    second, and so on. None if the whole target is processed in one step, as in training, or if a recurrent unit
    replaces attention.
    cross_keys, cross_values: [B, H_kv, S, K] of the memory; None without a memory. Values may have another width, K_v.
    history: the last inputs [N, ...] of convolutions in the feed-forward, row = sentence * n_beams + beam.
    recurrent: the state [N, D] of a recurrent unit after the last token; None at the start.
    """

    keys: Float[Tensor, "B H C K"] | None
    values: Float[Tensor, "B H C K_v"] | None
    cross_keys: Float[Tensor, "B H S K"] | None = None
    cross_values: Float[Tensor, "B H S K_v"] | None = None
    history: list[Tensor] = field(default_factory=list)
    recurrent: Float[Tensor, "N D"] | None = None

    def append(self, keys: Tensor, values: Tensor, known: slice) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H_kv, Q, K]; return views of the known and the new keys, and of their values.

        `known`: the stored keys that the next queries attend to (`DecoderState.known`).
        """
        if self.keys is None or self.values is None:
            return keys, values
        end = known.stop + keys.shape[2]
        self.keys[:, :, known.stop : end] = keys
        self.values[:, :, known.stop : end] = values
        return self.keys[:, :, known.start : end], self.values[:, :, known.start : end]

    def take(self, rows: Int[Tensor, " N"]) -> None:
        """Replace row r of `history` and of `recurrent` by row rows[r]."""
        self.history = [kept.index_select(0, rows) for kept in self.history]
        self.recurrent = None if self.recurrent is None else self.recurrent.index_select(0, rows)


@dataclass(slots=True)
class DecoderState:
    """The state of a Transformer's decoder: the caches of all blocks, for a batch with `length` tokens in each row.

    memory_bias: attention bias [B, 1, 1, S] that hides source padding.
    positions: the position of each cached key.
    skipped: the number of first keys that are outside the attention pattern of the next queries.
    ancestry: the bias [B, k, k * length] that hides keys outside a beam's history; None with one beam (k = 1).
    Reordering beams copies only this bias and moves no keys.
    """

    layers: list[LayerCache]
    memory_bias: Float[Tensor, "B 1 1 S"]
    n_beams: int = 1
    length: int = 0
    skipped: int = 0
    positions: Int[Tensor, " C"] | None = None
    ancestry: Float[Tensor, "B k C"] | None = None

    @property
    def n_rows(self) -> int:
        return self.memory_bias.shape[0] * self.n_beams

    @property
    def known(self) -> slice:
        """The range of a sentence's cached keys that the next queries attend to."""
        return slice(self.skipped, self.length * self.n_beams)

    def next_positions(self, n_steps: int) -> tuple[Int[Tensor, " Q"], Int[Tensor, " C"]]:
        """Return the positions of each beam's next n_steps queries, beam by beam, and of all keys with the new keys."""
        device = self.memory_bias.device
        queries = torch.arange(self.length, self.length + n_steps, device=device).repeat(self.n_beams)
        self.positions = queries if self.positions is None else torch.cat([self.positions, queries])
        return queries, self.positions

    def biases(
        self,
        patterns: Sequence[Pattern],
        queries: Int[Tensor, " Q"],
        keys: Int[Tensor, " C"],
        scheme: Positions,
        documents: Int[Tensor, "N T"] | None = None,
    ) -> list[Bias]:
        """Return the self-attention bias of the next tokens for each pattern.

        `queries`, `keys`: the result of `next_positions`. `documents`: each token's document number, allowed only in
        the first step of a state with one beam.
        """
        n_steps = queries.shape[0] // self.n_beams
        if self.length == 0 and self.n_beams == 1 and n_steps > 1:
            return [sequence_bias(pattern, queries, scheme, documents=documents) for pattern in patterns]
        factors = [pattern if isinstance(pattern, tuple) else (pattern,) for pattern in patterns]
        firsts = [min(factor.first_key(self.length) for factor in of_layer) for of_layer in factors]
        self.skipped = min(firsts) if self.n_beams == 1 else 0
        keys, history = keys[self.skipped :], self.history_bias(n_steps)
        return [
            step_bias(
                pattern,
                queries,
                keys,
                scheme,
                history=history,
                masked=n_steps > 1 or first > self.skipped or isinstance(pattern, tuple) or not pattern.contiguous,
            )
            for pattern, first in zip(patterns, firsts, strict=True)
        ]

    def history_bias(self, n_steps: int) -> Float[Tensor, "B 1 Q C"] | None:
        """Return the bias that hides other beams' histories from the next n_steps tokens (Q = n_beams * n_steps).

        None with one beam.
        """
        if self.n_beams == 1:
            return None
        device = self.memory_bias.device
        shape = (self.memory_bias.shape[0], self.n_beams, 0)
        past = self.memory_bias.new_zeros(shape) if self.ancestry is None else self.ancestry
        same_beam = torch.eye(self.n_beams, dtype=torch.bool, device=device)
        own = attention_bias(same_beam.repeat_interleave(n_steps, dim=1)[None])[:, 0]  # [1, k, Q]
        self.ancestry = torch.cat([past, own.expand(shape[0], -1, -1)], dim=2)
        return self.ancestry.repeat_interleave(n_steps, dim=1)[:, None]

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        if self.ancestry is not None:
            beams = rows.view(-1, self.n_beams, 1) % self.n_beams
            self.ancestry = self.ancestry.gather(1, beams.expand(self.ancestry.shape))
        for layer in self.layers:
            layer.take(rows)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        rows = rows_of(sentences, self.n_beams)
        for layer in self.layers:
            if layer.keys is not None and layer.values is not None:
                layer.keys, layer.values = (self._selected(x, sentences) for x in (layer.keys, layer.values))
            if layer.cross_keys is not None and layer.cross_values is not None:
                layer.cross_keys = layer.cross_keys.index_select(0, sentences)
                layer.cross_values = layer.cross_values.index_select(0, sentences)
            layer.take(rows)
        self.memory_bias = self.memory_bias.index_select(0, sentences)
        if self.ancestry is not None:
            self.ancestry = self.ancestry.index_select(0, sentences)

    def _selected(self, cached: Tensor, sentences: Tensor) -> Tensor:
        """Move the stored keys or values of these sentences to the front of their tensor; return that part, a view."""
        kept, end = cached[: len(sentences)], self.known.stop
        kept[:, :, :end] = cached[:, :, :end].index_select(0, sentences)
        return kept
