"""A linear layer with a faster float32 product on CPUs for inference."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.native import kernels, operators


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x: that of autocast, if it is enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(x: Tensor) -> Tensor:
    """x as float32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _onednn_product() -> torch._ops.OpOverload | None:
    """OneDNN's float32 product, if this build of PyTorch has it."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN = _onednn_product()


def _has_changing_shapes(x: Tensor) -> bool:
    """Whether this is a bfloat16 product of training or validation on a CPU: nearly every batch has another shape."""
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and x.numel() > 0
    )


def linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Tensor | None = None) -> Float[Tensor, "*B O"]:
    """x W^T + b.

    On a CPU in float32 without gradients this uses oneDNN instead of MKL, PyTorch's choice. On AMD CPUs MKL uses half
    of the vector width (108 compared with 240 GFLOP/s per core on a Zen 5). A row of oneDNN's result does not depend on
    the number of rows, so a sentence's result does not depend on its batch. A single row would; it is computed as two.
    """
    if (
        _ONEDNN is None
        or torch.is_grad_enabled()
        or x.dtype != torch.float32
        or weight.dtype != torch.float32
        or x.device.type != "cpu"
        or torch.is_autocast_enabled("cpu")
        or not x.numel()
    ):
        if kernels.multiplies(x, weight):
            return operators.linear(x, weight, bias)
        if _has_changing_shapes(x):
            return _RoundedLinear.apply(x, weight, bias)
        if kernels.multiplies_on_gpu(x, bias):
            from transduce.native.triton_linear import GpuLinear

            return GpuLinear.apply(x, weight, bias, product_dtype(x))
        return F.linear(x, weight, bias)
    if x.numel() == x.shape[-1]:
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
        return _ONEDNN(rows, weight, bias, "none", [], "")[:1].view(*x.shape[:-1], -1)
    return _ONEDNN(x, weight, bias, "none", [], "")


def batched_product(a: Float[Tensor, "*B N K"], b: Float[Tensor, "*B K M"]) -> Float[Tensor, "*B N M"]:
    """a b, matrix by matrix.

    Without gradients on a CPU a single matrix is computed as two: PyTorch passes it to another routine than several,
    one that rounds in another way with two threads, and a sentence's result must not depend on its batch.
    """
    if torch.is_grad_enabled() or a.device.type != "cpu" or a.shape[:-2].numel() != 1:
        return a @ b
    twice = a.reshape(1, *a.shape[-2:]).expand(2, -1, -1) @ b.reshape(1, *b.shape[-2:]).expand(2, -1, -1)
    return twice[0].view(*a.shape[:-1], b.shape[-1])


def wide_linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Tensor | None) -> Float[Tensor, "*B O"]:
    """x W^T + b as float32 or wider, for any dtype of x and of the weights."""
    return wide(linear(x.to(weight.dtype), weight, bias))


def rounded_rows(n: int, *, least: int = 16) -> int:
    """`n` rounded up to one of 16 counts per power of two, at least to a multiple of `least`.

    That is at most 6 % more, above 16 times `least`.
    """
    step = max(least, 1 << max(0, (n - 1).bit_length() - 5))
    return -(-n // step) * step


def _pad_rows(x: Float[Tensor, "N I"], dtype: torch.dtype) -> Float[Tensor, "M I"]:
    """`x` as `dtype`, with rows of zeros up to a rounded number of rows."""
    n = rounded_rows(len(x))
    if n == len(x):
        return x.to(dtype)
    padded = x.new_empty(n, x.shape[1], dtype=dtype)
    padded[: len(x)].copy_(x)
    padded[len(x) :].zero_()
    return padded


class _RoundedLinear(torch.autograd.Function):
    """x W^T + b in bfloat16 on a CPU, with the number of rows rounded up by rows of zeros.

    oneDNN compiles a kernel for every shape of a product: one to seven milliseconds each, more than a small model's
    products take, and in training nearly every batch has a new shape. Rounded row counts recur.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        rows = x.flatten(0, -2)
        n, dtype = len(rows), torch.get_autocast_dtype("cpu")
        padded, w = _pad_rows(rows, dtype), weight.to(dtype)
        ctx.save_for_backward(padded, w)
        ctx.shape, ctx.dtypes, ctx.has_bias = x.shape, (x.dtype, weight.dtype), bias is not None
        y = F.linear(padded, w, None if bias is None else bias.to(dtype))
        return y[:n].view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        padded, w = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grads = _pad_rows(rows, w.dtype)
        grad_x = (grads @ w)[: len(rows)].view(ctx.shape).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        grad_w = (grads.t() @ padded).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        grad_b = grads.sum(0).to(ctx.dtypes[1]) if ctx.has_bias else None
        return grad_x, grad_w, grad_b


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of `linear`; weights and their names are the same."""

    rows: tuple[int, ...] = ()
    """Numbers of rows of matrices of different use, if there are several: they are initialized and updated apart."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        """x W^T + b."""
        return linear(x, self.weight, self.bias)
