"""Token embedding, and output layer with loss, each computed by one call of the C++ library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from transduce.kernels.calls import gradient_place, n_threads, new_seed, products_dtype, writes_gradients
from transduce.kernels.library import loaded_library
from transduce.kernels.products import CpuProducts
from transduce.nn.adapters import AdaptedTable
from transduce.nn.embedding import TokenEmbedding, TokenTable
from transduce.nn.masks import PAD


class _EmbeddingCall(ctypes.Structure):
    """The struct `transduce_embedding_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "length")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary")),
        *((name, ctypes.c_void_p) for name in ("ids", "table", "positions")),
        *((name, ctypes.c_float) for name in ("scale", "p")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("output", "grad_output", "grad_table", "grad_positions")),
        ("adds", ctypes.c_int32),
    ]


class _LossCall(ctypes.Structure):
    """The struct `transduce_loss_call` of native/src/transduce_native.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "gold")),
        *((name, ctypes.c_int64) for name in ("rows", "pad")),
        *((name, ctypes.c_int32) for name in ("width", "vocabulary", "is_bf16")),
        ("smoothing", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("grad_hidden", "grad_weight", "grad_bias", "loss", "nll")),
    ]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class LibraryEmbedding(TokenEmbedding):
    """A token embedding with positions and dropout, computed by one call of the C++ library."""

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        *,
        offset: int = 0,
        more: Float[Tensor, "*T D"] | None = None,
        positions: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        weight = self.table.weight
        fits = weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous()
        fits = fits and ids.dtype == torch.int64 and ids.numel() > 0
        is_other = positions is not None or isinstance(self.table, AdaptedTable)
        if is_other or not fits or products_dtype() is None or self.table._forward_hooks:
            return super().forward(ids, offset=offset, more=more, positions=positions)
        is_all = more is None and isinstance(self.norm, nn.Identity)
        p = self.dropout.p if self.dropout.training and is_all else 0.0
        vectors = self.positions.vectors(ids.shape[1], offset=offset, device=ids.device)
        writes = writes_gradients() and torch.is_grad_enabled() and weight.requires_grad
        options = self.scale, p, new_seed() if p else 0
        x: Tensor = _Embedding.apply(self.aliased(ids), weight, vectors, options, writes)
        return x if is_all else self.dropout(self.norm(x if more is None else x + more))


class _Embedding(torch.autograd.Function):
    """Autograd function of dropout(table[ids] * scale + vectors)."""

    @staticmethod
    def forward(ctx, ids, table, vectors, options, writes):  # type: ignore[no-untyped-def]
        ids, vectors = ids.contiguous(), None if vectors is None else vectors.contiguous()
        output = torch.empty(*ids.shape, table.shape[1], dtype=torch.float32)
        call = _embedding_call(ids, table, vectors, options)
        call.output = output.data_ptr()
        loaded_library().transduce_embedding(ctypes.byref(call), n_threads())
        ctx.options, ctx.writes = options, writes
        ctx.save_for_backward(ids, table, vectors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (ids, table, vectors), grad = ctx.saved_tensors, grad.contiguous()
        call = _embedding_call(ids, table, vectors, ctx.options)
        grad_table = grad_vectors = None
        if ctx.needs_input_grad[1]:
            grad_table = torch.empty_like(table)
            if ctx.writes:
                grad_table, call.adds = gradient_place(table, grad_table)
        if ctx.needs_input_grad[2]:
            grad_vectors = torch.empty_like(vectors)
        call.grad_output, call.grad_table, call.grad_positions = map(_address, (grad, grad_table, grad_vectors))
        loaded_library().transduce_embedding_backward(ctypes.byref(call), n_threads())
        return None, None if ctx.writes else grad_table, grad_vectors, None, None


def _embedding_call(
    ids: Tensor, table: Tensor, vectors: Tensor | None, options: tuple[float, float, int]
) -> _EmbeddingCall:
    sizes = ids.numel(), ids.shape[1], table.shape[1], table.shape[0]
    return _EmbeddingCall(*sizes, ids.data_ptr(), table.data_ptr(), _address(vectors), *options)


class LibraryTable(CpuProducts, TokenTable):
    """An output matrix whose loss is computed by one call of the C++ library, which never holds all logits."""

    def loss(
        self,
        hidden: Float[Tensor, "B T D"],
        targets: Int[Tensor, "B T"],
        *,
        bias: Float[Tensor, " V"] | None = None,
        smoothing: float = 0.1,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
        given: list[Tensor] = [self.weight] if bias is None else [self.weight, bias]
        fits = all(x.is_cpu and x.dtype == torch.float32 for x in given) and products_dtype() is not None
        if not fits:
            return super().loss(hidden, targets, bias=bias, smoothing=smoothing)
        rows, gold = hidden.flatten(0, 1).float(), targets.flatten()
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (rows, *given))
        options: tuple[Any, ...] = smoothing, products_dtype() == torch.bfloat16, wanted, writes_gradients()
        loss, nll = _LinearCrossEntropy.apply(rows, self.weight, bias, gold, options)
        return loss, nll, (gold != PAD).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function of the two sums of `label_smoothed_loss`; the forward pass also computes the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, gold, options):  # type: ignore[no-untyped-def]
        smoothing, is_bf16, wanted, ctx.writes = options
        given = [None if x is None else x.contiguous() for x in (hidden, weight, bias, gold)]
        grads = [torch.empty_like(x) if wanted and x is not None else None for x in given[:3]]
        sums = torch.empty(2)
        loss, nll = sums.unbind()
        sizes = len(hidden), PAD, hidden.shape[1], weight.shape[0]
        call = _LossCall(*map(_address, given), *sizes, is_bf16, smoothing, *map(_address, (*grads, loss, nll)))
        loaded_library().transduce_loss(ctypes.byref(call), n_threads())
        ctx.save_for_backward(*grads, weight, bias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        *grads, weight, bias = ctx.saved_tensors
        # with `writes`, the only backward pass may return the saved tensors without a copy
        if grad_loss != 1 or not ctx.writes:
            grads = [None if grad is None else grad * grad_loss for grad in grads]
        for i, parameter in enumerate((weight, bias), 1):
            if ctx.writes and parameter is not None and parameter.is_leaf:
                grad, adds = gradient_place(parameter, grads[i])
                if adds:
                    grad.add_(grads[i])
                grads[i] = None
        return *grads, None, None
