"""Dropout in Triton kernels, as a function of a seed in GPU memory and the position of each element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, int64 [1], from PyTorch's generator of this GPU. It stays there: reading it would wait."""
    return torch.randint(1 << 31, (1,), device=device)


@triton.jit
def _hash(x):  # type: ignore[no-untyped-def]
    """The finalizer of MurmurHash3: each bit of x changes every bit of the result with probability 1/2."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def keep_factors(seed, part, places, p):  # type: ignore[no-untyped-def]
    """1 / (1 - p) with probability 1 - p, otherwise 0, in the shape of `places` (int32 positions within `part`)."""
    start = _hash(tl.load(seed).to(tl.uint32) + part.to(tl.uint32) * 0x9E3779B1)
    draw = _hash(places.to(tl.uint32) * 0x9E3779B1 + start) >> 8
    return tl.where(draw.to(tl.float32) >= p * (1 << 24), 1 / (1 - p), 0.0)
