"""Residual connections with norms, blocks of sub-layers, and the stacks of an encoder and a decoder (paper 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from transduce.nn.attention import CrossAttention, MultiHeadAttention, SelfAttention
from transduce.nn.bias import Bias, padded_bias
from transduce.nn.feedforward import FeedForward
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import Pattern
from transduce.nn.positions import Positions, Rotate
from transduce.nn.recurrent import SSRU
from transduce.nn.state import DecoderState, LayerCache

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, *, eps, bias: nn.LayerNorm(d_model, eps=eps, bias=bias),
    "rms": lambda d_model, *, eps, bias: nn.RMSNorm(d_model, eps=eps),
}


class PostNorm(nn.Module):
    """The paper's residual connection: LayerNorm(x + Dropout(Sublayer(x))) (3.1, 5.4)."""

    final_norm = False

    def __init__(self, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a sub-layer to x, with the residual connection and the norm; the shape of x does not change."""
        return self.norm(x + self.dropout(sublayer(x)))


class PreNorm(PostNorm):
    """Pre-norm residual connection: x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020).

    It trains without warm-up; the stack needs a final norm.
    """

    final_norm = True

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


RESIDUALS: dict[str, type[PostNorm]] = {"post": PostNorm, "pre": PreNorm}


class EncoderBlock(nn.Module):
    """A block of an encoder: self-attention and feed-forward, each with a residual connection (paper 3.1)."""

    def __init__(
        self, *, attention: MultiHeadAttention, feed_forward: FeedForward, residual: Callable[[], PostNorm]
    ) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = attention, feed_forward
        self.self_attention_residual, self.feed_forward_residual = residual(), residual()

    def forward(self, x: Float[Tensor, "B S D"], *, bias: Bias, keep: Tensor, rotate: Rotate) -> Float[Tensor, "B S D"]:
        """Apply the block to x; the attention bias hides padding, and `keep` [B, S, 1] is False at padding."""
        x = self.self_attention_residual(x, partial(self.self_attention, bias=bias, rotate=rotate))
        return self.feed_forward_residual(x, partial(self.feed_forward, keep=keep))


class DecoderBlock(nn.Module):
    """A block of a decoder: causal self-attention, attention to the memory if there is one, feed-forward (paper 3.1).

    A recurrent unit (`SSRU`) may replace self-attention; the attribute is called `self_attention` too.
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
        """Apply the block to the next tokens x, ordered beam by beam; append their keys and values to `cache`.

        `bias` hides later tokens and the histories of other beams.
        """
        attend = partial(self.self_attention, bias=bias, rotate=rotate, cache=cache, state=state)
        x = self.self_attention_residual(x, attend)
        if self.cross_attention is not None and self.cross_attention_residual is not None:
            assert cache.cross_keys is not None and cache.cross_values is not None
            memory = {"key": cache.cross_keys, "value": cache.cross_values, "bias": state.memory_bias}
            x = self.cross_attention_residual(x, partial(self.cross_attention, **memory))

        def transform(y: Tensor) -> Tensor:
            rows = y.reshape(state.n_rows, -1, y.shape[2])  # [N, T, D]
            return self.feed_forward(rows, None, cache.history).reshape(y.shape)

        return self.feed_forward_residual(x, transform)


class Stack(nn.Module):
    """N blocks and a final norm, which is the identity if the residual connections need none."""

    def __init__(self, blocks: Iterable[nn.Module], *, norm: nn.Module, patterns: Sequence[Pattern] = ()) -> None:
        """`patterns`: attention patterns, which the layers use in turn: layer i has pattern i modulo their number."""
        super().__init__()
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = norm
        self.patterns = tuple(patterns)


class Encoder(Stack):
    """The encoder's stack: each position attends to the positions that the layer's pattern allows, except padding."""

    def forward(
        self, x: Float[Tensor, "B S D"], *, mask: Bool[Tensor, "B 1 S"], positions: Positions
    ) -> Float[Tensor, "B S D"]:
        """Apply all blocks to the embedded sequences x; `mask` is False at padding."""
        keep = mask.transpose(1, 2)  # [B, S, 1]
        indices = torch.arange(x.shape[1], device=x.device)
        biases = [padded_bias(pattern, indices, positions, mask) for pattern in self.patterns]
        rotate = positions.rotation(indices)
        for block, bias in zip(self.blocks, cycle(biases), strict=False):
            x = block(x, bias=bias, keep=keep, rotate=rotate)
        return self.norm(x)


class Decoder(Stack):
    """The decoder's stack.

    Each position attends to itself, to the earlier positions that the layer's pattern allows, and to the memory if
    there is one. If recurrent units replace self-attention, the patterns are not used.
    """

    def start(
        self, memory: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S"], *, capacity: int, n_beams: int
    ) -> DecoderState:
        """Return the state before the first token: the memory's keys and values, and room for `capacity` tokens a row.

        With capacity 0, `forward` can be called only once, with all tokens, and caches no keys. Without cross-attention
        only the batch size of `memory` is used; its length may be 0.
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
        """Apply all blocks to the next T embedded tokens of every row; `state` is updated in place.

        `documents`: each token's document number; a token attends only to its own document. It is allowed only in the
        first step of a state with one beam.
        """
        rows = x.shape[:2]
        queries, keys = state.next_positions(rows[1])
        biases = state.biases(self.patterns, queries, keys, positions, documents)
        rotate = positions.rotation(queries)
        x = x.unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, D]
        for block, cache, bias in zip(self.blocks, state.layers, cycle(biases), strict=False):
            x = block(x, bias=bias, rotate=rotate, cache=cache, state=state)
        state.length += rows[1]
        return self.norm(x).reshape(*rows, -1)
