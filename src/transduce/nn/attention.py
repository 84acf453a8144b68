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

from transduce.native import kernels
from transduce.native.attention import attend
from transduce.native.sublayer import Inner, Layers
from transduce.nn.bias import Bias, CausalBias, attended, dense_bias, fuses_on_cpu, relations_of
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear, batched_product, wide
from transduce.nn.positions import Relations, Rotate, unchanged
from transduce.nn.projections import PROJECTIONS

_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SHORT = 64 * 64  # queries times keys up to which attention on a CPU is of float32
_VECTOR = 16  # float32 numbers in the widest vector register of a CPU (AVX-512)


def attention_weights(
    query: Float[Tensor, "*B T K"], key: Float[Tensor, "*B S K"], bias: Tensor | None
) -> Float[Tensor, "*B T S"]:
    """softmax(Q K^T / sqrt(d_k) + bias), in float32 or wider (paper 3.2.1, equation 1).

    `bias` is broadcast to [B, H, T, S]: 0 where a query may attend, very negative elsewhere (`masks.attention_bias`).
    """
    scores = batched_product(query, key.transpose(-1, -2))  # [B, H, T, S]
    scale = 1 / math.sqrt(query.shape[-1])
    if bias is None:
        return softmax_over_keys(wide(scores) * scale)
    return softmax_over_keys(torch.add(bias, scores, alpha=scale))


def softmax_over_keys(scores: Float[Tensor, "*B T S"]) -> Float[Tensor, "*B T S"]:
    """Softmax over keys.

    On a CPU, PyTorch's softmax is ten times slower for rows shorter than a vector register: those are padded.
    """
    missing = _VECTOR - scores.shape[-1]
    if missing <= 0 or scores.device.type != "cpu" or torch.compiler.is_compiling():
        return scores.softmax(-1)
    return F.pad(scores, (0, missing), value=-math.inf).softmax(-1)[..., :-missing]


def scaled_dot_product_attention(
    query: Float[Tensor, "*B T K"],
    key: Float[Tensor, "*b S K"],
    value: Float[Tensor, "*b S K_v"],
    *,
    bias: Tensor | CausalBias | None = None,
    relations: Relations | None = None,
    dropout: Dropout | None = None,
) -> Float[Tensor, "*B T K_v"]:
    """softmax(Q K^T / sqrt(d_k) + bias) V (paper 3.2.1, equation 1), with dropout on the weights.

    `relations` add vectors to the values; what they add to the scores is in the bias.

    On a GPU our kernel for sentences, and for longer sequences PyTorch's, which takes fewer key heads than query heads
    if there is no bias matrix. On a CPU plain products, which are faster at the lengths of sentences, and for long
    sequences in training PyTorch's kernel, whose memory does not grow with queries times keys. (It adds up in an order
    that depends on the length.)
    """
    drops = dropout is not None and dropout.training
    causal, matrix = isinstance(bias, CausalBias), bias if isinstance(bias, Tensor) else None
    p = dropout.p if dropout is not None and drops else 0.0
    if relations is None and kernels.attends(query, key, value, matrix):
        return attend(query, key, value, bias=matrix, causal=causal, p=p)
    if query.is_cuda and relations is None:
        return _on_gpu(query, key, value, matrix, causal=causal, p=p)
    if query.dtype == torch.bfloat16 and query.shape[-2] * key.shape[-2] <= _SHORT and torch.is_autocast_enabled("cpu"):
        # oneDNN compiles a bfloat16 kernel for each shape, which for sentences takes longer than float32 products
        with torch.autocast("cpu", enabled=False):
            query, key, value = query.float(), key.float(), value.float()
            return scaled_dot_product_attention(query, key, value, bias=bias, relations=relations, dropout=dropout)
    learned = relations is not None or (isinstance(bias, Tensor) and bias.requires_grad)
    if fuses_on_cpu(query.shape[-2], key.shape[-2]) and not drops and not learned:
        return _fused(query, key, value, bias)
    bias = dense_bias(bias, query)
    weights = attention_weights(query, key, bias).to(value.dtype)
    weights = weights if dropout is None else dropout(weights)
    found = batched_product(weights, value)
    return found if relations is None else found + relations.values(weights)


