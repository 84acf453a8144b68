"""Blocks of sub-layers, and the stacks of an encoder and a decoder (paper 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.bias import Bias, padded_bias
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.feedforward import FeedForward
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import CausalPattern, FullPattern
from transduce.nn.positions import Positions, Rotate
from transduce.nn.residual import PostNorm
from transduce.nn.ssru import SSRU
from transduce.nn.sublayer import connected


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each with its residual connection (paper 3.1)."""

    def __init__(
        self, *, attention: SelfAttention, feed_forward: FeedForward, residual: Callable[[], PostNorm]
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()

    def forward(self, x: Float[Tensor, "B S D"], *, bias: Bias, keep: Tensor, rotate: Rotate) -> Float[Tensor, "B S D"]:
        """x [B, S, D] after the block; `bias` hides padding, `keep` [B, S, 1] is False there."""
        x = connected(x, self.self_attention_residual, self.self_attention, bias=bias, rotate=rotate)
        return connected(x, self.feed_forward_residual, self.feed_forward, keep=keep)


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the memory if there is one, feed-forward (paper 3.1).

    A recurrent unit may take the place of self-attention, and its name.
    """

    def __init__(
        self,
        *,
        attention: SelfAttention | SSRU,
        cross: CrossAttention | None,
        feed_forward: FeedForward,
        residual: Callable[[], PostNorm],
    ) -> None:
        super().__init__()
        self.self_attention, self.cross_attention, self.feed_forward = attention, cross, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()
        self.cross_attention_residual = residual() if cross is not None else None

    def forward(
        self, x: Float[Tensor, "B Q D"], *, bias: Bias, rotate: Rotate, cache: LayerCache, state: DecoderState
    ) -> Float[Tensor, "B Q D"]:
        """x [B, Q, D] after the block, which appends to `cache`; Q: the next tokens, beam by beam.

        `bias` hides later tokens and the histories of other beams.
        """
        options = {"bias": bias, "rotate": rotate, "cache": cache, "state": state}
        x = connected(x, self.self_attention_residual, self.self_attention, **options)
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            assert cache.cross_keys is not None and cache.cross_values is not None
            memory = {"key": cache.cross_keys, "value": cache.cross_values, "bias": state.memory_bias}
            x = connected(x, self.cross_attention_residual, self.cross_attention, **memory)
        if state.n_beams == 1:
            return connected(x, self.feed_forward_residual, self.feed_forward, history=cache.history)

        def transform(y: Tensor) -> Tensor:
            rows = y.reshape(state.n_rows, -1, y.shape[2])  # [N, T, D]
            return self.feed_forward(rows, None, cache.history).reshape(y.shape)

        return self.feed_forward_residual(x, transform)


class Stack(nn.Module):
    """N blocks, and after the last one a norm, if their residual connection needs one."""

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = norm


class Encoder(Stack):
    """Every position attends to those that are not padding, as far as its layer's pattern allows."""

    def __init__(
        self, blocks: Iterable[EncoderBlock], *, norm: nn.Module, patterns: Sequence[FullPattern] = ()
    ) -> None:
        """`patterns`: of the layers, one after another and again from the first."""
        super().__init__(blocks, norm=norm)
        self.patterns = tuple(patterns) or (FullPattern(),)

    def forward(
        self, x: Float[Tensor, "B S D"], *, mask: Bool[Tensor, "B 1 S"], positions: Positions
    ) -> Float[Tensor, "B S D"]:
        """The embedded sequences after all blocks; `mask` is False at padding."""
        keep = mask.transpose(1, 2)  # [B, S, 1]
        places = torch.arange(x.shape[1], device=x.device)
        biases = [padded_bias(pattern, places, positions, mask) for pattern in self.patterns]
        rotate = positions.rotation(places)
        for block, bias in zip(self.blocks, cycle(biases), strict=False):
            x = block(x, bias=bias, keep=keep, rotate=rotate)
        return self.norm(x)


class Decoder(Stack):
    """Every position attends to itself, to earlier ones as its layer's pattern allows, and to the memory if any.

    With recurrent units in place of self-attention the patterns are not used.
    """

    def __init__(
        self, blocks: Iterable[DecoderBlock], *, norm: nn.Module, patterns: Sequence[FullPattern] = ()
    ) -> None:
        """`patterns`: of the layers, one after another and again from the first."""
        super().__init__(blocks, norm=norm)
        self.patterns = tuple(patterns) or (CausalPattern(),)

    def start(
        self,
        memory: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 S"],
        *,
        capacity: int,
        n_beams: int,
    ) -> DecoderState:
        """The state before the first token: the memory's keys and values, and room for `capacity` tokens per row.

        With capacity 0 the state caches nothing and takes one step. Blocks without cross-attention use only the batch
        size of the memory, whose length may be 0.
        """
        layers = []
        for block in self.blocks:
            own, cross = block.self_attention, block.cross_attention
            keys = values = None
            if capacity and isinstance(own, SelfAttention):
                shape = (len(memory), own.n_kv_heads, capacity * n_beams)
                keys, values = (memory.new_empty(*shape, width) for width in (own.d_key, own.d_head))
            cross_keys, cross_values = (None, None) if cross is None else cross.key_value(memory)
            layers.append(LayerCache(keys=keys, values=values, cross_keys=cross_keys, cross_values=cross_values))
        return DecoderState(layers=layers, memory_bias=attention_bias(mask), n_beams=n_beams)

    def forward(
        self,
        x: Float[Tensor, "N T D"],
        state: DecoderState,
        *,
        positions: Positions,
        documents: Int[Tensor, "N T"] | None = None,
    ) -> Float[Tensor, "N T D"]:
        """The next T embedded tokens of every row after all blocks; the state advances in place.

        `documents`: the number of each token's document, for the first step of one beam; attention stays inside them.
        """
        rows = x.shape[:2]
        queries, keys = state.place(rows[1])
        biases = state.biases(self.patterns, queries, keys, positions, documents)
        rotate = positions.rotation(queries)
        x = x.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, D]
        for block, cache, bias in zip(self.blocks, state.layers, cycle(biases), strict=False):
            x = block(x, bias=bias, rotate=rotate, cache=cache, state=state)
        state.length += rows[1]
        return self.norm(x).reshape(*rows, -1)
