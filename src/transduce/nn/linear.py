"""The linear layer, which outside of training takes the fastest float32 product that the machine has."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


def _onednn_product() -> torch._ops.OpOverload | None:
    """OneDNN's float32 product, if this build of PyTorch has it."""
    if not torch.backends.mkldnn.is_available():
        return None
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return None if packet is None else packet.default


_ONEDNN = _onednn_product()


def linear(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"], bias: Tensor | None = None) -> Float[Tensor, "*B O"]:
    """x W^T + b.

    On a CPU, in float32 and without gradients, by oneDNN and not by MKL, PyTorch's choice: on AMD's CPUs MKL uses half
    of the vector width (108 against 240 GFLOP/s a core on a Zen 5), and oneDNN's rows do not depend, bit for bit, on
    how many rows there are, so that a sentence's numbers do not depend on its batch. A single row is the exception: it
    is multiplied as two.
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
        return F.linear(x, weight, bias)
    if x.numel() == x.shape[-1]:
        rows = x.reshape(1, -1).expand(2, -1).contiguous()
        return _ONEDNN(rows, weight, bias, "none", [], "")[:1].view(*x.shape[:-1], -1)
    return _ONEDNN(x, weight, bias, "none", [], "")


class Linear(nn.Linear):
    """`torch.nn.Linear` by way of `linear`; weights and their names are the same."""

    def forward(self, x: Float[Tensor, "*B I"]) -> Float[Tensor, "*B O"]:
        """x W^T + b."""
        return linear(x, self.weight, self.bias)
