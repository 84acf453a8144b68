"""Data types in mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with x: autocast's dtype if it is enabled, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(x: Tensor) -> Tensor:
    """Convert x to float32, unless its type is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
