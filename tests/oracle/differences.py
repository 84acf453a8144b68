"""Gradients compared with finite differences, and random inputs for them."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

STEP = 1e-6


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape))


def assert_gradients(
    weights: Iterable[tuple[str, Tensor]], value: Callable[[str, Tensor], float], *, rel: float, abs: float
) -> None:
    """Along a random direction of each tensor, `value` must rise as the gradient says.

    `value` takes the name of a tensor and what replaces it.
    """
    generator = torch.Generator().manual_seed(3)
    for name, weight in weights:
        along = STEP * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        rise = (value(name, weight.detach() + along) - value(name, weight.detach() - along)) / 2
        ours = 0.0 if weight.grad is None else (weight.grad * along).sum().item()
        assert ours / STEP == pytest.approx(rise / STEP, rel=rel, abs=abs), name
