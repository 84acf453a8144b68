"""ALiBi (Press et al. 2022): scores fall linearly with the distance; there is nothing to learn."""

from __future__ import annotations

import torch
from torch import Tensor

from transduce.nn.positions.scheme import Positions


def slopes(n_heads: int) -> list[float]:
    """The slope of each head: a geometric sequence from 2^(-8/n) to 2^-8.

    For a number that is no power of two: the slopes of the next lower power, then every other one of the next higher.
    """
    lower = 1 << (n_heads.bit_length() - 1)
    between = range(0, 2 * (n_heads - lower), 2)
    return [2 ** (-8 * (i + 1) / lower) for i in range(lower)] + [2 ** (-4 * (i + 1) / lower) for i in between]


class AlibiPositions(Positions):
    """The bias of head h is -slope_h * |distance|, in an encoder in both directions."""

    def setup(self) -> None:
        """Compute the slopes."""
        self.register_buffer("slopes", torch.tensor(slopes(self.n_heads)), persistent=False)
        self.slopes: Tensor

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, Q, S], float32."""
        distance = (queries[:, None] - keys[None, :]).abs()
        return self.slopes[:, None, None] * -distance.to(torch.float32)
