"""What a decoder remembers between steps: passed in, changed in place, never kept by a module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(slots=True)
class LayerCache:
    """One decoder block's memory. Rows N = sentences x beams; cross-attention is held once a sentence.

    keys, values: [N, H_kv, capacity, K], filled up to the state's length. cross_keys, cross_values: [B, H_kv, S, K].
    history: the last inputs of convolutions in the feed-forward, empty where there are none.
    Without room (keys None) nothing is kept: the whole target goes through in one step, as in training.
    """

    keys: Float[Tensor, "N H C K"] | None
    values: Float[Tensor, "N H C K"] | None
    cross_keys: Float[Tensor, "B H S K"]
    cross_values: Float[Tensor, "B H S K"]
    history: list[Tensor] = field(default_factory=list)

    def append(self, keys: Tensor, values: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [N, H_kv, t, K] from position `length` on; all that is known up to there, as views."""
        if self.keys is None or self.values is None:
            return keys, values
        end = length + keys.shape[2]
        self.keys[:, :, length:end] = keys
        self.values[:, :, length:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(slots=True)
class DecoderState:
    """All blocks' memory of a batch, `length` tokens long, and the bias that hides source padding, [B, 1, 1, S]."""

    layers: list[LayerCache]
    memory_bias: Float[Tensor, "B 1 1 S"]
    n_beams: int = 1
    length: int = 0

    @property
    def n_rows(self) -> int:
        """Hypotheses in the batch: sentences x beams."""
        return self.memory_bias.shape[0] * self.n_beams

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        """Row r goes on from the history of rows[r], which must belong to the same sentence."""
        for layer in self.layers:
            for known in (layer.keys, layer.values):
                assert known is not None, "a state without capacity cannot be reordered"
                known[:, :, : self.length] = known[:, :, : self.length].index_select(0, rows)
            layer.history = [h.index_select(0, rows) for h in layer.history]

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        """Keep only these sentences, with all their beams."""
        beams = torch.arange(self.n_beams, device=sentences.device)
        rows = (sentences[:, None] * self.n_beams + beams).flatten()
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None, "a state without capacity cannot be cut"
            layer.keys, layer.values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
            layer.cross_keys = layer.cross_keys.index_select(0, sentences)
            layer.cross_values = layer.cross_values.index_select(0, sentences)
            layer.history = [h.index_select(0, rows) for h in layer.history]
        self.memory_bias = self.memory_bias.index_select(0, sentences)
