"""What the architectures share: parts made from settings, initial weights, and the way to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from transduce.config import DecoderSettings, GPTSettings, ModelSettings, OutputSettings
from transduce.nn.attention import CrossAttention, FullProjection, SelfAttention
from transduce.nn.block import NORMS, RESIDUALS, DecoderBlock, EncoderBlock, PostNorm
from transduce.nn.embedding import TokenEmbedding
from transduce.nn.feedforward import FEED_FORWARDS, FeedForward
from transduce.nn.linear import linear
from transduce.nn.patterns import CausalPattern, LocalPattern
from transduce.nn.positions import POSITIONS
from transduce.nn.ssru import SSRU
from transduce.nn.stack import Decoder, Encoder
from transduce.text.special import BOS, EOS

DECODER_SELF: dict[str, Callable[[Mapping[str, Any]], SelfAttention | SSRU]] = {
    "attention": lambda options: SelfAttention(**options),
    "ssru": lambda options: SSRU(d_model=options["d_model"], bias=options["bias"]),
}
"""The first sub-layer of a decoder's block, from the options of attention."""


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

    def output_embedding(self, vocab_size: int, tied: nn.Embedding) -> nn.Embedding:
        """The matrix before the softmax: `tied`, or a separate one with `tie` = "none"."""
        assert isinstance(self.settings, OutputSettings)
        if self.settings.tie != "none":
            return tied
        separate = nn.Embedding(vocab_size, self.settings.d_model)
        nn.init.normal_(separate.weight, std=self.settings.d_model**-0.5)
        return separate

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

    def decoder(self, *, cross: bool, own: str = "attention") -> Decoder:
        """The decoder's stack; `cross`: with attention to a memory; `own`: a key of DECODER_SELF."""
        blocks = [
            DecoderBlock(
                attention=DECODER_SELF[own](self._attention),
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


class TokenPredictor(nn.Module):
    """A model that predicts tokens: from hidden states to logits."""

    output_embedding: nn.Embedding
    output_bias: nn.Parameter | None

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The matrix before the softmax, [V, D] (paper 3.4)."""
        return self.output_embedding.weight

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Unnormalized log-probabilities of the tokens."""
        return linear(hidden, self.output_weight, self.output_bias)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draw Glorot-uniform matrices (each part of a packed projection separately), zero biases, N(0, 1/d) embeddings.

    Queries, keys and values are scaled by 1/sqrt(2), so that together they have the variance of one matrix
    [3 d_model, d_model]. Embeddings times sqrt(d_model) have unit variance (paper 3.4).
    """
    for module in model.modules():
        if isinstance(module, FullProjection):
            rows = [n * module.d_head for n in module.heads]
            for part in module.weight.split(rows):
                nn.init.xavier_uniform_(part, gain=2**-0.5 if len(rows) > 1 else 1.0)
            _zero(module.bias)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.xavier_uniform_(module.weight)
            _zero(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
