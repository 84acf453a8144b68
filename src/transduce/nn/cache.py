"""What a decoder remembers between steps: passed in, changed in place, never kept by a module."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.nn.masks import attention_bias, causal_mask


@dataclass(slots=True)
class LayerCache:
    """One decoder block's memory of B sentences. The beams of a sentence share it.

    keys, values: [B, H_kv, prompt + capacity * n_beams, K], filled step by step: the keys of the prompt, if there is
    one, then all beams' keys of the first step, then of the second, and so on. cross_keys, cross_values: [B, H_kv, S,
    K] of the memory; None where there is none. history: the last inputs [N, ...] of convolutions in the feed-forward,
    row = sentence * n_beams + beam; empty without any.
    Without room (keys None) nothing is kept: the whole target goes through in one step, as in training.
    """

    keys: Float[Tensor, "B H C K"] | None
    values: Float[Tensor, "B H C K"] | None
    cross_keys: Float[Tensor, "B H S K"] | None = None
    cross_values: Float[Tensor, "B H S K"] | None = None
    history: list[Tensor] = field(default_factory=list)

    def append(self, keys: Tensor, values: Tensor, known: int) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H_kv, Q, K] behind the `known` ones; all that is known then, as views."""
        if self.keys is None or self.values is None:
            return keys, values
        end = known + keys.shape[2]
        self.keys[:, :, known:end] = keys
        self.values[:, :, known:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


@dataclass(slots=True)
class DecoderState:
    """All blocks' memory of a batch, `length` tokens long, and the bias that hides source padding, [B, 1, 1, S].

    The first `prompt` of these tokens are the same for all beams of a sentence, and are kept once.

    Reordering beams moves no keys. Every beam looks at the keys of all beams of its sentence, and `ancestry`
    [B, k, prompt + k * (length - prompt)] is the bias that hides those that are not of its own history; reordering
    copies only this. None where there is one beam.
    """

    layers: list[LayerCache]
    memory_bias: Float[Tensor, "B 1 1 S"]
    n_beams: int = 1
    length: int = 0
    prompt: int = 0
    ancestry: Float[Tensor, "B k C"] | None = None

    @property
    def n_rows(self) -> int:
        """Hypotheses in the batch: sentences x beams."""
        return self.memory_bias.shape[0] * self.n_beams

    @property
    def n_known(self) -> int:
        """Keys a sentence that the cache holds."""
        return self.prompt + (self.length - self.prompt) * self.n_beams

    def next_bias(self, n_steps: int) -> Float[Tensor, "b 1 Q C"] | None:
        """The bias of the next n_steps tokens' attention to all that is known with them; None where nothing is hidden.

        Queries Q: beam by beam, n_steps each. b is the number of sentences, or 1 where it is the same for all.
        """
        device = self.memory_bias.device
        if self.n_beams == 1:
            if n_steps == 1:
                return None
            return attention_bias(causal_mask(n_steps, self.length + n_steps, device=device))
        shape = (self.memory_bias.shape[0], self.n_beams, self.prompt)
        past = self.memory_bias.new_zeros(shape) if self.ancestry is None else self.ancestry
        same_beam = torch.eye(self.n_beams, dtype=torch.bool, device=device)
        own = attention_bias(same_beam.repeat_interleave(n_steps, dim=1)[None])[:, 0]  # [1, k, Q]
        self.ancestry = torch.cat([past, own.expand(shape[0], -1, -1)], dim=2)
        if n_steps == 1:
            return self.ancestry[:, None]
        causal = torch.kron(same_beam, causal_mask(n_steps, n_steps, device=device)[0])  # [Q, Q]
        past = past.repeat_interleave(n_steps, dim=1)
        return torch.cat([past, attention_bias(causal[None])[:, 0].expand(shape[0], -1, -1)], dim=2)[:, None]

    def fan_out(self, n_beams: int) -> None:
        """From a state of one beam to one of `n_beams`, which share all that is known as their prompt."""
        assert self.n_beams == 1 and self.ancestry is None, "this state has fanned out already"
        self.n_beams, self.prompt = n_beams, self.length
        for layer in self.layers:
            layer.history = [h.repeat_interleave(n_beams, dim=0) for h in layer.history]

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        """Row r goes on from the history of rows[r], which must belong to the same sentence."""
        if self.ancestry is not None:
            beams = rows.view(-1, self.n_beams, 1) % self.n_beams
            self.ancestry = self.ancestry.gather(1, beams.expand(self.ancestry.shape))
        for layer in self.layers:
            layer.history = [h.index_select(0, rows) for h in layer.history]

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        """Keep only these sentences, with all their beams."""
        rows = (sentences[:, None] * self.n_beams + torch.arange(self.n_beams, device=sentences.device)).flatten()
        for layer in self.layers:
            assert layer.keys is not None and layer.values is not None, "a state without capacity cannot be cut"
            layer.keys, layer.values = (self._closed_up(x, sentences) for x in (layer.keys, layer.values))
            if layer.cross_keys is not None and layer.cross_values is not None:
                layer.cross_keys = layer.cross_keys.index_select(0, sentences)
                layer.cross_values = layer.cross_values.index_select(0, sentences)
            layer.history = [h.index_select(0, rows) for h in layer.history]
        self.memory_bias = self.memory_bias.index_select(0, sentences)
        if self.ancestry is not None:
            self.ancestry = self.ancestry.index_select(0, sentences)

    def _closed_up(self, known: Tensor, sentences: Tensor) -> Tensor:
        """Keys or values of these sentences moved to the front of their tensor, as far as it is filled; a view."""
        kept = known[: len(sentences)]
        kept[:, :, : self.n_known] = known[:, :, : self.n_known].index_select(0, sentences)
        return kept
