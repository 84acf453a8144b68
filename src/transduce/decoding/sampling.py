"""Sampling (ancestral, with temperature, top-k and top-p) with translators and language models.

Each sample has its own generator and draws one number per token, so that it does not depend on the rest of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import (
    Beginning,
    Constraints,
    constrain,
    constraints_on,
    pad_copies,
    without_unscored,
)
from transduce.decoding.engine import Hypothesis, IsWanted, sample_numbers
from transduce.decoding.search import Stepper
from transduce.nn.masks import SourceInput
from transduce.text.special import BOS, EOS, PAD

_LOWEST = 1e-30  # lower temperatures count as 0: the division would overflow


def filter_logits(logits: Float[Tensor, "*B V"], options: DecodingOptions) -> Float[Tensor, "*B V"]:
    """Apply temperature, top-k and top-p to logits; excluded tokens become -inf."""
    if options.temperature < _LOWEST:
        return _keep_top_k(logits, 1)
    sharpened = logits if options.temperature == 1 else logits / options.temperature
    return _keep_top_p(_keep_top_k(sharpened, options.top_k), options.top_p)


def _keep_top_k(logits: Float[Tensor, "*B V"], k: int) -> Float[Tensor, "*B V"]:
    """Keep the k largest logits of each row, and all equal to the k-th (Fan et al. 2018); 0 keeps all."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def _keep_top_p(logits: Float[Tensor, "*B V"], p: float) -> Float[Tensor, "*B V"]:
    """Keep the fewest most probable tokens of each row that sum to at least p (Holtzman et al. 2020)."""
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    is_excluded = probability.cumsum(-1) - probability >= p  # sum of the probabilities of all more probable tokens
    is_excluded[..., 0] = False
    return logits.masked_fill(is_excluded.scatter(-1, order, is_excluded), -math.inf)


def draw(probability: Float[Tensor, "N V"], number: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Draw tokens by random numbers in [0, 1): the first token at which the cumulative probability exceeds the number.

    A token of probability 0 is never drawn.
    """
    total = probability.double().cumsum(-1)
    token = torch.searchsorted(total, number.double()[:, None] * total[:, -1:], right=True)[:, 0]
    last = probability.shape[-1] - 1 - (probability > 0).flip(-1).int().argmax(-1)  # rounding may pass the end
    return torch.minimum(token, last)


@torch.inference_mode()
def sample(
    model: Stepper,
    src: SourceInput,
    options: DecodingOptions,
    *,
    max_length: int | Sequence[int],
    keys: Sequence[tuple[int, ...]],
    prompts: Int[Tensor, "B T"] | None = None,
    beginnings: Sequence[Beginning] = (),
    copies: Sequence[Sequence[int] | None] | None = None,
    is_wanted: IsWanted | None = None,
) -> list[list[Hypothesis]]:
    """Draw `options.n_best` outputs of every sentence; they stay in the order drawn.

    Log-probabilities are the model's, before temperature, top-k and top-p; the score is log_prob / length.

    `keys`: a key for each sentence; random numbers are a function of the seed and the key. `prompts`: the tokens that
    the outputs continue (default: BOS); `src` has all of them but the last. For the other arguments see `beam_search`.
    """
    limits = torch.as_tensor(max_length, device=src.device).expand(len(src))
    numbers = torch.from_numpy(_numbers(keys, options, int(limits.max()))).to(src.device)  # [B, n, C]
    prompts = torch.full((len(src), 1), BOS, device=src.device) if prompts is None else prompts
    wanted = pad_copies(copies, src)
    n_samples, capacity = numbers.shape[1:]
    results: list[list[Hypothesis]] = [[] for _ in src]
    number, n_before = torch.arange(len(src), device=src.device), prompts.shape[1]
    ids = F.pad(prompts[:, None].repeat(1, n_samples, 1), (0, capacity), value=PAD)
    token = ids[:, :, n_before - 1]
    log_prob = torch.zeros(len(src), n_samples, dtype=torch.float64, device=src.device)
    n_ids, ended = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
    state = model.start(src, capacity=capacity, n_beams=n_samples)
    for length in range(capacity):
        known = ids[:, :, : n_before + length]
        constraints = constraints_on(
            known, beginnings, wanted, no_repeat_ngram=options.no_repeat_ngram, n_prompt=n_before
        )
        logits = model.logits(model.advance(token.view(-1, 1), state)[:, -1]).float()
        token, new = _draw_tokens(logits, constraints, options, numbers[:, :, length])
        log_prob += without_unscored(new.masked_fill(ended, 0.0), beginnings, length)
        ended |= token == EOS
        ids[:, :, n_before + length] = token.masked_fill(ended, PAD)
        n_ids += ~ended
        is_done = ended.all(1) | (limits <= length + 1)
        if is_done.any():
            rows = (x[is_done].tolist() for x in (number, ids[:, :, n_before:], log_prob, n_ids, ended))
            for index, *samples in zip(*rows, strict=True):
                results[index] = [_hypothesis(*columns) for columns in zip(*samples, strict=True)]
            stay = (~is_done).nonzero().squeeze(1)
            if not len(stay):
                break
            state.select(stay)
            number, ids, log_prob, n_ids, ended, token, numbers, limits, wanted = (
                x.index_select(0, stay) for x in (number, ids, log_prob, n_ids, ended, token, numbers, limits, wanted)
            )
            beginnings = [beginnings[index] for index in stay.tolist()] if beginnings else ()
        if is_wanted is not None and not any(map(is_wanted, number.tolist())):
            break
    return results


def _draw_tokens(
    logits: Float[Tensor, "N V"], constraints: Constraints, options: DecodingOptions, numbers: Float[Tensor, "B n"]
) -> tuple[Int[Tensor, "B n"], Float[Tensor, "B n"]]:
    """Draw the next token of each sample; return the tokens, and their log-probabilities before all constraints."""
    log_probs = logits.log_softmax(-1)
    allowed = filter_logits(constrain(logits, constraints), options)
    token = draw(allowed.softmax(-1), numbers.flatten())
    return token.view_as(numbers), log_probs.gather(1, token[:, None]).view_as(numbers)


def _numbers(keys: Sequence[tuple[int, ...]], options: DecodingOptions, length: int) -> np.ndarray:
    """Return random numbers in [0, 1) for every token: a function of the seed, the key and the sample's index."""
    samples = range(options.n_best)
    return np.array([[sample_numbers((options.seed, *key), i, length) for i in samples] for key in keys])


def _hypothesis(ids: list[int], log_prob: float, n_ids: int, ended: bool) -> Hypothesis:
    return Hypothesis(ids=tuple(ids[:n_ids]), log_prob=log_prob, score=log_prob / (n_ids + ended), finished=ended)
