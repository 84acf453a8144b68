"""What a decoder with segments and a memory keeps between steps (Transformer-XL): passed in, changed in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.nn.state import rows_of


@dataclass(slots=True)
class SegmentCache:
    """One layer's keys and values of the memory and of the segment so far, one row per hypothesis.

    keys, values: [N, H, R, K], of which the first `n_known` are filled. Without room for more, as in training, the
    segment is read in one step and not kept.
    distances: W_R R for distances down to 0.
    inputs: what the layer read in the last step; the memory of the next segment is made of it.
    """

    keys: Float[Tensor, "N H R K"]
    values: Float[Tensor, "N H R K"]
    distances: Float[Tensor, "H E K"]
    n_known: int
    inputs: Float[Tensor, "N Q D"] | None = None

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` keys in all, if that is more than there are."""
        if capacity > self.n_known:
            self.keys, self.values = (self._with_room(x, capacity) for x in (self.keys, self.values))

    def _with_room(self, known: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = known.shape
        wide = known.new_empty(rows, heads, capacity, width)
        wide[:, :, : self.n_known] = known
        return wide

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [N, H, C, K] with the new ones, which are kept if there is room."""
        end = self.n_known + keys.shape[2]
        if end > self.keys.shape[2]:
            return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys[:, :, self.n_known : end] = keys
        self.values[:, :, self.n_known : end] = values
        self.n_known = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def forget(self, n_kept: int) -> None:
        """Keep the last `n_kept` keys only."""
        first = max(0, self.n_known - n_kept)
        if first:
            for kept in (self.keys, self.values):
                kept[:, :, : self.n_known - first] = kept[:, :, first : self.n_known].clone()
            self.n_known -= first

    def take(self, rows: Int[Tensor, " n"]) -> None:
        """Row r becomes what rows[r] was."""
        self.keys, self.values = (self._taken(x, rows) for x in (self.keys, self.values))

    def _taken(self, kept: Tensor, rows: Tensor) -> Tensor:
        """The filled part of these rows, in the memory of the old ones where that suffices."""
        filled = kept[:, :, : self.n_known].index_select(0, rows)
        target = kept[: len(rows)] if len(rows) <= len(kept) else kept.new_empty(len(rows), *kept.shape[1:])
        target[:, :, : self.n_known] = filled
        return target


@dataclass(slots=True)
class SegmentState:
    """The caches of all layers for a batch, `length` tokens after the start of its texts.

    Texts are read in segments of `segment_length` tokens from their start. A token attends to its own segment and to
    the last `memory_length` tokens before it. Row: sentence * n_beams + beam.
    """

    layers: list[SegmentCache]
    n_sentences: int
    segment_length: int
    memory_length: int
    n_beams: int = 1
    length: int = 0

    @property
    def n_rows(self) -> int:
        return self.n_sentences * self.n_beams

    def begin(self, n_tokens: int) -> int:
        """How many of the next tokens belong to the current segment. After its end, the next one begins.

        The memory then moves on.
        """
        used = self.length % self.segment_length
        if self.length and not used:
            for layer in self.layers:
                layer.forget(self.memory_length)
        return min(n_tokens, self.segment_length - used)

    def fan_out(self, n_beams: int) -> None:
        assert self.n_beams == 1, "this state has fanned out already"
        self.n_beams = n_beams
        self.reorder(torch.arange(self.n_sentences, device=self.layers[0].keys.device).repeat_interleave(n_beams))

    def reorder(self, rows: Int[Tensor, " N"]) -> None:
        for layer in self.layers:
            layer.take(rows)

    def select(self, sentences: Int[Tensor, " b"]) -> None:
        self.n_sentences = len(sentences)
        self.reorder(rows_of(sentences, self.n_beams))
