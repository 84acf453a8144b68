"""Losses: label-smoothed cross-entropy without ever holding all logits (paper 5.4), and the training objectives.

A criterion calls the model and returns (loss, -log p of the targets, carry); only the loss has a gradient. The loss and
-log p are sums in nats over the batch's targets. Divided by the number of targets, they do not depend on the division
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from transduce.config.architectures import TransformerSettings
from transduce.config.settings import RDropSettings, SimCutSettings
from transduce.nn.embedding import piece_vectors
from transduce.nn.loss import consistency_loss
from transduce.nn.recording import recorded_heads
from transduce.nn.state import Carry

_UNDERFLOW = 1e-30  # below this, a float32 probability loses precision, and then becomes 0


PRECISIONS: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Context manager in which matrix products have `precision`, a key of PRECISIONS; weights stay float32."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


@runtime_checkable
class Criterion(Protocol):
    """The signature of a criterion, which computes the loss of a batch."""

    def __call__(self, model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
        """Return (sum of losses, sum of -log p, carry after the batch); sums are over the batch's targets, in nats."""


def predict_tokens(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
    """Criterion of translation and language modelling, with one target token for each hidden state."""
    return *_token_loss(model(*batch.inputs), model, batch.targets, smoothing), ()


def predict_tokens_with_carry(
    model: Any, batch: Any, *, smoothing: float, carry: Carry = (), memory_length: int | None = None
) -> tuple[Tensor, Tensor, Carry]:
    """Criterion like `predict_tokens` for a model whose `forward(*inputs, carry=carry)` returns (hidden, carry).

    `memory_length`: memory length of a Transformer-XL, in tokens (default: the model's setting).
    """
    options = {} if memory_length is None else {"memory_length": memory_length}
    hidden, carry = model(*batch.inputs, carry=carry, **options)
    return *_token_loss(hidden, model, batch.targets, smoothing), tuple(part.detach() for part in carry)


def predict_tokens_and_links(settings: TransformerSettings, *, weight: float) -> Criterion:
    """Make the criterion of guided alignment, which also trains a head of cross-attention (Garg et al. 2019, 3.2).

    The head is `settings.guided_head`. The loss is the token loss plus `weight` times the `alignment_loss` between the
    head and the batch's word links; -log p is the tokens' alone. A batch without links, as in validation, has only the
    token loss.
    """

    def criterion(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
        if batch.links is None:
            return predict_tokens(model, batch, smoothing=smoothing)
        with recorded_heads(model, [settings.guided_head]) as weights:
            hidden = model(*batch.inputs)
        loss, nll = _token_loss(hidden, model, batch.targets, smoothing)
        return loss + weight * alignment_loss(weights()[:, 0], batch.links), nll, ()

    return criterion


def alignment_loss(weights: Float[Tensor, "B T S"], links: Int[Tensor, "L 3"]) -> Float[Tensor, ""]:
    """Return the cross-entropy between word links and attention, summed over target positions with links, in nats.

    The links of a target position have equal probabilities (Garg et al. 2019, equation 5).

    Args:
        weights: Attention weights of one head; rows sum to 1.
        links: Row of the batch, target position and source position of each link.
    """
    row, tgt, src = links.unbind(1)
    positions = row * weights.shape[1] + tgt
    counts = torch.zeros(weights.shape[:2].numel(), device=weights.device).index_add_(
        0, positions, torch.ones_like(positions, dtype=torch.float32)
    )
    log_p = weights[row, tgt, src].clamp_min(_UNDERFLOW).log()
    return -(log_p / counts[positions]).sum()


@dataclass(frozen=True, slots=True)
class PredictConsistently:
    """Criterion of SimCut and R-Drop, which also compares the predictions of two passes (`consistency_loss`).

    Both passes are one call of the model on a batch that contains every row twice. Dropout differs between the copies;
    SimCut also replaces some vectors of pieces by zeros in the second copy.
    """

    settings: SimCutSettings | RDropSettings

    def __call__(self, model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
        is_simcut = isinstance(self.settings, SimCutSettings)
        with _cutting_second_half(model, self.settings.cut) if is_simcut else nullcontext():
            first, second = model(*(torch.cat([rows, rows]) for rows in batch.inputs)).chunk(2)
        loss, nll = consistency_loss(
            first,
            second,
            batch.targets,
            logits=model.logits,
            vocab_size=model.output_embedding.num_embeddings,
            strength=self.settings.weight if is_simcut else self.settings.weight / 2,
            symmetric=not is_simcut,
            smoothing=smoothing,
        )
        return loss, nll, ()


@contextmanager
def _cutting_second_half(model: nn.Module, p: float) -> Iterator[None]:
    """Zero a fraction `p` of the vectors of pieces in the second half of a batch's rows, inside the `with` block."""

    def cut(_: nn.Module, __: Any, vectors: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        first, second = vectors.chunk(2)
        keep = torch.rand(second.shape[:2], device=second.device) >= p
        return torch.cat([first, second * keep[:, :, None]])

    hooks = [module.register_forward_hook(cut) for module in piece_vectors(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def predict_masked_tokens(
    model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """Criterion of masked models: masked tokens and, for pairs, whether text B followed A (Devlin et al. 2019, 3.1).

    The loss of a pair is scaled, so that the mean over pairs is added to the mean over tokens. -log p is the tokens'.
    """
    hidden, follows = model(*batch.inputs)
    loss, nll = _token_loss(hidden[None], model, batch.targets[None], smoothing)
    if follows is not None:
        loss = loss + F.cross_entropy(follows.float(), batch.labels, reduction="sum") * batch.targets_per_pair
    return loss, nll, ()


def predict_labels(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
    """Criterion of classification, with one label for each text."""
    logits = model(*batch.inputs).float()
    loss = F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing)
    return loss, F.cross_entropy(logits.detach(), batch.targets, reduction="sum"), ()


def _token_loss(hidden: Tensor, model: Any, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    return model.output_embedding.loss(hidden, targets, bias=model.output_bias, smoothing=smoothing)[:2]
