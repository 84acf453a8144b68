"""Types of numbers in mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x: autocast's, if it is enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(x: Tensor) -> Tensor:
    """x as float32, unless it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
