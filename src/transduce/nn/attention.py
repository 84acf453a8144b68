"""Scaled dot-product attention and multi-head attention (paper 3.2)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from transduce.nn.bias import CAUSAL, Bias, attended, dense_bias, fuses_on_cpu, relations_of
from transduce.nn.dtypes import wide
from transduce.nn.masks import later_keys
from transduce.nn.positions import Matmul, Relations, Rotate
from transduce.nn.state import DecoderState, LayerCache

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_weights(
    query: Float[Tensor, "*B T K"], key: Float[Tensor, "*B S K"], bias: Tensor | None, *, matmul: Matmul = torch.matmul
) -> Float[Tensor, "*B T S"]:
    """Compute attention weights softmax(Q K^T / sqrt(d_k) + bias), in float32 or wider (paper 3.2.1, equation 1).

    `bias` is broadcast to [B, H, T, S]: 0 for keys that a query may attend to, very negative for hidden keys
    (`masks.attention_bias`).
    """
    scores = matmul(query, key.transpose(-1, -2))  # [B, H, T, S]
    scale = 1 / math.sqrt(query.shape[-1])
    return (wide(scores) * scale if bias is None else torch.add(bias, scores, alpha=scale)).softmax(-1)


def scaled_dot_product_attention(
    query: Float[Tensor, "*B T K"],
    key: Float[Tensor, "*b S K"],
    value: Float[Tensor, "*b S K_v"],
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    relations: Relations | None = None,
    dropout: nn.Dropout | None = None,
    matmul: Matmul = torch.matmul,
) -> Float[Tensor, "*B T K_v"]:
    """Compute attention softmax(Q K^T / sqrt(d_k) + bias) V (paper 3.2.1, equation 1), with dropout on the weights.

    `causal` hides later keys and is given instead of a bias. `relations` add vectors to keys and values.

    On a GPU, PyTorch's fused kernel computes 4-dimensional inputs [B, H, T, K], also with fewer key heads than query
    heads. On a CPU it computes long sequences in training, without dropout or a trained bias; its memory does not grow
    with queries times keys.
    """
    p = dropout.p if dropout is not None and dropout.training else 0.0
    is_long = fuses_on_cpu(query.shape[-2], key.shape[-2]) and not p and not (bias is not None and bias.requires_grad)
    if relations is None and query.dim() == 4 and (query.is_cuda or is_long):
        mask = None if bias is None else bias.to(query.dtype)
        grouped = key.shape[1] != query.shape[1]
        with sdpa_kernel(_KERNELS):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=grouped
            )
    if causal:
        bias = later_keys(query.shape[-2], key.shape[-2], query.device)
    if relations is not None:
        scores = relations.scores(query, matmul=matmul)
        bias = scores if bias is None else bias + scores
    weights = attention_weights(query, key, bias, matmul=matmul).to(value.dtype)
    weights = weights if dropout is None else dropout(weights)
    output = matmul(weights, value)
    return output if relations is None else output + relations.values(weights, matmul=matmul)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T D"]:
    """Concatenate the outputs of all heads: Concat(head_1, ..., head_h) (paper 3.2.2)."""
    return x.transpose(1, 2).flatten(2)  # [B, T, H*K]


def head_width(d_model: int, n_heads: int) -> int:
    """Return d_model / n_heads, the width of a head; raise `ValueError` if it is not an integer."""
    if d_model % n_heads:
        raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}")
    return d_model // n_heads


class FullProjection(nn.Linear):
    """Several projections of one input to heads, such as queries, keys and values, in one product (paper 3.2.2)."""

    def __init__(self, d_model: int, heads: tuple[int, ...], *, d_head: int | tuple[int, ...], bias: bool) -> None:
        """`heads`: the number of heads of each projection; `d_head`: a head's width, or one width per projection."""
        widths = d_head if isinstance(d_head, tuple) else (d_head,) * len(heads)
        rows = tuple(n * width for n, width in zip(heads, widths, strict=True))
        super().__init__(d_model, sum(rows), bias=bias)
        self.heads, self.widths = heads, widths
        # number of rows of each matrix inside the packed weight; the matrices are initialized and updated separately
        self.rows = rows if len(heads) > 1 else ()

    @classmethod
    def problem(cls, *, n_heads: int, n_kv_heads: int, d_key: int, d_value: int) -> str | None:
        """Return an error message if this projection does not support these head counts and widths, or None."""
        return None

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return a tensor [B, H_i, T, K_i] for each projection i, which has H_i heads of width K_i."""
        y = super().forward(x)
        if len(set(self.heads)) == len(set(self.widths)) == 1:
            parts = y.unflatten(-1, (len(self.heads), self.heads[0], -1))  # [B, T, n, H, K]
            return parts.permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        parts = zip(self.heads, y.split(self.rows, dim=-1), strict=True)
        return tuple(part.unflatten(-1, (n, -1)).transpose(1, 2).contiguous() for n, part in parts)


class SharedProjection(nn.Module):
    """Projections in which all heads share a weight [d_head, d_head]; each head projects its own slice of the input.

    Some textbooks teach this form. With H heads, it has H^2 times fewer weights than the paper's projection.
    """

    def __init__(self, d_model: int, heads: tuple[int, ...], *, d_head: int | tuple[int, ...], bias: bool) -> None:
        super().__init__()
        width, *others = d_head if isinstance(d_head, tuple) else (d_head,)
        if any(n * width != d_model for n in heads) or set(others) - {width}:
            raise ValueError("a shared projection needs equal queries, keys and values, as wide together as the input")
        self.d_head = d_head = width
        self.parts = nn.ModuleList(nn.Linear(d_head, d_head, bias=bias) for _ in heads)

    @classmethod
    def problem(cls, *, n_heads: int, n_kv_heads: int, d_key: int, d_value: int) -> str | None:
        """Return an error message if the head counts or widths differ (all slices must have one width), or None."""
        if n_kv_heads != n_heads:
            return f"model.projection = 'shared' needs n_kv_heads = n_heads, not {n_kv_heads}"
        if d_key != d_value:
            return f"model.projection = 'shared' needs d_key = d_model / n_heads, not {d_key}"
        return None

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:
        """Return a tensor [B, H, T, K] for each projection."""
        slices = x.unflatten(-1, (-1, self.d_head)).transpose(1, 2).contiguous()  # [B, H, T, K]
        return tuple(part(slices) for part in self.parts)


PROJECTIONS: dict[str, type[FullProjection] | type[SharedProjection]] = {
    "full": FullProjection,
    "shared": SharedProjection,
}


class Attention(nn.Module, ABC):
    """Base of attention layers. It lets `nn.recording` record and replace the weights of any kind of attention.

    A layer calls `self.attend` for every attention that it computes. A recorder replaces this attribute by a function
    that passes its arguments to `weights` too. A decoder may call `attend` once for all positions, or once for each.
    """

    matmul: Matmul = staticmethod(torch.matmul)
    """Function that multiplies batches of matrices; a subclass may use another implementation."""

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.combine(self.weights(*args, **kwargs), *args, **kwargs)

    @abstractmethod
    def weights(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B H T S"]:
        """Return the attention weights that `attend` computes from the same arguments, without dropout.

        A row sums to 1, or is zero if its query may attend to no key.
        """

    @abstractmethod
    def raw_scores(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B H T S"]:
        """Return the attention scores before the bias is added; the arguments are those of `attend`."""

    @abstractmethod
    def combine(self, weights: Float[Tensor, "B H T S"], *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of `attend`, computed with the given attention weights."""


