"""The encoder-decoder Transformer (Vaswani et al. 2017, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config import ModelSettings
from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.block import NORMS, RESIDUALS, DecoderBlock, EncoderBlock, PostNorm
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.feedforward import FEED_FORWARDS, FeedForward
from transduce.nn.init import initialize
from transduce.nn.linear import linear
from transduce.nn.masks import attention_bias, padding_mask
from transduce.nn.positions import POSITIONS


class _Parts:
    """The parts that settings ask for, made anew at each call."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.attention: dict[str, Any] = {
            "d_model": settings.d_model,
            "n_heads": settings.n_heads,
            "n_kv_heads": settings.n_kv_heads,
            "dropout": settings.attention_dropout,
            "bias": settings.bias,
            "projection": settings.projection,
        }

    def norm(self) -> nn.Module:
        s = self.settings
        return NORMS[s.norm](s.d_model, s.bias, s.norm_eps)

    def residual(self) -> PostNorm:
        return RESIDUALS[self.settings.residual](self.norm(), dropout=self.settings.dropout)

    def final_norm(self) -> nn.Module:
        return self.norm() if RESIDUALS[self.settings.residual].final_norm else nn.Identity()

    def embedding(self, vocab_size: int) -> TokenEmbedding:
        s = self.settings
        positions = POSITIONS[s.positions](
            d_model=s.d_model, d_head=s.d_model // s.n_heads, max_positions=s.max_positions
        )
        scale, norm = None if s.scale_embeddings else 1.0, self.norm() if s.embedding_norm else None
        return TokenEmbedding(vocab_size, s.d_model, positions=positions, dropout=s.dropout, scale=scale, norm=norm)

    def feed_forward(self, *, causal: bool) -> FeedForward:
        s = self.settings
        return FEED_FORWARDS[s.feed_forward](
            d_model=s.d_model,
            d_ff=s.d_ff,
            activation=s.activation,
            dropout=s.activation_dropout,
            bias=s.bias,
            kernel_size=s.kernel_size,
            causal=causal,
        )

    def encoder_block(self) -> EncoderBlock:
        attention = SelfAttention(**self.attention)
        return EncoderBlock(attention=attention, feed_forward=self.feed_forward(causal=False), residual=self.residual)

    def decoder_block(self) -> DecoderBlock:
        return DecoderBlock(
            attention=SelfAttention(**self.attention),
            cross=CrossAttention(**self.attention),
            feed_forward=self.feed_forward(causal=True),
            residual=self.residual,
        )


class Transformer(nn.Module):
    """Encoder and decoder. `forward(src, tgt_in)` is `step(tgt_in, start(src))`: training and decoding share one path.

    Id 0 is padding, on the source only on the right or the left, on the target on the right.
    """

    def __init__(self, settings: ModelSettings, *, n_src: int, n_tgt: int) -> None:
        super().__init__()
        parts = _Parts(settings)
        self.src_embedding = parts.embedding(n_src)
        self.tgt_embedding = parts.embedding(n_tgt)
        self.encoder: Any = nn.ModuleList(parts.encoder_block() for _ in range(settings.n_encoder_layers))
        self.encoder_norm = parts.final_norm()
        self.decoder: Any = nn.ModuleList(parts.decoder_block() for _ in range(settings.n_decoder_layers))
        self.decoder_norm = parts.final_norm()
        initialize(self)
        if settings.tie == "three_way":
            self.src_embedding.table.weight = self.tgt_embedding.table.weight
        if settings.tie == "none":
            self.output_embedding = nn.Embedding(n_tgt, settings.d_model)
            nn.init.normal_(self.output_embedding.weight, std=settings.d_model**-0.5)
        else:
            self.output_embedding = self.tgt_embedding.table
        self.output_bias = nn.Parameter(torch.zeros(n_tgt)) if settings.output_bias else None

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The matrix before the softmax, [V, D] (paper 3.4)."""
        return self.output_embedding.weight

    def encode(self, src: Int[Tensor, "B S"]) -> Float[Tensor, "B S D"]:
        """The memory [B, S, D] of source ids."""
        mask = padding_mask(src)
        bias, keep = attention_bias(mask), mask.transpose(1, 2)  # [B, 1, 1, S], [B, S, 1]
        rotate = self.src_embedding.positions.rotate
        x = self.src_embedding(src)
        for block in self.encoder:
            x = block(x, bias=bias, keep=keep, rotate=lambda y: rotate(y, 0))
        return self.encoder_norm(x)

    def start(self, src: Int[Tensor, "B S"], *, capacity: int = 0, n_beams: int = 1) -> DecoderState:
        """A decoder's state before its first token: the memory's keys and values, and room for `capacity` tokens a row.

        With capacity 0 the state keeps nothing and takes one step only.
        """
        memory = self.encode(src)
        layers = []
        for block in self.decoder:
            key, value = block.cross_attention.key_value(memory)
            shape = (*key.shape[:2], capacity * n_beams, key.shape[3])
            keys, values = (key.new_empty(shape), key.new_empty(shape)) if capacity else (None, None)
            layers.append(LayerCache(keys=keys, values=values, cross_keys=key, cross_values=value))
        return DecoderState(layers=layers, memory_bias=attention_bias(padding_mask(src)), n_beams=n_beams)

    def advance(self, ids: Int[Tensor, "N T"], state: DecoderState) -> Float[Tensor, "N T D"]:
        """Hidden states [N, T, D] of the next T tokens of every row; the state moves on in place."""
        length = state.length
        bias = state.next_bias(ids.shape[1])
        rotate = self.tgt_embedding.positions.rotate

        def turn(y: Tensor) -> Tensor:
            return rotate(y.unflatten(2, (state.n_beams, -1)), length).flatten(2, 3)

        x = self.tgt_embedding(ids, offset=length).unflatten(0, (-1, state.n_beams)).flatten(1, 2)  # [B, beams * T, D]
        for block, cache in zip(self.decoder, state.layers, strict=True):
            x = block(x, bias=bias, rotate=turn, cache=cache, state=state)
        state.length += ids.shape[1]
        return self.decoder_norm(x).reshape(*ids.shape, -1)

    def step(self, ids: Int[Tensor, "N T"], state: DecoderState) -> Float[Tensor, "N T V"]:
        """Logits [N, T, V] after the next T tokens of every row; the state moves on in place."""
        return self.logits(self.advance(ids, state))

    def forward(self, src: Int[Tensor, "B S"], tgt_in: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Hidden states [B, T, D] before the output matrix: position t knows of the source and of tgt_in[:, :t + 1]."""
        return self.advance(tgt_in, self.start(src))

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Unnormalised log-probabilities of the next token."""
        return linear(hidden, self.output_weight, self.output_bias)
