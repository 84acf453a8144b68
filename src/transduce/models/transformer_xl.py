"""Transformer-XL: a causal language model with a memory of earlier segments (Dai et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from transduce.config.architectures import TransformerXLSettings
from transduce.models.parts import BLOCK_OPTIONS, BlockParts, TokenPredictor, initialize
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.feedforward import FEED_FORWARDS
from transduce.nn.positions import Positions
from transduce.nn.relative_attention import Distances, RelativeAttention, RelativeBlock, RelativeDecoder, SegmentState
from transduce.nn.state import Carry

TRANSFORMER_XL_OPTIONS = {
    **BLOCK_OPTIONS,
    # excluded: a convolution would need a separate memory
    "feed_forward": {name: network for name, network in FEED_FORWARDS.items() if not network.convolves},
}
_SEGMENT = 128  # tokens, if neither the settings nor the task have chosen a length


class TransformerXL(TokenPredictor):
    """A causal language model with a memory of earlier segments. Id 0 is padding, allowed only at the end.

    A text is read in segments of `segment_length` tokens from its start. A token attends to its own segment up to
    itself, and to the last M tokens before the segment, for which each layer caches the inputs of its attention. Over
    several layers, a token depends on many more earlier tokens. M is `memory_length` in training and
    `eval_memory_length` otherwise. A distance longer than any in training counts as the longest distance in training.
    """

    def __init__(self, settings: TransformerXLSettings, *, n_src: int, n_tgt: int) -> None:
        """`n_tgt`: size of the vocabulary; `n_src` is not used. `settings.tie` = "none": a separate output matrix."""
        super().__init__()
        s, parts = settings, BlockParts(settings)
        self.segment_length = s.segment_length or _SEGMENT
        self.memory_length = s.memory_length
        self.eval_memory_length = s.remembered
        self.embedding = TokenEmbedding(
            n_tgt,
            s.d_model,
            positions=Positions(d_model=s.d_model, d_head=s.d_head, max_positions=self.segment_length),
            dropout=s.dropout,
            scale=None if s.scale_embeddings else 1.0,
        )
        blocks = [
            RelativeBlock(
                attention=RelativeAttention(d_model=s.d_model, n_heads=s.n_heads, dropout=s.attention_dropout),
                feed_forward=parts.feed_forward(causal=True),
                residual=parts.residual,
            )
            for _ in range(s.n_decoder_layers)
        ]
        longest = self.memory_length + self.segment_length - 1
        distances = Distances(d_model=s.d_model, n_heads=s.n_heads, longest=longest, dropout=s.dropout)
        self.decoder = RelativeDecoder(blocks, norm=parts.final_norm(), distances=distances)
        self.dropout = torch.nn.Dropout(s.dropout)
        initialize(self)
        self.add_output(s, n_tgt, tied=self.embedding.table)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> SegmentState:
        """Return the state after the prompt `src`, which may be empty, for at most `capacity` more tokens per row.

        All prompts of a batch have equal length and no padding. The state keeps at most the memory and one segment,
        even of a long text. `n_beams` must be 1.
        """
        n_kept = min(self.eval_memory_length + self.segment_length, src.shape[1] + capacity)
        assert n_beams == 1, "a language model has one beam"
        nothing = self.output_weight.new_empty(len(src), 0, self.output_weight.shape[1])
        state = SegmentState(
            layers=self.decoder.start([nothing] * len(self.decoder.blocks), n_tokens=n_kept),
            segment_length=self.segment_length,
            memory_length=self.eval_memory_length,
        )
        if src.shape[1]:
            self.advance(src, state)
        return state

    def advance(self, ids: Int[Tensor, "N T"], state: SegmentState) -> Float[Tensor, "N T D"]:
        """Return the hidden states after each of the next T tokens of every row; `state` is updated in place."""
        parts = []
        while ids.shape[1]:
            n = state.begin(ids.shape[1])
            parts.append(self.dropout(self.decoder(self.embedding(ids[:, :n]), state.layers)))
            state.length += n
            ids = ids[:, n:]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def forward(
        self, ids: Int[Tensor, "B T"], *, carry: Carry = (), memory_length: int | None = None
    ) -> tuple[Float[Tensor, "B T D"], Carry]:
        """Return the hidden states of a segment that follows `carry`, and the carry for the next segment.

        The carry has a tensor [B, M, D] for each layer, with M <= `memory_length` (default: the model's in training).
        It is empty at the start of a text and in a model without memory.
        """
        n = self.memory_length if memory_length is None else memory_length
        x = self.embedding(ids)
        memory = carry or tuple(x[:, :0] for _ in self.decoder.blocks)
        layers = self.decoder.start(memory, n_tokens=memory[0].shape[1] + ids.shape[1])
        hidden = self.dropout(self.decoder(x, layers))
        if not n:
            return hidden, ()
        return hidden, tuple(_last(old, layer.inputs, n) for old, layer in zip(memory, layers, strict=True))

    def read(self, *inputs: Tensor) -> Iterator[Float[Tensor, "B t D"]]:
        """Yield the hidden states of texts [B, T] of any length, segment by segment, with evaluation's memory length.

        The last segment is padded. Otherwise results would depend on the longest text of the batch, as sums on a CPU
        depend on the number of keys.
        """
        (ids,) = inputs
        carry: Carry = ()
        for segment in ids.split(self.segment_length, 1):
            padded = F.pad(segment, (0, self.segment_length - segment.shape[1]))
            hidden, carry = self(padded, carry=carry, memory_length=self.eval_memory_length)
            yield hidden[:, : segment.shape[1]]


def _last(old: Tensor, new: Tensor | None, n: int) -> Tensor:
    """Return the last `n` positions of the memory `old` followed by the segment `new`, without a gradient."""
    assert new is not None
    n_old = min(old.shape[1], max(0, n - new.shape[1]))
    return torch.cat([old[:, old.shape[1] - n_old :], new[:, max(0, new.shape[1] - n) :]], 1).detach()
