"""What is made small, task by task: from a batch to sums in nats, of which the first carries the gradient.

A criterion calls the model (`forward`, which may be compiled) and returns (the loss, -log p of what is asked for), both
summed over the batch's targets; divided by their number they mean the same however a batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import functional as F

from transduce.training.loss import label_smoothed_loss


@runtime_checkable
class Criterion(Protocol):
    """The form of all of them."""

    def __call__(
        self, forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        """(sum of losses, sum of -log p) over the batch's targets."""


def tell_tokens(forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float) -> tuple[Tensor, Tensor]:
    """A target beside every hidden state: translation, language modelling."""
    hidden = forward(*batch.inputs)
    weight, bias = model.output_weight, model.output_bias
    loss, nll, _ = label_smoothed_loss(hidden, weight, batch.targets, bias=bias, smoothing=smoothing)
    return loss, nll


def tell_masked(forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float) -> tuple[Tensor, Tensor]:
    """The tokens behind masks and, where a pair is judged, whether B followed A (Devlin et al. 2019, 3.1).

    The second loss is the mean over the update's pairs, as the first is over its tokens, and -log p is the first's.
    """
    hidden, follows = forward(*batch.inputs)
    weight, bias = model.output_weight, model.output_bias
    loss, nll, _ = label_smoothed_loss(hidden[None], weight, batch.targets[None], bias=bias, smoothing=smoothing)
    if follows is not None:
        loss = loss + F.cross_entropy(follows.float(), batch.labels, reduction="sum") * batch.targets_a_pair
    return loss, nll


def tell_labels(forward: Callable[..., Any], model: Any, batch: Any, *, smoothing: float) -> tuple[Tensor, Tensor]:
    """A label for each text."""
    logits = forward(*batch.inputs).float()
    loss = F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing)
    return loss, F.cross_entropy(logits.detach(), batch.targets, reduction="sum")