def _on_gpu(
    query: Float[Tensor, "*B T K"], key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool, p: float
) -> Float[Tensor, "*B T K"]:
    """PyTorch's kernels, but not cuDNN's, which plans for 40 ms at each new shape."""
    mask = None if bias is None else bias.to(query.dtype)
    grouped = key.shape[-3] != query.shape[-3]
    with sdpa_kernel(_GPU_KERNELS):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, enable_gqa=grouped
        )


def _fused(
    query: Float[Tensor, "*B T K"], key: Tensor, value: Tensor, bias: Tensor | CausalBias | None
) -> Float[Tensor, "*B T K"]:
    """PyTorch's kernel, which has two batch axes: of [B, H, N], N and B * H."""
    if isinstance(bias, CausalBias):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    bias = None if bias is None else bias.to(query.dtype)
    if query.dim() == 4:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    if bias is not None:
        both = query.shape[:2] if max(bias.shape[:2]) > 1 else (1, 1)
        bias = bias.expand(*both, *(-1,) * 3).flatten(0, 1).transpose(0, 1)
    q, k, v = (x.flatten(0, 1).transpose(0, 1) for x in (query, key, value))  # [N, B*H, C, K]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(0, 1).unflatten(0, query.shape[:2])


def _takes_groups(query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, bias: Bias) -> bool:
    """Whether a kernel computes this attention with fewer key heads than query heads."""
    has_no_matrix = bias is None or isinstance(bias, CausalBias)
    matrix = None if has_no_matrix else bias
    return (query.is_cuda and has_no_matrix) or kernels.attends(query, key, value, matrix)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T D"]:
    """Concat(head_1, ..., head_h) (paper 3.2.2)."""
    return x.transpose(1, 2).flatten(2)  # [B, T, H*K]


def head_width(d_model: int, n_heads: int) -> int:
    """The width of each head; a `ValueError` if they would differ."""
    if d_model % n_heads:
        raise ValueError(f"d_model {d_model} is not divisible by n_heads {n_heads}")
    return d_model // n_heads


