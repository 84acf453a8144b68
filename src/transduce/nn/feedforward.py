"""Position-wise feed-forward networks: FFN(x) = max(0, x W1 + b1) W2 + b2 (paper 3.3) and its successors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class FeedForward(nn.Module):
    """The paper's feed-forward network, applied to each position: expand to d_ff, activate, contract.

    Subclasses take the same arguments. Only `ConvFeedForward` uses `kernel_size` and `causal`.
    """

    convolves: ClassVar[bool] = False
    n_packed: ClassVar[int] = 1
    """Number of matrices with d_ff rows that the weight of `expand` packs."""

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
        self.d_ff, self.kernel_size, self.causal = d_ff, kernel_size, causal
        self.expand = self._layer(d_model, self.n_packed * d_ff, bias=bias)
        self.contract = self._layer(d_ff, d_model, bias=bias)
        self.activation, self.activate = activation, ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def _layer(self, n_inputs: int, n_outputs: int, *, bias: bool) -> nn.Module:
        return nn.Linear(n_inputs, n_outputs, bias=bias)

    def forward(
        self, x: Float[Tensor, "B T D"], keep: Tensor | None = None, history: list[Tensor] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Transform each position of x. `keep` and `history` are arguments of `ConvFeedForward`, not used here."""
        return self.contract(self.dropout(self.activate(self.expand(x))))


class GatedFeedForward(FeedForward):
    """Gated feed-forward network: (activate(x W) * x V) W2 (Shazeer 2020). W and V are packed in one weight."""

    n_packed = 2

    def forward(self, x: Tensor, keep: Tensor | None = None, history: list[Tensor] | None = None) -> Tensor:
        gate, value = self.expand(x).chunk(2, dim=-1)
        return self.contract(self.dropout(self.activate(gate) * value))


class ConvFeedForward(FeedForward):
    """Feed-forward network as two convolutions over positions (paper 3.3: "two convolutions with kernel size 1").

    With kernel size 1 it equals `FeedForward`. A wider kernel also reads neighbouring positions: on both sides in an
    encoder, only earlier positions if `causal`. Padding and positions outside the sequence count as zero.
    """

    convolves = True

    def _layer(self, n_inputs: int, n_outputs: int, *, bias: bool) -> nn.Module:
        return nn.Conv1d(n_inputs, n_outputs, self.kernel_size, bias=bias)

    def forward(self, x: Tensor, keep: Tensor | None = None, history: list[Tensor] | None = None) -> Tensor:
        """Apply both convolutions to x [B, T, D]; `keep` [B, T, 1] is False at padding.

        `history`: in incremental decoding, a list that is empty at the start and passed from step to step. It holds the
        last inputs of both convolutions and is updated in place.
        """
        hidden = self._convolve(self.expand, x, keep, history, 0)
        return self._convolve(self.contract, self.dropout(self.activate(hidden)), keep, history, 1)

    def _convolve(
        self, layer: nn.Module, x: Tensor, keep: Tensor | None, history: list[Tensor] | None, number: int
    ) -> Tensor:
        if keep is not None:
            x = x * keep.to(x.dtype)
        reach = self.kernel_size - 1
        if history is None:
            before = reach if self.causal else reach // 2
            x = F.pad(x, (0, 0, before, reach - before))
        else:
            if len(history) == number:
                history.append(x.new_zeros(x.shape[0], reach, x.shape[2]))
            x = torch.cat([history[number], x], dim=1)
            history[number] = x[:, x.shape[1] - reach :]
        return layer(x.transpose(1, 2)).transpose(1, 2)


FEED_FORWARDS: dict[str, type[FeedForward]] = {"plain": FeedForward, "gated": GatedFeedForward, "conv": ConvFeedForward}
