"""Dropout (Srivastava et al. 2014; paper section 5.4), with cheap random numbers on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.native import kernels, operators

_BITS = 15  # resolution of the drop probability


def keep_factors(like: Tensor, p: float) -> Tensor:
    """Independent factors of `like`'s shape: 0 with probability p, otherwise 1 / (1 - p), in bfloat16.

    On a CPU torch draws one float per factor, serially: a quarter of a small model's training step. Here one 64-bit
    number of torch's default generator gives four factors, compared as 15-bit integers. The factor is rounded to
    bfloat16 and the probability adjusted to it: the mean is 1 to within 2**-15, and p is met to within 0.4 %.
    """
    scale = torch.tensor(1 / (1 - p), dtype=torch.bfloat16)
    keep = round(2**_BITS / scale.item()) - 2 ** (_BITS - 1)  # keep where a number of [-2**14, 2**14) is below this
    n = like.numel()
    words = torch.empty((n + 3) // 4, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    bits = words.view(torch.int16)[:n]
    bits.bitwise_right_shift_(1).sub_(keep).bitwise_right_shift_(_BITS)  # -1 where kept, 0 where dropped
    return bits.bitwise_and_(scale.view(torch.int16)).view(torch.bfloat16).view(like.shape)


class Dropout(nn.Dropout):
    """Sets elements to zero with probability `p` in training and scales the rest by 1 / (1 - p); identity in eval."""

    @property
    def rate(self) -> float:
        """The probability that is in force: 0 in eval."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Dropped-out `x` of the same shape."""
        if not self.rate:
            return x
        if x.device.type != "cpu":  # where torch's own is faster
            return nn.functional.dropout(x, self.p)
        if kernels.drops(x):
            return operators.dropped(x, self.p)
        return x * keep_factors(x, self.p).to(x.dtype)

    def add(self, x: Tensor, update: Tensor) -> Tensor:
        """`x + dropout(update)` in one pass, with x's dtype, for residual connections."""
        if not self.rate or x.device.type != "cpu":
            return x + self(update)
        if kernels.drops(x) and kernels.drops(update):
            return operators.add_and_norm(x, update, None, self.rate)
        return torch.addcmul(x, update.to(x.dtype), keep_factors(update, self.p).to(x.dtype))
