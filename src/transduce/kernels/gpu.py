"""Modules that compute with Triton kernels (triton_*.py) on a GPU, in training and in validation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.kernels.triton_layers import add_and_norm, attend, attends, normed
from transduce.kernels.triton_linear import GpuLinear, GpuLinearCrossEntropy
from transduce.nn.attention import CrossAttention, FullProjection, MultiHeadAttention, SelfAttention, merge_heads
from transduce.nn.bias import CAUSAL, Bias
from transduce.nn.dtypes import product_dtype
from transduce.nn.embedding import TokenTable
from transduce.nn.masks import PAD
from transduce.nn.stack import PostNorm, PreNorm

_NORMS = (nn.LayerNorm, nn.RMSNorm)
_TYPES = (torch.bfloat16, torch.float32)


class TritonLinear(nn.Linear):
    """A linear layer whose bias gradient is computed by a Triton kernel (`column_sums`)."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        if self.bias is None or x.dtype not in _TYPES or not x.numel() or not torch.is_grad_enabled():
            return super().forward(x)
        return GpuLinear.apply(x, self.weight, self.bias, product_dtype(x))


class TritonProjection(FullProjection, TritonLinear):
    """Projections to heads that are views of one product, not copies, except in float32, as PyTorch's kernels need."""

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:  # type: ignore[override]
        if product_dtype(x) == torch.float32:
            return super().forward(x)
        parts = zip(self.heads, TritonLinear.forward(self, x).split(self.rows or (self.out_features,), -1), strict=True)
        return tuple(part.unflatten(-1, (n, -1)).transpose(1, 2) for n, part in parts)


class TritonPostNorm(PostNorm):
    """Post-norm: residual connection, dropout and norm in one Triton kernel."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        update = sublayer(x)
        if update.dtype not in _TYPES or type(self.norm) not in _NORMS or not x.numel():
            return self.norm(x + self.dropout(update))
        return add_and_norm(x, update, self.norm, self.dropout.p if self.training else 0.0)


class TritonPreNorm(PreNorm):
    """Pre-norm: the norm in one Triton kernel, the residual connection with dropout in another."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if x.dtype not in _TYPES or not isinstance(self.norm, _NORMS) or not x.numel():
            return super().forward(x, sublayer)
        return add_and_norm(x, sublayer(normed(x, self.norm)), None, self.dropout.p if self.training else 0.0)


class _TritonAttention(MultiHeadAttention):
    """Multi-head attention in one Triton kernel if `attends` supports the inputs, otherwise in PyTorch."""

    def attend(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B T D"]:
        is_causal = bias is CAUSAL
        matrix = None if is_causal else bias
        if not attends(query, key, value, matrix):
            return super().attend(query, key, value, bias=bias)
        p = self.dropout.p if self.training else 0.0
        assert matrix is None or isinstance(matrix, Tensor)
        return self.output(merge_heads(attend(query, key, value, bias=matrix, causal=is_causal, p=p)))


class TritonSelfAttention(_TritonAttention, SelfAttention):
    """Self-attention in one Triton kernel."""


class TritonCrossAttention(_TritonAttention, CrossAttention):
    """Cross-attention in one Triton kernel."""


class TritonTable(TokenTable):
    """An embedding table and output matrix whose loss is a Triton kernel that overwrites logits by their gradient."""

    def loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        *,
        bias: Float[Tensor, " V"] | None = None,
        smoothing: float = 0.1,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
        rows, gold, dtype = hidden.flatten(0, 1), targets.flatten(), product_dtype(hidden)
        given = [x for x in (rows, self.weight, bias) if x is not None]
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
        with torch.autocast("cuda", enabled=False):
            loss, nll = GpuLinearCrossEntropy.apply(rows, self.weight, bias, gold, PAD, smoothing, dtype, wanted)
        return loss, nll, (gold != PAD).sum()


FOR_GPUS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: TritonLinear,
    FullProjection: TritonProjection,
    PostNorm: TritonPostNorm,
    PreNorm: TritonPreNorm,
    SelfAttention: TritonSelfAttention,
    CrossAttention: TritonCrossAttention,
    TokenTable: TritonTable,
}
