"""Matrix products by PyTorch on CPUs. In decoding, results do not depend on the batch; in training, shapes recur."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.nn.adapters import AdaptedLinear, AdaptedProjection, AdaptedTable
from transduce.nn.attention import CrossAttention, FullProjection, SelfAttention
from transduce.nn.convolutional import MemoryAttention
from transduce.nn.embedding import TokenTable
from transduce.nn.recurrent import GRU, LSTM, AdditiveAttention, DotAttention, GeneralAttention
from transduce.nn.relative_attention import RelativeAttention
from transduce.nn.star import RelayAttention


def _onednn_product() -> torch._ops.OpOverload | None:
    """Return PyTorch's operator for oneDNN's float32 product, or None if this build of PyTorch does not have it."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN = _onednn_product()
_SMALL = 64 * 64  # numbers in a matrix


def _has_changing_shapes(x: Tensor) -> bool:
    """Whether products with x probably have another shape in each batch.

    This is assumed of products in bfloat16 on a CPU, which only training and validation use.
    """
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and x.numel() > 0
    )


def cpu_linear(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Tensor | None = None
) -> Float[Tensor, "*B O"]:
    """Compute x W^T + b, as `F.linear` does.

    On a CPU in float32 without gradients, oneDNN computes the product instead of MKL, PyTorch's choice. On AMD CPUs MKL
    uses half of the vector width (108 compared with 240 GFLOP/s per core on a Zen 5). A row of oneDNN's result does not
    depend on the number of rows, so a sentence's result does not depend on its batch. The exception is a single row,
    which is therefore computed twice.

    In bfloat16, rows of zeros round up the number of rows. OneDNN compiles a kernel for every shape of a product, which
    takes time and memory, and in training nearly every batch has a new shape. Rounded shapes recur.
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
        if _has_changing_shapes(x):
            rows = x.flatten(0, -2)
            padded = F.pad(rows, (0, 0, 0, rounded_rows(len(rows)) - len(rows)))
            return F.linear(padded, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)
        return F.linear(x, weight, bias)
    if x.numel() == x.shape[-1]:
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
        return _ONEDNN(rows, weight, bias, "none", [], "")[:1].view(*x.shape[:-1], -1)
    return _ONEDNN(x, weight, bias, "none", [], "")


def cpu_matmul(a: Float[Tensor, "*B N K"], b: Float[Tensor, "*b K M"]) -> Float[Tensor, "*B N M"]:
    """Multiply batches of matrices, as `torch.matmul` does.

    Without gradients on a CPU, a single pair of matrices is computed as a batch of two. PyTorch has a different routine
    for a batch of one, which rounds differently with two threads, and a sentence's result must not depend on its batch.
    Under autocast, small matrices are multiplied in float32. OneDNN would compile a bfloat16 kernel for each shape,
    which takes longer than the products of a batch of sentences.
    """
    if _has_changing_shapes(a) and a.shape[-2] * max(a.shape[-1], b.shape[-1]) <= _SMALL:
        with torch.autocast("cpu", enabled=False):
            return a.float() @ b.float()
    if torch.is_grad_enabled() or a.device.type != "cpu" or a.shape[:-2].numel() != 1:
        return a @ b
    twice = a.reshape(1, *a.shape[-2:]).expand(2, -1, -1) @ b.reshape(1, *b.shape[-2:]).expand(2, -1, -1)
    return twice[0].view(*a.shape[:-1], b.shape[-1])


def rounded_rows(n: int, *, least: int = 16) -> int:
    """Round n up, so that few different numbers of rows occur: at most 16 for each power of two.

    The result is a multiple of `least`. If n is above 16 times `least`, rounding adds at most 6 %.
    """
    step = max(least, 1 << max(0, (n - 1).bit_length() - 5))
    return -(-n // step) * step


class CpuLinear(nn.Linear):
    """A linear layer that computes with `cpu_linear`."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        return cpu_linear(x, self.weight, self.bias)


class CpuProjection(FullProjection, CpuLinear):  # type: ignore[misc]
    """A projection to heads that computes with `cpu_linear`."""


class CpuProducts:
    """Base of modules that compute matrix products with `cpu_linear` and `cpu_matmul`."""

    linear, matmul = staticmethod(cpu_linear), staticmethod(cpu_matmul)


def _with_cpu_products(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Cpu{kind.__name__}", (CpuProducts, kind), {})


FOR_CPUS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: CpuLinear,
    FullProjection: CpuProjection,
    **{
        kind: _with_cpu_products(kind)
        for kind in (
            *(SelfAttention, CrossAttention, RelayAttention, RelativeAttention, MemoryAttention),
            *(DotAttention, GeneralAttention, AdditiveAttention, TokenTable, LSTM, GRU),
            *(AdaptedLinear, AdaptedProjection, AdaptedTable),
        )
    },
}
