"""Losses: label-smoothed cross-entropy without ever holding all logits (paper 5.4), and the training objectives.

A criterion calls the model and returns (loss, -log p of the targets, carry); only the first carries a
gradient. Both are sums in nats over the batch's targets: divided by the number of targets they mean the same however a
batch was split.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from transduce.config.architectures import TransformerSettings
from transduce.native import kernels, operators
from transduce.nn.recording import recorded_heads
from transduce.nn.state import Carry

_CHUNK_ROWS = 256  # rows of logits computed at once on a CPU: the measured optimum for vocabularies of 2,000 to 32,000
_CHUNK_ELEMENTS = 1 << 24  # at most so many logits at once on a CPU
_CHUNK_ELEMENTS_GPU = 1 << 28
_ROW_MULTIPLE = 64  # see `_select_rows`
_UNDERFLOW = 1e-30  # below this a float32 probability loses digits, and then all of them


def _log_normalizer(logits: Tensor, p: Tensor, gold: Tensor) -> Tensor:
    """Log sum_v exp(logit_v) of each row [rows, 1], from its softmax p, without another pass over the vocabulary."""
    p_gold = p.gather(1, gold)
    log_z = logits.gather(1, gold).float() - p_gold.log()
    if not logits.is_cuda and not bool(p_gold.min() < _UNDERFLOW):  # a GPU would have to wait for the answer
        return log_z
    of_largest = logits.amax(-1, keepdim=True).float() - p.amax(-1, keepdim=True).log()
    return torch.where(p_gold < _UNDERFLOW, of_largest, log_z)


def _rows_per_chunk(n: int, vocab: int, *, on_gpu: bool) -> int:
    """Rows whose logits are computed together."""
    if not on_gpu:
        return max(1, min(_CHUNK_ROWS, _CHUNK_ELEMENTS // vocab))
    return max(1, -(-n // max(1, -(-n * vocab // _CHUNK_ELEMENTS_GPU))))


def _select_rows(gold: Tensor, pad: int, *, multiple: int) -> tuple[Tensor, Tensor]:
    """The rows that have a target, and their targets, filled up with padded rows to a multiple of `multiple`.

    oneDNN compiles a bfloat16 product for each shape, which takes longer than a small product. Rounded row counts
    recur from batch to batch, so that few kernels serve all of them.
    """
    kept = (gold != pad).nonzero()[:, 0]
    targets = gold.index_select(0, kept)
    extra = -len(kept) % multiple
    return F.pad(kept, (0, extra)), F.pad(targets, (0, extra), value=pad)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over rows of c (-(1 - s) log p(gold) - s/V sum_v log p(v)), with its gradient made in the forward pass.

    c is 1 for a row that counts and 0 for padding. The gradient of the logits is c (p - (1 - s) onehot - s/V). The
    constant s/V is applied as a rank-one product, so that the logits are passed over twice only: softmax, and rounding
    to the type of the products.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, counted, smoothing, dtype, wanted):  # type: ignore[no-untyped-def]
        n, vocab = hidden.shape[0], weight.shape[0]
        h, w = hidden.to(dtype), weight.to(dtype)
        rows = _rows_per_chunk(n, vocab, on_gpu=hidden.is_cuda)
        nll, mean_log_p = torch.zeros(2, dtype=torch.float32, device=hidden.device).unbind()
        grad_h = torch.empty_like(hidden, dtype=torch.float32) if wanted else None
        grad_w = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        grad_b = torch.zeros_like(bias, dtype=torch.float32) if wanted and bias is not None else None
        w_sum = weight.float().sum(0)
        b_sum = 0.0 if bias is None else bias.float().sum()
        for start in range(0, n, rows):
            cut = slice(start, start + rows)
            gold, c = targets[cut, None], counted[cut, None]
            logits = h[cut] @ w.t()  # [rows, V]
            if bias is not None:
                logits += bias.to(dtype)
            p = logits.float().softmax(-1)  # on a CPU five times faster than softmax(dtype=torch.float32)
            log_z = _log_normalizer(logits, p, gold)
            nll += ((log_z - logits.gather(1, gold).float()) * c).sum()
            if smoothing:
                mean_log_p += (((h[cut].float() @ w_sum + b_sum)[:, None] / vocab - log_z) * c).sum()
            if grad_h is not None and grad_w is not None:
                p.scatter_add_(1, gold, p.new_full((1, 1), smoothing - 1).expand_as(gold))
                if grad_b is not None:
                    grad_b += counted[cut] @ p
                p = p.to(dtype)
                grad_h[cut] = p @ w
                grad_w += p.t() @ (h[cut] * c.to(dtype))
        if grad_h is not None and grad_w is not None:
            if smoothing:
                grad_h -= w_sum * (smoothing / vocab)
                grad_w -= (counted @ h.float()) * (smoothing / vocab)
            grad_h *= counted[:, None]
        if grad_b is not None and smoothing:
            grad_b -= counted.sum() * (smoothing / vocab)
        ctx.save_for_backward(grad_h, grad_w, grad_b)
        ctx.mark_non_differentiable(nll)
        return (1 - smoothing) * nll - smoothing * mean_log_p, nll

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):  # type: ignore[no-untyped-def]
        grad_h, grad_w, grad_b = ctx.saved_tensors
        grad_b = None if grad_b is None else grad_b * grad_loss
        return grad_h * grad_loss, grad_w * grad_loss, grad_b, None, None, None, None, None


def label_smoothed_loss(
    hidden: Float[Tensor, "B T D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "B T"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    smoothing: float = 0.1,
    pad: int = 0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, ""]]:
    """(sum of smoothed losses, sum of -log p(gold), number of targets), in nats, padding left out (paper 5.4).

    The target distribution is (1 - smoothing) on the gold token plus smoothing / V on every token of the vocabulary.
    `bias` is added to the logits. Only the first sum carries a gradient. Products are of the autocast type where one
    is on.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    rows, gold = hidden.flatten(0, 1), targets.flatten()
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    if device == "cpu" and dtype == kernels.dtype_in_use():
        loss, nll = operators.LinearCrossEntropy.apply(rows.float(), weight, bias, gold, pad, smoothing, dtype, wanted)
        return loss, nll, (gold != pad).sum()
    if kernels.on_gpu(rows):
        from transduce.native.triton_loss import GpuLinearCrossEntropy

        with torch.autocast(device, enabled=False):
            loss, nll = GpuLinearCrossEntropy.apply(rows, weight, bias, gold, pad, smoothing, dtype, wanted)
        return loss, nll, (gold != pad).sum()
    if device == "cpu":  # leave padding out; a GPU would have to wait to learn how many rows stay
        kept, gold = _select_rows(gold, pad, multiple=1 if dtype == torch.float32 else _ROW_MULTIPLE)
        rows = rows.index_select(0, kept)
    counted = (gold != pad).float()
    with torch.autocast(device, enabled=False):
        loss, nll = _LinearCrossEntropy.apply(rows, weight, bias, gold, counted, smoothing, dtype, wanted)
    return loss, nll, counted.sum().long()


