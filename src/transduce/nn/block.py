"""A sub-layer with its residual connection and norm; a block of sub-layers; a stack of blocks (paper 3.1)."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.dropout import Dropout
from transduce.nn.feedforward import FeedForward
from transduce.nn.patterns.bias import Bias
from transduce.nn.positions.scheme import Rotate
from transduce.nn.ssru import SSRU

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer": lambda d_model, *, eps, bias: nn.LayerNorm(d_model, eps=eps, bias=bias),
    "rms": lambda d_model, *, eps, bias: nn.RMSNorm(d_model, eps=eps),
}


class PostNorm(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))): the paper's (3.1, 5.4)."""

    final_norm = False

    def __init__(self, norm: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """x after the sub-layer, of the same shape."""
        return self.norm(self.dropout.add(x, sublayer(x)))


class PreNorm(PostNorm):
    """x + Dropout(Sublayer(LayerNorm(x))) (Xiong et al. 2020): trains without warm-up, needs a final norm."""

    final_norm = True

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return self.dropout.add(x, sublayer(self.norm(x)))


RESIDUALS: dict[str, type[PostNorm]] = {"post": PostNorm, "pre": PreNorm}


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
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, bias=bias, rotate=rotate))
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, keep))


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

        def attend_self(y: Tensor) -> Tensor:
            return self.self_attention(y, bias=bias, rotate=rotate, cache=cache, state=state)

        def attend_memory(y: Tensor) -> Tensor:
            assert self.cross_attention is not None and cache.cross_keys is not None and cache.cross_values is not None
            return self.cross_attention(y, cache.cross_keys, cache.cross_values, bias=state.memory_bias)

        def transform(y: Tensor) -> Tensor:
            rows = y.reshape(state.n_rows, -1, y.shape[2])  # [N, T, D]
            return self.feed_forward(rows, None, cache.history).reshape(y.shape)

        x = self.self_attention_residual(x, attend_self)
        if self.cross_attention_residual is not None:
            x = self.cross_attention_residual(x, attend_memory)
        return self.feed_forward_residual(x, transform)
