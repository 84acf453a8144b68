"""Position-wise feed-forward networks: FFN(x) = max(0, x W1 + b1) W2 + b2 (paper 3.3) and its successors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.native import kernels, operators
from transduce.native.sublayer import Inner, Layers
from transduce.nn.dropout import Dropout
from transduce.nn.linear import Linear

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """The paper's: expand to d_ff, activate, contract; the same at every position.

    All variants take the same arguments; only those that convolve use `kernel_size` and `causal`.
    """

    convolves: ClassVar[bool] = False

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        kernel_size: int = 1,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.d_model, self.d_ff, self.bias, self.kernel_size, self.causal = d_model, d_ff, bias, kernel_size, causal
        self.expand, self.contract = self._expansion(), self._contraction()
        self.activation, self.activate = activation, ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)

    def _expansion(self) -> nn.Module:
        return Linear(self.d_model, self.d_ff, bias=self.bias)

    def _contraction(self) -> nn.Module:
        return Linear(self.d_ff, self.d_model, bias=self.bias)

    def forward(
        self, x: Float[Tensor, "B T D"], keep: Tensor | None = None, history: list[Tensor] | None = None
    ) -> Float[Tensor, "B T D"]:
        """x transformed position by position; only the convolution uses `keep` and `history`."""
        expand = self.expand
        if kernels.activates(expand, x):
            return self.contract(operators.activated_linear(x, expand, self.activation, self.dropout.rate))
        return self.contract(self.dropout(self.activate(self.expand(x))))

    def as_sublayer(self, x: Tensor, keep: object = None, history: object = None) -> tuple[Layers, Inner]:
        """The same for kernels that compute a whole sub-layer."""
        return (self.expand, self.contract), Inner(p=self.dropout.rate, activation=self.activation)


class GatedFeedForward(FeedForward):
    """(activate(x W) * x V) W2 (Shazeer 2020, GLU variants): W and V are one matrix of 2 d_ff rows."""

    def _expansion(self) -> nn.Module:
        return Linear(self.d_model, 2 * self.d_ff, bias=self.bias)

    def forward(self, x: Tensor, keep: Tensor | None = None, history: list[Tensor] | None = None) -> Tensor:
        gate, value = self.expand(x).chunk(2, dim=-1)
        return self.contract(self.dropout(self.activate(gate) * value))


class ConvFeedForward(FeedForward):
    """The feed-forward as two convolutions over positions (paper 3.3: "two convolutions with kernel size 1").

    With kernel size 1 it equals the plain one. A wider kernel sees neighbours: on both sides in an encoder, only
    earlier ones in a decoder. Padding and positions outside the sequence count as zero.
    """

    convolves = True

    def _expansion(self) -> nn.Module:
        return nn.Conv1d(self.d_model, self.d_ff, self.kernel_size, bias=self.bias)

    def _contraction(self) -> nn.Module:
        return nn.Conv1d(self.d_ff, self.d_model, self.kernel_size, bias=self.bias)

    def forward(self, x: Tensor, keep: Tensor | None = None, history: list[Tensor] | None = None) -> Tensor:
        """x [B, T, D] convolved; `keep` [B, T, 1] is False at padding; `history` the last inputs of both convolutions.

        `history` starts as an empty list and is filled here; incremental decoding passes it from step to step.
        """
        hidden = self._convolve(self.expand, x, keep, history, 0)
        return self._convolve(self.contract, self.dropout(self.activate(hidden)), keep, history, 1)

    def _convolve(
        self, layer: nn.Module, x: Tensor, keep: Tensor | None, history: list[Tensor] | None, place: int
    ) -> Tensor:
        if keep is not None:
            x = x * keep.to(x.dtype)
        reach = self.kernel_size - 1
        if history is None:
            before = reach if self.causal else reach // 2
            x = F.pad(x, (0, 0, before, reach - before))
        else:
            if len(history) == place:
                history.append(x.new_zeros(x.shape[0], reach, x.shape[2]))
            x = torch.cat([history[place], x], dim=1)
            history[place] = x[:, x.shape[1] - reach :]
        return layer(x.transpose(1, 2)).transpose(1, 2)


FEED_FORWARDS: dict[str, type[FeedForward]] = {"plain": FeedForward, "gated": GatedFeedForward, "conv": ConvFeedForward}
