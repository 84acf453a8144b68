"""Rotary positions (Su et al. 2021): queries and keys are rotated, so that scores depend on distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from transduce.nn.positions.scheme import Positions, Rotate


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of the last axis of x [..., T, K] as K/2 planes, by angles [T, K/2] (section 3.4)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class RotaryPositions(Positions):
    """Plane i of position p is rotated by p * 10000^(-2i/K)."""

    @classmethod
    def problem(cls, *, d_head: int) -> str | None:
        """An odd width has no planes."""
        return f"rotary positions need an even head width, not {d_head}" if d_head % 2 else None

    def rotation(self, positions: Tensor) -> Rotate:
        """Compute the angles once for all layers."""
        plane = torch.arange(0, self.d_head, 2, dtype=torch.float32, device=positions.device)
        angle = positions.to(torch.float32)[:, None] * torch.exp(plane * (-math.log(10000.0) / self.d_head))
        cos, sin = angle.cos(), angle.sin()
        return lambda x: rotate_pairs(x, cos, sin)
