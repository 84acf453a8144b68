"""T5's relative positions (Raffel et al. 2020, section 2.1): a learned bias per head and bucket of distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from transduce.nn.positions.scheme import Positions

N_BUCKETS = 32
MAX_DISTANCE = 128


def buckets(queries: Tensor, keys: Tensor, *, causal: bool) -> Tensor:
    """The bucket of each distance, [Q, S].

    Small distances have a bucket each; larger ones share buckets whose width grows logarithmically, up to MAX_DISTANCE,
    beyond which there is one. Without `causal`, keys before and after a query have half of the buckets each.
    """
    distance = queries[:, None] - keys[None, :]
    n_buckets, first = (N_BUCKETS, 0) if causal else (N_BUCKETS // 2, (distance < 0) * (N_BUCKETS // 2))
    distance = distance.clamp(min=0) if causal else distance.abs()
    n_exact = n_buckets // 2
    scale = (n_buckets - n_exact) / math.log(MAX_DISTANCE / n_exact)
    far = n_exact + (torch.log(distance.clamp(min=1).float() / n_exact) * scale).long()
    return first + torch.where(distance < n_exact, distance, far.clamp(max=n_buckets - 1))


class T5Positions(Positions):
    """One table [buckets, heads], shared by all layers of the stack."""

    def setup(self) -> None:
        """Create the table."""
        self.bias = nn.Embedding(N_BUCKETS, self.n_heads)

    def score_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, Q, S]."""
        return self.bias(buckets(queries, keys, causal=self.causal)).permute(2, 0, 1)