class Attention(nn.Module, ABC):
    """A layer of attention that can be inspected, whatever its inputs are.

    The layer calls `self.attend` for every attention that it computes; a recorder replaces that attribute, and passes
    the same arguments to `weights`. A decoder may attend once for all positions, or once for each.
    """

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """The result of attention."""
        return self.combine(self.weights(*args, **kwargs), *args, **kwargs)

    @abstractmethod
    def weights(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B H T S"]:
        """The weights that `attend` uses for the same arguments, without dropout.

        Rows sum to 1, or are zero where a query sees no key.
        """

    @abstractmethod
    def raw_scores(self, *args: Any, **kwargs: Any) -> Float[Tensor, "B H T S"]:
        """The scores before the bias, for the same arguments."""

    @abstractmethod
    def combine(self, weights: Float[Tensor, "B H T S"], *args: Any, **kwargs: Any) -> Tensor:
        """The result of attention with these weights instead of those that it computes."""


class MultiHeadAttention(Attention):
    """Base of self- and cross-attention: heads, grouping, and the output projection W^O (paper 3.2.2).

    With n_kv_heads < n_heads, groups of query heads share keys and values (Ainslie et al. 2023).
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_key: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        projection: str = "full",
    ) -> None:
        """`d_key`: width of a head's queries and keys (default: d_model / n_heads); `projection`: of PROJECTIONS."""
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        if n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {n_heads} is not divisible by n_kv_heads {self.n_kv_heads}")
        self.d_head = head_width(d_model, n_heads)
        self.d_key = d_key or self.d_head
        self.dropout = Dropout(dropout)
        self.output = Linear(d_model, d_model, bias=bias)
        self.add_projections(partial(PROJECTIONS[projection], d_model, bias=bias))

    @abstractmethod
    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Create the projections of the inputs; `project` takes the numbers of heads and `d_head`, their widths."""

    def attend(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B T D"]:
        """Attention of all heads, merged and projected. key, value [B, H_kv, S, K]; bias broadcast to [B, H, T, S]."""
        dropout = self.dropout if self.dropout.p else None
        if self.n_kv_heads < self.n_heads and not _takes_groups(query, key, value, bias):
            key, value = map(self._of_each_head, (key, value))  # [B, H, S, K]
        heads = attended(partial(scaled_dot_product_attention, dropout=dropout), query, key, value, bias=bias)
        return self.output(merge_heads(heads))

    def weights(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B H T S"]:
        matrix = dense_bias(bias, query)
        weights = attention_weights(query, self._of_each_head(key), matrix)
        return weights if matrix is None else weights.masked_fill(matrix.isneginf().any(-1, keepdim=True), 0.0)

    def raw_scores(
        self, query: Float[Tensor, "B H T K"], key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B H T S"]:
        scores = batched_product(query, self._of_each_head(key).transpose(-1, -2))
        return wide(scores) * (1 / math.sqrt(query.shape[-1]))

    def combine(
        self, weights: Float[Tensor, "B H T S"], query: Tensor, key: Tensor, value: Tensor, *, bias: Bias
    ) -> Float[Tensor, "B T D"]:
        heads = batched_product(weights.to(value.dtype), self._of_each_head(value))
        if (relations := relations_of(bias)) is not None:
            heads = heads + relations.values(weights)
        return self.output(merge_heads(heads))

    def _inner(self, x: Tensor, bias: Bias, memory: tuple[Tensor, ...] = ()) -> Inner | None:
        """`attend` without the output projection, if kernels compute it. `memory`: given keys and values."""
        causal, matrix = isinstance(bias, CausalBias), bias if isinstance(bias, Tensor) else None
        queries = len(x), self.n_heads, x.shape[1], self.d_key
        if not (bias is matrix or causal) or not kernels.attends_to(queries, memory, matrix):
            return None
        return Inner(
            p=self.dropout.rate,
            heads=self.n_heads,
            kv_heads=self.n_kv_heads,
            widths=(self.d_key, self.d_head),
            causal=causal,
            bias=matrix,
            memory=memory,
        )

    def _of_each_head(self, x: Float[Tensor, "B G S K"]) -> Float[Tensor, "B H S K"]:
        return x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1)


class SelfAttention(MultiHeadAttention):
    """A sequence attends to itself (paper 3.2.3)."""

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """One product gives queries, keys and values."""
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
        """x attends to itself and, in a decoder, to the known keys in its cache, which grows in place."""
        query, key, value = self.query_key_value(x)
        query, key = rotate(query), rotate(key)
        if cache is not None and state is not None:
            key, value = cache.append(key, value, state.known)
        return self.attend(query, key, value, bias=bias)

    def as_sublayer(
        self, x: Tensor, *, bias: Bias, rotate: Rotate, cache: LayerCache | None = None, state: object = None
    ) -> tuple[Layers, Inner] | None:
        """The same for kernels that compute a whole sub-layer; None if they do not."""
        if rotate is not unchanged or (cache is not None and cache.keys is not None):
            return None
        inner = self._inner(x, bias)
        return None if inner is None else ((self.query_key_value, self.output), inner)


class CrossAttention(MultiHeadAttention):
    """The decoder attends to the encoder's output, the memory (paper 3.2.3)."""

    def add_projections(self, project: Callable[..., nn.Module]) -> None:
        """Queries of the decoder; keys and values of the memory."""
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
        """x attends to the keys and values of the memory."""
        (query,) = self.query(x)  # [B, H, T, K]
        return self.attend(query, key, value, bias=bias)

    def as_sublayer(self, x: Tensor, key: Tensor, value: Tensor, *, bias: Bias) -> tuple[Layers, Inner] | None:
        """The same for kernels that compute a whole sub-layer; None if they do not."""
        inner = self._inner(x, bias, (key, value))
        return None if inner is None else ((self.query, self.output), inner)