class MultiHeadAttention(Attention):
    """Base of self-attention and cross-attention with several heads and the output projection W^O (paper 3.2.2).

    With n_kv_heads < n_heads, groups of query heads share keys and values (Ainslie et al. 2023).
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        projection: str = "full",
    ) -> None:
        """Create the projections.

        d_key: width of a head's queries and keys. d_value: width of its values. Both are d_model / n_heads by default.
        projection: "full" or "shared", a key of PROJECTIONS.
        """
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        if n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        self.d_head = d_value or head_width(d_model, n_heads)
        self.d_key = d_key or head_width(d_model, n_heads)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(n_heads * self.d_head, d_model, bias=bias)
        self.add_projections(partial(PROJECTIONS[projection], d_model, bias=bias))

    @abstractmethod
    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Create the input projections by calls of `project(heads, d_head=...)` (see `FullProjection`)."""

    def attend(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B T D"]:
        """Compute attention of all heads, merge and project it. key, value: [B, H_kv, S, K]."""
        dropout = self.dropout if self.dropout.p else None
        takes_groups = query.is_cuda and (bias is None or bias is CAUSAL)
        if self.n_kv_heads < self.n_heads and not takes_groups:
            key, value = map(self._of_each_head, (key, value))  # [B, H, S, K]
        attend = partial(scaled_dot_product_attention, dropout=dropout, matmul=self.matmul)
        return self.output(merge_heads(attended(attend, query, key, value, bias=bias)))

    def weights(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B H T S"]:
        matrix = dense_bias(bias, query)
        weights = attention_weights(query, self._of_each_head(key), matrix, matmul=self.matmul)
        return weights if matrix is None else weights.masked_fill(matrix.isneginf().any(-1, keepdim=True), 0.0)

    def raw_scores(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B H T S"]:
        scores = self.matmul(query, self._of_each_head(key).transpose(-1, -2))
        return wide(scores) * (1 / math.sqrt(query.shape[-1]))

    def combine(
        self, weights: Float[Tensor, "B H T S"], query: Tensor, key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B T D"]:
        heads = self.matmul(weights.to(value.dtype), self._of_each_head(value))
        if (relations := relations_of(bias)) is not None:
            heads = heads + relations.values(weights, matmul=self.matmul)
        return self.output(merge_heads(heads))

    def _of_each_head(self, x: Float[Tensor, "B G S K"]) -> Float[Tensor, "B H S K"]:
        return x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)


class SelfAttention(MultiHeadAttention):
    """Self-attention of a sequence (paper 3.2.3)."""

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Create the projection to queries, keys and values, which is one product."""
        heads, widths = (self.n_heads, self.n_kv_heads, self.n_kv_heads), (self.d_key, self.d_key, self.d_head)
        self.query_key_value = project(heads, d_head=widths)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        bias: Bias,
        rotate: Rotate,
        cache: LayerCache | None = None,
        state: DecoderState | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attend from x to itself and, in a decoder, to cached keys; keys and values of x are added to the cache."""
        query, key, value = self.query_key_value(x)
        query, key = rotate(query), rotate(key)
        if cache is not None and state is not None:
            key, value = cache.append(key, value, state.known)
        return self.attend(query, key, value, bias=bias)


class CrossAttention(MultiHeadAttention):
    """Attention of the decoder to the encoder's output, the memory (paper 3.2.3)."""

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Create a projection of the decoder's states to queries, and one of the memory to keys and values."""
        self.query = project((self.n_heads,), d_head=(self.d_key,))
        self.key_value = project((self.n_kv_heads, self.n_kv_heads), d_head=(self.d_key, self.d_head))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        key: Float[Tensor, "B H S K"],
        value: Float[Tensor, "B H S K_v"],
        *,
        bias: Tensor,
    ) -> Float[Tensor, "B T D"]:
        """Attend from x to the keys and values of the memory; `bias` hides padding."""
        (query,) = self.query(x)  # [B, H, T, K]
        return self.attend(query, key, value, bias=bias)
