"""From settings to the parts that all architectures share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transduce.config import DecoderSettings, GPTSettings, ModelSettings, OutputSettings
from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.block import NORMS, RESIDUALS, DecoderBlock, EncoderBlock, PostNorm
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.feedforward import FEED_FORWARDS, FeedForward
from transduce.nn.patterns import CausalPattern, LocalPattern
from transduce.nn.positions import POSITIONS
from transduce.nn.stack import Decoder, Encoder
from transduce.text.special import BOS, EOS


class Parts:
    """Builds parts from settings; each call returns a new one."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self._attention: dict[str, Any] = {
            "d_model": settings.d_model,
            "n_heads": settings.n_heads,
            "n_kv_heads": settings.n_kv_heads,
            "dropout": settings.attention_dropout,
            "bias": settings.bias,
            "projection": settings.projection,
        }

    def embedding(self, vocab_size: int, *, causal: bool) -> TokenEmbedding:
        """Token embeddings and the positional scheme of their stack; `causal`: of a decoder."""
        s = self.settings
        positions = POSITIONS[s.positions](
            d_model=s.d_model, d_head=s.d_head, max_positions=s.max_positions, n_heads=s.n_heads, causal=causal
        )
        scale, norm = None if s.scale_embeddings else 1.0, self.norm() if s.embedding_norm else None
        alias = (BOS, EOS) if isinstance(s, GPTSettings) and s.one_end else None
        return TokenEmbedding(
            vocab_size, s.d_model, positions=positions, dropout=s.dropout, scale=scale, norm=norm, alias=alias
        )

    def output_bias(self, vocab_size: int) -> nn.Parameter | None:
        """The bias on the logits, if there is one."""
        assert isinstance(self.settings, OutputSettings)
        chosen = self.settings.output_bias
        return nn.Parameter(torch.zeros(vocab_size), requires_grad=chosen != "fixed") if chosen else None

    def encoder(self) -> Encoder:
        """The encoder's stack."""
        blocks = [
            EncoderBlock(
                attention=SelfAttention(**self._attention),
                feed_forward=self._feed_forward(causal=False),
                residual=self._residual,
            )
            for _ in range(self.settings.depth[0])
        ]
        return Encoder(blocks, norm=self._final_norm())

    def decoder(self, *, cross: bool) -> Decoder:
        """The decoder's stack; `cross`: with attention to a memory."""
        blocks = [
            DecoderBlock(
                attention=SelfAttention(**self._attention),
                cross=CrossAttention(**self._attention) if cross else None,
                feed_forward=self._feed_forward(causal=True),
                residual=self._residual,
            )
            for _ in range(self.settings.depth[-1])
        ]
        assert isinstance(self.settings, DecoderSettings)
        window = self.settings.window
        pattern = CausalPattern() if window is None else LocalPattern(window)
        return Decoder(blocks, norm=self._final_norm(), pattern=pattern)

    def norm(self) -> nn.Module:
        """A norm over the residual stream."""
        s = self.settings
        return NORMS[s.norm](s.d_model, s.bias, s.norm_eps)

    def _residual(self) -> PostNorm:
        return RESIDUALS[self.settings.residual](self.norm(), dropout=self.settings.dropout)

    def _final_norm(self) -> nn.Module:
        return self.norm() if RESIDUALS[self.settings.residual].final_norm else nn.Identity()

    def _feed_forward(self, *, causal: bool) -> FeedForward:
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
