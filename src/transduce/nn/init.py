"""Initial weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transduce.nn.attention import FullProjection


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Glorot-uniform matrices (each part of a packed projection separately), zero biases, N(0, 1/d) embeddings.

    Queries, keys and values are scaled by 1/sqrt(2), so that together they have the variance of one matrix
    [3 d_model, d_model]. Embeddings times sqrt(d_model) have unit variance (paper 3.4).
    """
    for module in model.modules():
        if isinstance(module, FullProjection):
            rows = [n * module.d_head for n in module.heads]
            for part in module.weight.split(rows):
                nn.init.xavier_uniform_(part, gain=2**-0.5 if len(rows) > 1 else 1.0)
            _zero(module.bias)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.xavier_uniform_(module.weight)
            _zero(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        nn.init.zeros_(bias)