@runtime_checkable
class Criterion(Protocol):
    """The signature of all criteria."""

    def __call__(self, model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
        """(sum of losses, sum of -log p, carry after the batch) over the batch's targets."""


def predict_tokens(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
    """One target for each hidden state: translation, language modelling."""
    return *_token_loss(model(*batch.inputs), model, batch.targets, smoothing), ()


def predict_tokens_with_carry(
    model: Any, batch: Any, *, smoothing: float, carry: Carry = (), memory_length: int | None = None
) -> tuple[Tensor, Tensor, Carry]:
    """The same for models whose `forward(*inputs, carry=carry)` returns (hidden, carry).

    `memory_length`: of a Transformer-XL, instead of the model's setting.
    """
    options = {} if memory_length is None else {"memory_length": memory_length}
    hidden, carry = model(*batch.inputs, carry=carry, **options)
    return *_token_loss(hidden, model, batch.targets, smoothing), tuple(part.detach() for part in carry)


def predict_tokens_and_links(settings: TransformerSettings, *, weight: float) -> Criterion:
    """Guided alignment: the tokens, and for one head of cross-attention the links (Garg et al. 2019, section 3.2).

    The head is `settings.guided_head`. Its loss, `alignment_loss` times `weight`, is added to that of the
    tokens; -log p is that of the tokens alone. Batches without links, as in validation, have the tokens' loss only.
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
    """Sum over linked target positions of the cross-entropy between the attention and its links, in nats.

    A position's links have equal probabilities; positions without links count nothing (Garg et al. 2019, equation 5).

    Args:
        weights: Attention of one head; rows sum to 1.
        links: Row of the batch, target position and source position of each link.
    """
    row, tgt, src = links.unbind(1)
    places = row * weights.shape[1] + tgt
    counts = torch.zeros(weights.shape[:2].numel(), device=weights.device).index_add_(
        0, places, torch.ones_like(places, dtype=torch.float32)
    )
    log_p = weights[row, tgt, src].clamp_min(_UNDERFLOW).log()
    return -(log_p / counts[places]).sum()


def predict_masked_tokens(
    model: Any, batch: Any, *, smoothing: float, carry: Carry = ()
) -> tuple[Tensor, Tensor, Carry]:
    """The masked tokens and, for sentence pairs, whether B followed A (Devlin et al. 2019, 3.1).

    The second loss is the mean over the update's pairs, as the first is over its tokens; -log p is that of the tokens.
    """
    hidden, follows = model(*batch.inputs)
    loss, nll = _token_loss(hidden[None], model, batch.targets[None], smoothing)
    if follows is not None:
        loss = loss + F.cross_entropy(follows.float(), batch.labels, reduction="sum") * batch.targets_per_pair
    return loss, nll, ()


def predict_labels(model: Any, batch: Any, *, smoothing: float, carry: Carry = ()) -> tuple[Tensor, Tensor, Carry]:
    """One label for each text."""
    logits = model(*batch.inputs).float()
    loss = F.cross_entropy(logits, batch.targets, reduction="sum", label_smoothing=smoothing)
    return loss, F.cross_entropy(logits.detach(), batch.targets, reduction="sum"), ()


def _token_loss(hidden: Tensor, model: Any, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    weight, bias = model.output_weight, model.output_bias
    return label_smoothed_loss(hidden, weight, targets, bias=bias, smoothing=smoothing)[:2]
