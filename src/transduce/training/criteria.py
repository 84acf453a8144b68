"""Training objectives: from a batch to summed losses in nats, the first of which carries the gradient.

A criterion calls the model (`forward`, which may be compiled) and returns (loss, -log p of the targets, carry). Both
sums are over the batch's targets: divided by the number of targets they mean the same however a batch was split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from transduce.training.loss import label_smoothed_loss

Carry = tuple[Tensor, ...]
"""State of a model that flows from one batch of contiguous text to the next: tensors [B, ...], one row per stream.

Examples are the hidden state of an RNN and Transformer-XL's memory. `()` is the start of a text, and the carry of
models that have none. No gradient flows through it.
"""


@runtime_checkable
class Criterion(Protocol):
    """The signature of all criteria."""

    def __call__(
        self, forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
    ) -> tuple[Tensor, Tensor, Carry]:
        """(sum of losses, sum of -log p, carry after the batch) over the batch's targets."""


def predict_tokens(
    forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """One target for each hidden state: translation, language modelling."""
    return *_token_loss(forward(*batch.inputs), model, batch, smoothing), ()


def predict_tokens_with_carry(
    forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """The same for models whose `forward(*inputs, carry=carry)` returns (hidden, carry)."""
    hidden, carry = forward(*batch.inputs, carry=carry)
    return *_token_loss(hidden, model, batch, smoothing), tuple(part.detach() for part in carry)


def predict_masked_tokens(
    forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """The masked tokens and, for sentence pairs, whether B followed A (Devlin et al. 2019, 3.1).

    The second loss is the mean over the update's pairs, as the first is over its tokens; -log p is that of the tokens.
    """
    hidden, follows = forward(*batch.inputs)
    weight, bias = model.output_weight, model.output_bias
    loss, nll, _ = label_smoothed_loss(hidden[None], weight, batch.targets[None], bias=bias, smoothing=smoothing)
    if follows is not None:
        loss = loss + F.cross_entropy(follows.float(), batch.labels, reduction="sum") * batch.targets_a_pair
    return loss, nll, ()


def predict_labels(
    forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """One label for each text."""
    logits = forward(*batch.inputs).float()
    loss = F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing)
    return loss, F.cross_entropy(logits.detach(), batch.targets, reduction="sum"), ()


def _token_loss(hidden: Tensor, model: Any, batch: Any, smoothing: float) -> tuple[Tensor, Tensor]:
    weight, bias = model.output_weight, model.output_bias
    loss, nll, _ = label_smoothed_loss(hidden, weight, batch.targets, bias=bias, smoothing=smoothing)
    return loss, nll
