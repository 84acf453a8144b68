"""Stacks of blocks: what the encoder and the decoder are (paper 3.1), alone or together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from transduce.nn.block import DecoderBlock, EncoderBlock
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.masks import attention_bias
from transduce.nn.positions import NoPositions


class Stack(nn.Module):
    """N blocks, and behind the last the norm that their residual connection needs, if it does."""

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = norm


class Encoder(Stack):
    """Every position sees all that the mask lets it see."""

    def __init__(self, blocks: Iterable[EncoderBlock], *, norm: nn.Module) -> None:
        super().__init__(blocks, norm=norm)

    def forward(
        self, x: Float[Tensor, "B S D"], *, mask: Bool[Tensor, "B 1 S"], positions: NoPositions
    ) -> Float[Tensor, "B S D"]:
        """The embedded sequences after all blocks; `mask` is False at padding."""
        bias, keep = attention_bias(mask), mask.transpose(1, 2)  # [B, 1, 1, S], [B, S, 1]
        for block in self.blocks:
            x = block(x, bias=bias, keep=keep, rotate=lambda y: positions.rotate(y, 0))
        return self.norm(x)


class Decoder(Stack):
    """Every position sees itself and what stands before it, and the memory if there is one; step by step or at once."""

    def __init__(self, blocks: Iterable[DecoderBlock], *, norm: nn.Module) -> None:
        super().__init__(blocks, norm=norm)

    def start(
        self,
        memory: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 S"],
        *,
        capacity: int,
        n_beams: int,
        prompt: int = 0,
    ) -> DecoderState:
        """The state before the first token: the memory's keys and values, and room for `capacity` tokens a row.

        With `prompt` there is room for so many tokens more, which all beams share: they come first, and the state is
        one of a single beam until it has taken them and fans out. With capacity 0 the state keeps nothing and takes
        one step only. Blocks without cross-attention take of the
        memory, whose length may be 0, the number of sentences.
        """
        layers = []
        for block in self.blocks:
            own, cross = block.self_attention, block.cross_attention
            shape = (len(memory), own.n_kv_heads, prompt + capacity * n_beams, own.d_head)
            keys, values = (memory.new_empty(shape), memory.new_empty(shape)) if capacity else (None, None)
            cross_keys, cross_values = (None, None) if cross is None else cross.key_value(memory)
            layers.append(LayerCache(keys=keys, values=values, cross_keys=cross_keys, cross_values=cross_values))
        return DecoderState(layers=layers, memory_bias=attention_bias(mask), n_beams=1 if prompt else n_beams)

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        state: DecoderState,
        *,
        positions: NoPositions,
        hidden: Float[Tensor, "B 1 T T"] | None = None,
    ) -> Float[Tensor, "N T D"]:
        """The next T embedded tokens of every row after all blocks; the state moves on in place.

        `hidden`: a bias that hides more than what is to come, for the first step of one beam. (Packed documents, say.)
        """
        length, bias = state.length, state.next_bias(x.shape[1])
        if hidden is not None:
            bias = hidden if bias is None else bias + hidden

        def turn(y: Tensor) -> Tensor:
            return positions.rotate(y.unflatten(2, (state.n_beams, -1)), length).flatten(2, 3)

        rows = x.shape[:2]
        x = x.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, D]
        for block, cache in zip(self.blocks, state.layers, strict=True):
            x = block(x, bias=bias, rotate=turn, cache=cache, state=state)
        state.length += rows[1]
        return self.norm(x).reshape(*rows, -1)
