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

from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import keep_tokens, pad_prefixes, repeating_tokens
from transduce.decoding.engine import Hypothesis, OnToken, sample_numbers
from transduce.decoding.search import Stepper
from transduce.nn.masks import SourceInput
from transduce.text.special import BOS, EOS, PAD

_COLD = 1e-30  # a temperature below it is 0: the division would overflow


def filter_logits(logits: Float[Tensor, "*B V"], options: DecodingOptions) -> Float[Tensor, "*B V"]:
    """The logits to draw from; excluded tokens become -inf."""
    if options.temperature < _COLD:
        return _keep_top_k(logits, 1)
    sharpened = logits if options.temperature == 1 else logits / options.temperature
    return _keep_top_p(_keep_top_k(sharpened, options.top_k), options.top_p)


def _keep_top_k(logits: Float[Tensor, "*B V"], k: int) -> Float[Tensor, "*B V"]:
    """Only the k largest of each row (Fan et al. 2018), with all that equal the k-th; 0 keeps all."""
    if k == 0 or k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -math.inf)


def _keep_top_p(logits: Float[Tensor, "*B V"], p: float) -> Float[Tensor, "*B V"]:
    """The fewest most likely tokens of each row that sum to at least p (Holtzman et al. 2020), at least one."""
    if p == 1:
        return logits
    ordered, place = logits.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # of all tokens that are more likely
    ruled_out = before >= p
    ruled_out[..., 0] = False
    return logits.masked_fill(ruled_out.scatter(-1, place, ruled_out), -math.inf)


def draw(probability: Float[Tensor, "N V"], number: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The token at which the summed probabilities pass a number of [0, 1): never one of probability 0."""
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
    prefixes: Sequence[Sequence[int]] | None = None,
    on_token: OnToken | None = None,
) -> list[list[Hypothesis]]:
    """`options.n_best` outputs of every sentence, in the order drawn.

    `keys`: one a sentence; with the seed they decide what is drawn. `max_length`: one limit or one a sentence.
    `prompts`: the tokens that the outputs continue, BOS if not given; `src` has all but the last of them, if any.
    `prefixes`: of each sentence the tokens that its outputs start with. `on_token` sees those of its first output
    as they are drawn.
    Log-probabilities are the model's own, before temperature and cuts; score: log_prob / length.
    """
    limits = torch.as_tensor(max_length, device=src.device).expand(len(src))
    numbers = torch.from_numpy(_numbers(keys, options, int(limits.max()))).to(src.device)  # [B, n, C]
    prompts = torch.full((len(src), 1), BOS, device=src.device) if prompts is None else prompts
    forced = pad_prefixes(prefixes, src)
    n_samples, capacity = numbers.shape[1:]
    results: list[list[Hypothesis]] = [[] for _ in src]
    number = torch.arange(len(src), device=src.device)
    n_before = prompts.shape[1]
    before = prompts[:, None].repeat(1, n_samples, 1)
    ids = torch.cat([before, before.new_full((len(src), n_samples, capacity), PAD)], 2)
    token = before[:, :, -1]
    log_prob = torch.zeros(len(src), n_samples, dtype=torch.float64, device=src.device)
    n_ids = torch.zeros_like(token)
    ended = torch.zeros_like(token, dtype=torch.bool)
    state = model.start(src, capacity=capacity, n_beams=n_samples)
    for length in range(1, capacity + 1):
        logits = model.logits(model.advance(token.view(-1, 1), state)[:, -1]).float()
        known = logits.log_softmax(-1)
        so_far, must = ids[:, :, : n_before + length - 1], forced[:, length - 1 : length]
        logits = _exclude(logits, so_far, must, no_repeat_ngram=options.no_repeat_ngram)
        drawn = draw(filter_logits(logits, options).softmax(-1), numbers[:, :, length - 1].flatten())
        log_prob += known.gather(1, drawn[:, None]).view_as(token).masked_fill(ended, 0.0)
        token = drawn.view_as(token)
        going = ~ended & (token != EOS)
        ids[:, :, n_before + length - 1] = token.masked_fill(~going, PAD)
        n_ids += going
        if on_token is not None:
            for place, first in zip(number.tolist(), ids[:, 0, n_before + length - 1].tolist(), strict=True):
                if first != PAD:
                    on_token(place, first)
        ended |= token == EOS
        done = (ended.all(1) | (limits <= length)).nonzero().squeeze(1)
        if len(done):
            rows = (x[done].tolist() for x in (number, ids[:, :, n_before:], log_prob, n_ids, ended))
            for place, *sentence in zip(*rows, strict=True):
                results[place] = [_hypothesis(*one) for one in zip(*sentence, strict=True)]
            stay = (~(ended.all(1) | (limits <= length))).nonzero().squeeze(1)
            if not len(stay):
                break
            state.select(stay)
            number, ids, log_prob, n_ids, ended, token, numbers, limits, forced = (
                x.index_select(0, stay) for x in (number, ids, log_prob, n_ids, ended, token, numbers, limits, forced)
            )
    return results


def _numbers(keys: Sequence[tuple[int, ...]], options: DecodingOptions, length: int) -> np.ndarray:
    """Numbers of [0, 1) for every token: those of a sample depend on the seed, its key and its place only."""
    samples = range(options.n_best)
    return np.array([[sample_numbers((options.seed, *key), i, length) for i in samples] for key in keys])


def _exclude(
    logits: Float[Tensor, "N V"],
    ids: Int[Tensor, "B n T"],
    forced: Int[Tensor, "B p"],
    *,
    no_repeat_ngram: int,
) -> Float[Tensor, "N V"]:
    """Logits of the next token after `ids`; what must not be drawn becomes -inf. `forced`: the next token."""
    logits = logits.index_fill(1, torch.tensor([PAD, BOS], device=ids.device), -math.inf)
    if no_repeat_ngram:
        is_free = (forced == PAD).all(1)
        repeats = repeating_tokens(ids, no_repeat_ngram).masked_fill(~is_free[:, None, None], PAD)
        logits = logits.scatter(1, repeats.flatten(0, 1), -math.inf)
    if forced.shape[1]:
        logits = keep_tokens(logits, forced.repeat_interleave(ids.shape[1], 0))
    return logits


def _hypothesis(ids: list[int], log_prob: float, n_ids: int, ended: bool) -> Hypothesis:
    return Hypothesis(ids=tuple(ids[:n_ids]), log_prob=log_prob, score=log_prob / (n_ids + ended), finished=ended)
