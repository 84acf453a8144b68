"""Label-smoothed cross-entropy of a linear output layer, without ever holding all logits (paper 5.4)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22  # logits held at once: 4M, so that they stay in a CPU's caches
_CHUNK_ELEMENTS_GPU = 1 << 28
_UNDERFLOW = 1e-30  # below this a float32 probability loses digits, and then all of them


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of -(1 - s) log p(gold) - s/V sum_v log p(v), with its gradient made in the forward pass.

    The gradient of the logits is p - (1 - s) onehot - s/V. The constant s/V is applied as a rank-one product, so that
    the logits are passed over twice only: softmax, and rounding to the type of the products.
    """

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, dtype: torch.dtype, wanted: bool
    ):  # type: ignore[no-untyped-def]
        n, (vocab, _) = hidden.shape[0], weight.shape
        h, w = hidden.to(dtype), weight.to(dtype)
        rows = max(1, (_CHUNK_ELEMENTS_GPU if hidden.is_cuda else _CHUNK_ELEMENTS) // vocab)
        n_chunks = max(1, -(-n // rows))
        grad_h = torch.empty_like(hidden, dtype=torch.float32) if wanted else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        nll, mean_log_p = (torch.zeros((), dtype=torch.float32, device=hidden.device) for _ in range(2))
        w_sum = weight.float().sum(0)
        for part in torch.arange(n, device="cpu").tensor_split(n_chunks) if n else ():
            cut = slice(int(part[0]), int(part[-1]) + 1)
            gold = targets[cut, None]
            logits = h[cut] @ w.t()  # [rows, V]
            gold_logit = logits.gather(1, gold).float()
            p = torch.softmax(logits, -1, dtype=torch.float32)
            p_gold = p.gather(1, gold)
            log_z = gold_logit - p_gold.log()
            if hidden.is_cuda or bool(p_gold.min() < _UNDERFLOW):  # a GPU would wait for the answer
                of_largest = logits.amax(-1, keepdim=True).float() - p.amax(-1, keepdim=True).log()
                log_z = torch.where(p_gold < _UNDERFLOW, of_largest, log_z)
            nll += (log_z - gold_logit).sum()
            if smoothing:
                mean_log_p += ((h[cut].float() @ w_sum) / vocab - log_z[:, 0]).sum()
            if grad_h is not None and grad_w is not None:
                p.scatter_add_(1, gold, p.new_full((1, 1), smoothing - 1).expand_as(gold))
                p = p.to(dtype)
                grad_h[cut] = p @ w
                grad_w += p.t() @ h[cut]
        if grad_h is not None and grad_w is not None and smoothing:
            grad_h -= w_sum * (smoothing / vocab)
            grad_w -= h.float().sum(0) * (smoothing / vocab)
        ctx.save_for_backward(grad_h, grad_w)
        loss = (1 - smoothing) * nll - smoothing * mean_log_p
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _grad_nll: Tensor):  # type: ignore[no-untyped-def]
        grad_h, grad_w = ctx.saved_tensors
        return grad_h * grad_loss, grad_w * grad_loss, None, None, None, None


def label_smoothed_loss(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "B T"],
    *,
    smoothing: float = 0.1,
    pad: int = 0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """(sum of smoothed losses, sum of -log p(gold), number of targets), in nats, padding left out (paper 5.4).

    The target distribution is (1 - smoothing) on the gold token plus smoothing / V on every token of the vocabulary.
    Only the first sum carries a gradient. Products are of the autocast type where one is on.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    rows = (targets.flatten() != pad).nonzero()[:, 0]
    with torch.autocast(device, enabled=False):
        kept = hidden.flatten(0, 1).index_select(0, rows)
        gold = targets.flatten().index_select(0, rows)
        wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        loss, nll = _LinearCrossEntropy.apply(kept, weight, gold, smoothing, dtype, wanted)
    return loss, nll, torch.tensor(rows.shape[0], device=hidden.device)
