"""Log-probabilities of given outputs (teacher forcing)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.text.tokenizer import PAD

_ROWS = 1024  # of logits in memory at once


@runtime_checkable
class Scorer(Protocol):
    """What scoring needs of a model."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Hidden states [B, T, D]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D]."""


def token_log_probs(model: Scorer, inputs: tuple[Tensor, ...], tgt_out: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Nats log p(tgt_out[t] | what the model sees of `inputs` at t), float32; 0 at padding."""
    with torch.inference_mode():
        hidden = model(*inputs)
        real = (tgt_out != PAD).flatten().nonzero().squeeze(1)
        hidden, gold = hidden.flatten(0, 1).index_select(0, real), tgt_out.flatten().index_select(0, real)
        scored = torch.zeros(tgt_out.numel(), device=hidden.device)
        for rows in torch.arange(len(real), device=real.device).split(_ROWS):
            known = model.logits(hidden[rows]).float().log_softmax(-1)
            scored[real[rows]] = known.gather(1, gold[rows, None]).squeeze(1)
        return scored.view_as(tgt_out)
