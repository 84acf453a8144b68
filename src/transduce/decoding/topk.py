"""The best continuations of live hypotheses, found without sorting the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

_CHUNK = 64  # columns that the first stage represents by their maximum
_ROWS = 64  # of logits in memory at once on a CPU


def best_continuations(
    logits: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N D"],
    log_prob: Float[Tensor, "B k"],
    n: int,
    *,
    banned: Sequence[int] = (),
) -> tuple[Float[Tensor, "B n"], Int[Tensor, "B n"], Int[Tensor, "B n"]]:
    """The n best of log_prob[b, i] + log_softmax(logits(hidden[b * k + i])) of every sentence b, best first.

    Returns the sums, the beams i and the tokens, [B, n] each; n is at most the number of continuations of one beam.
    Tokens that are `banned` are never chosen, though their probability counts. Log-probabilities are float32.
    On a CPU some rows at a time go from hidden states to the best, so that their logits never leave its cache.
    """
    n_sentences, beam = log_prob.shape
    at_once = n_sentences if hidden.is_cuda else max(1, _ROWS // beam)
    ban = torch.tensor(banned, device=hidden.device)
    parts = []
    for part_hidden, part in zip(hidden.split(at_once * beam), log_prob.split(at_once), strict=True):
        known = logits(part_hidden).float().log_softmax(-1).index_fill_(1, ban, -math.inf)
        search = _at_once if known.shape[1] < 4 * _CHUNK or n > known.shape[1] // _CHUNK else _in_two_stages
        parts.append(search(known, part, n))
    if len(parts) == 1:
        return parts[0]
    values, parents, tokens = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return values, parents, tokens


def _at_once(known: Tensor, log_prob: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens = known.shape[1]
    values, place = (known.view(*log_prob.shape, n_tokens) + log_prob[:, :, None]).flatten(1).topk(n)
    return values, place // n_tokens, place % n_tokens


def _in_two_stages(known: Tensor, log_prob: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n best are in the n chunks with the highest maxima: select these, then the best in them."""
    n_sentences, beam = log_prob.shape
    n_tokens = known.shape[1]
    n_full = n_tokens // _CHUNK
    maxima = known[:, : n_full * _CHUNK].unflatten(1, (n_full, _CHUNK)).amax(-1)  # [N, chunks]
    if n_full * _CHUNK < n_tokens:
        maxima = torch.cat([maxima, known[:, n_full * _CHUNK :].amax(-1, keepdim=True)], dim=1)
    n_chunks = maxima.shape[1]
    chunk = (maxima.view(n_sentences, beam, n_chunks) + log_prob[:, :, None]).flatten(1).topk(n, sorted=False).indices
    parent, first = chunk // n_chunks, chunk % n_chunks * _CHUNK  # [B, n]
    token = first[:, :, None] + torch.arange(_CHUNK, device=known.device)  # [B, n, _CHUNK]
    row = parent + torch.arange(n_sentences, device=known.device)[:, None] * beam
    inside = token < n_tokens
    values = known.take(row[:, :, None] * n_tokens + token.clamp_max(n_tokens - 1))
    values = (values + log_prob.gather(1, parent)[:, :, None]).masked_fill_(~inside, -math.inf)
    values, place = values.flatten(1).topk(n)
    return values, parent.gather(1, place // _CHUNK), token.flatten(1).gather(1, place)
