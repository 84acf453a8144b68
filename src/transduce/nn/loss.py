"""Label-smoothed cross-entropy (paper 5.4) for a large vocabulary, computed without holding all logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from transduce.nn.dtypes import wide
from transduce.nn.masks import PAD

_LOGITS_AT_ONCE = 1 << 22
_FEWEST_TOKENS = 1 << 10  # smallest number of tokens of the vocabulary whose logits are computed at once


def label_smoothed_loss(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "B T"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    smoothing: float = 0.1,
    linear: Callable[..., Tensor] = F.linear,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """Return (sum of smoothed losses, sum of -log p(target), number of targets), in nats, without padding (paper 5.4).

    The target distribution is (1 - smoothing) on the target plus smoothing / V on every token of the vocabulary. Logits
    are `hidden` times the transposed `weight`, plus `bias`. Only the first sum has a gradient.
    """

    def chunk_loss(rows: Tensor, gold: Tensor) -> tuple[Tensor, Tensor]:
        return _smoothed(wide(linear(rows, weight, bias)).log_softmax(-1), gold, smoothing)

    rows, gold, n_at_once = hidden.flatten(0, 1), targets.flatten(), max(1, _LOGITS_AT_ONCE // len(weight))
    if torch.is_grad_enabled() and len(rows) > n_at_once:  # the backward pass computes the logits again
        chunk_loss = partial(checkpoint, chunk_loss, use_reentrant=False, preserve_rng_state=False)
    chunks = zip(rows.split(n_at_once), gold.split(n_at_once), strict=True)
    loss, nll = torch.stack([torch.stack(chunk_loss(*chunk)) for chunk in chunks]).sum(0).unbind()
    return loss, nll.detach(), (gold != PAD).sum()


def consistency_loss(
    first: Float[Tensor, "B T D"],
    second: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T"],
    *,
    logits: Callable[[Tensor], Tensor],
    vocab_size: int,
    strength: float,
    symmetric: bool,
    smoothing: float = 0.1,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return (sum of losses, sum of -log p(target)) of two passes with different dropout, without padding, in nats.

    `first`, `second`: the hidden states of the passes, which predict distributions p and q. The loss is L(p, q) =
    smoothed loss of p + `strength` * KL(p || q) (Gao et al. 2022, equation 6) or, if `symmetric`, the mean of L(p, q)
    and L(q, p), which is half the loss of Liang et al. 2021, equation 4. `logits`: from hidden states to logits.
    """
    rows = first.flatten(0, 1), second.flatten(0, 1), targets.flatten()
    n_at_once = max(1, _LOGITS_AT_ONCE // (2 * vocab_size))
    sums = list[Tensor]()
    for *hidden, gold in zip(*(x.split(n_at_once) for x in rows), strict=True):
        p, q = map(logits, hidden)
        sides = [(p, q), (q, p)] if symmetric else [(p, q)]
        results = [torch.stack(_ConsistencyLoss.apply(*side, gold, strength, smoothing)) for side in sides]
        sums.append(torch.stack(results).mean(0))
    loss, nll = torch.stack(sums).sum(0).unbind()
    return loss, nll.detach()


class _ConsistencyLoss(torch.autograd.Function):
    """Autograd function of `consistency_loss`. Its inputs are logits; the forward pass also computes the gradients."""

    @staticmethod
    def forward(ctx, first, second, gold, strength, smoothing):  # type: ignore[no-untyped-def]
        log_p, log_q = (wide(logits).log_softmax(-1) for logits in (first, second))
        p, skipped = log_p.exp(), gold == PAD
        loss, nll = _smoothed(log_p, gold, smoothing)
        gap = log_p.sub_(log_q)
        divergence = (p * gap).sum(-1)
        grad_q = log_q.exp_().sub_(p).mul_(strength)
        # p - target + strength * p * (gap - divergence)
        grad_p = gap.add_(1 / strength - divergence[:, None]).mul_(p).mul_(strength).sub_(smoothing / p.shape[-1])
        grad_p.scatter_add_(1, gold[:, None], grad_p.new_full((len(gold), 1), smoothing - 1))
        grads = (grad.masked_fill_(skipped[:, None], 0.0).to(first.dtype) for grad in (grad_p, grad_q))
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(nll)
        return loss + strength * divergence.masked_fill(skipped, 0.0).sum(), nll

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        return *(grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors), None, None, None


def _smoothed(
    log_p: Float[Tensor, "N V"], gold: Int[Tensor, " N"], smoothing: float
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the sum of the smoothed losses and the sum of -log p(target) over all rows, without padding."""
    nll = F.nll_loss(log_p, gold, ignore_index=PAD, reduction="sum")
    if not smoothing:
        return nll, nll
    mean = -log_p.mean(-1).masked_fill(gold == PAD, 0.0).sum()
    return (1 - smoothing) * nll + smoothing * mean, nll


def frozen_label_smoothed_loss(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    new: Float[Tensor, "N D"] | None,
    targets: Int[Tensor, "B T"],
    *,
    bias: Float[Tensor, " W"] | None = None,
    smoothing: float = 0.1,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """Compute `label_smoothed_loss` for an output matrix of frozen rows `weight`, of any type, and trained rows `new`.

    `bias` is frozen. The vocabulary is processed in parts, so that memory never holds all logits or a copy of `weight`.
    """
    rows, gold = hidden.flatten(0, 1), targets.flatten()
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (rows, new))
    loss, nll = _FrozenLoss.apply(rows, weight, new, bias, gold, smoothing, wanted)
    return loss, nll, (gold != PAD).sum()


class _FrozenLoss(torch.autograd.Function):
    """Autograd function of `frozen_label_smoothed_loss`; the forward pass also computes the gradients."""

    @staticmethod
    def forward(ctx, hidden, weight, new, bias, gold, smoothing, wanted):  # type: ignore[no-untyped-def]
        kept = gold != PAD
        rows, gold = hidden[kept], gold[kept]
        n_tokens, n_old = len(weight) + (0 if new is None else len(new)), len(weight)
        at_once = max(_FEWEST_TOKENS, _LOGITS_AT_ONCE // max(1, len(rows)))
        starts = [*range(0, n_old, at_once), *([] if new is None else [n_old])]
        parts = [*weight.split(at_once), *([] if new is None else [new])]

        def logits(start: int, part: Tensor) -> Tensor:
            return wide(F.linear(rows, part.to(rows.dtype), None if bias is None else bias[start : start + len(part)]))

        def of_gold(start: int, part: Tensor) -> tuple[Tensor, Tensor]:
            inside = ((gold >= start) & (gold < start + len(part))).nonzero()[:, 0]
            return inside, gold[inside] - start

        log_z = rows.new_full((len(rows),), -torch.inf, dtype=wide(rows).dtype)
        total, target = torch.zeros_like(log_z), torch.zeros_like(log_z)
        for start, part in zip(starts, parts, strict=True):
            scores = logits(start, part)
            log_z = torch.logaddexp(log_z, scores.logsumexp(-1))
            total += scores.sum(-1)
            inside, columns = of_gold(start, part)
            target[inside] = scores[inside, columns]
        nll = (log_z - target).sum()
        loss = (1 - smoothing) * nll + smoothing * (log_z - total / n_tokens).sum()
        grad, grad_new = None, None
        if wanted:
            grad = torch.zeros_like(hidden)
            of_rows = torch.zeros_like(rows)
            for start, part in zip(starts, parts, strict=True):
                change = (logits(start, part) - log_z[:, None]).exp_().sub_(smoothing / n_tokens)
                inside, columns = of_gold(start, part)
                change[inside, columns] -= 1 - smoothing
                change = change.to(rows.dtype)
                of_rows += change @ part.to(rows.dtype)
                if part is new:
                    grad_new = (change.t() @ rows).to(new.dtype)
            grad[kept] = of_rows
        ctx.save_for_backward(grad, grad_new)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        grad, grad_new = ctx.saved_tensors
        of_new = None if grad_new is None else grad_new * grad_loss
        return grad * grad_loss, None, of_new, None, None, None, None
