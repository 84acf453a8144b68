"""Greedy and beam search over any model that offers `start`, `advance` and `logits`, whatever it is.

One code path: greedy search is a beam of one. All bookkeeping is tensors; Python sees a sentence once, when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import keep_tokens, pad_lists, pad_prefixes, repeating_tokens
from transduce.decoding.engine import Hypothesis
from transduce.nn.masks import SourceInput
from transduce.nn.state import DecodingState
from transduce.text.special import BOS, EOS, PAD

_DEAD = -math.inf  # log-probability of an empty place
_LEAVE = 8  # sentences that are done leave the batch together, as soon as they are an eighth of it
_TOGETHER = 64  # rows of logits in memory at once on a CPU
_DEFAULT = DecodingOptions()
_COLUMNS = 64  # tokens that the first stage of finding the best represents by their maximum


Continuations = tuple[Float[Tensor, "B n"], Int[Tensor, "B n"], Int[Tensor, "B n"]]
"""The best continuations of every sentence, best first: sums of log-probabilities, beams, tokens."""


@runtime_checkable
class Stepper(Protocol):
    """A model as search uses it; of its state it uses `reorder` and `select`. Rows: sentence * n_beams + beam."""

    def start(self, src: Tensor, *, capacity: int, n_beams: int) -> DecodingState:
        """State before the first token, for sources [B, S], with room for `capacity` tokens per row."""

    def advance(self, ids: Tensor, state: Any) -> Tensor:
        """Hidden states [N, 1, D] after the next token [N, 1] of every row; the state moves on in place."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], row by row."""


def beam_search(
    model: Stepper,
    src: SourceInput,
    options: DecodingOptions = _DEFAULT,
    *,
    max_length: int | Sequence[int],
    patience: float = 1.0,
    prefixes: Sequence[Sequence[int]] | None = None,
    allowed: Sequence[np.ndarray | None] | None = None,
    watch: Callable[[Continuations], None] | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses of every sentence, best first; fewer where the search found fewer.

    At each step the `beam` best continuations of a sentence's live hypotheses count. Those that end are finished, and
    ranked by log_prob / length ** length_penalty (Wu et al. 2016, equation 14, without its constant); the `beam` best
    continuations that do not end live on. A sentence is done as soon as

    - beam * patience of its hypotheses have finished (Kasai et al. 2022; 1 is what most systems do), the best of them
      at least as good as the current best live one: else a confident model would fill its places with bad hypotheses
      that end early, or
    - the last of its n_best finished ones cannot be beaten: its score is at least the best live log-probability, which
      can only fall, over max_length ** length_penalty, the most that length can help, or
    - max_length tokens (one limit or one a sentence; the end counts) are reached: the best live hypotheses then fill
      the places that are left, after all finished ones, with `finished=False`.

    The second rule never changes a result. With patience `inf` only the last two hold, and the search gives up nothing.

    `prefixes`: of each sentence, the tokens that all its hypotheses start with; they count in scores and lengths.
    `allowed`: of each sentence, the tokens that have a probability, its prefix included; None: all.
    `watch`: called at each step with the best continuations, before the search chooses among them.

    Outside prefixes, no n-gram of `options.no_repeat_ngram` tokens occurs twice in a hypothesis (Paulus et al. 2018,
    2.5): tokens that would repeat one are never chosen, though their probability counts.
    """
    if options.n_best > options.beam:
        raise ValueError(f"n_best = {options.n_best}: more than beam = {options.beam}")
    if patience <= 0:
        raise ValueError(f"patience {patience}: must be above 0")
    limits = torch.as_tensor(max_length, device=src.device).expand(len(src))
    with torch.inference_mode():
        search = _BeamState(limits, options, patience=patience)
        search.prefixes = pad_prefixes(prefixes, src)
        search.allowed = pad_lists(allowed, src)
        search.watch = watch
        state = model.start(src, capacity=search.capacity, n_beams=options.beam)
        while True:
            rows = search.extend(model.logits, model.advance(search.last_ids, state)[:, -1])
            staying = search.release()
            if not search.n_sentences:
                return search.results
            if rows is not None:
                state.reorder(rows)
            if staying is not None:
                state.select(staying)


class _BeamState:
    """The live and the finished hypotheses of a batch: k places for live, n for finished ones, a sentence."""

    def __init__(self, limits: Int[Tensor, " B"], options: DecodingOptions, *, patience: float) -> None:
        self.beam, self.n_best = beam, n_best = options.beam, options.n_best
        self.alpha, self.no_repeat_ngram, self.quota = options.length_penalty, options.no_repeat_ngram, beam * patience
        self.n_sentences, self.capacity = len(limits), int(limits.max())
        self.results: list[list[Hypothesis]] = [[] for _ in range(self.n_sentences)]
        self.length = 0  # tokens of every live hypothesis
        size, device = (self.n_sentences,), limits.device
        self.live = torch.full((*size, beam), _DEAD, device=device)  # log-probabilities, best first
        self.live[:, 0] = 0.0
        self.live_ids = torch.full((*size, beam, self.capacity), PAD, device=device)
        self.last_ids = torch.full((self.n_sentences * beam, 1), BOS, device=device)
        self.score = torch.full((*size, n_best), _DEAD, device=device)  # of finished hypotheses, best first
        self.log_prob = torch.full((*size, n_best), _DEAD, device=device)
        self.n_ids = torch.zeros((*size, n_best), dtype=torch.int64, device=device)
        self.ids = torch.full((*size, n_best, self.capacity), PAD, device=device)
        self.cut = torch.zeros((*size, n_best), dtype=torch.bool, device=device)
        self.n_ended = torch.zeros(size, dtype=torch.int64, device=device)
        self.done = torch.zeros(size, dtype=torch.bool, device=device)
        self.number = torch.arange(self.n_sentences, device=device)  # the sentence's place in the results
        self.limits, self._next_limit = limits, int(limits.min())
        self.prefixes = limits.new_empty((*size, 0))  # tokens that come first; padding: any
        self.allowed = self.prefixes
        self._n_done, self._any_ended = 0, False
        self.watch: Callable[[Continuations], None] | None = None

    def extend(self, logits: Callable[[Tensor], Tensor], hidden: Float[Tensor, "N D"]) -> Int[Tensor, " N"] | None:
        """Extend every live hypothesis by a token; return the rows that they continue (None: itself)."""
        beam = self.beam
        values, parent, token = found = self._continuations(logits, hidden)
        if self.watch is not None:
            self.watch(found)
        self.length += 1
        ends = token == EOS
        if ends.any():
            self._finish(values[:, :beam].masked_fill(~ends[:, :beam], _DEAD), parent[:, :beam])
            place = ends.byte().argsort(dim=1, stable=True)[:, :beam]  # of equal ones, the first, as `watch` expects
            self.live = values.masked_fill(ends, _DEAD).gather(1, place)
            parent, token = parent.gather(1, place), token.gather(1, place)
        else:
            self.live, parent, token = values[:, :beam].contiguous(), parent[:, :beam], token[:, :beam]
        rows = self._move(parent, token)
        self._mark_done()
        return rows

    def _continuations(self, logits: Callable[[Tensor], Tensor], hidden: Float[Tensor, "N D"]) -> Continuations:
        """The 2 * beam best continuations of every sentence. What is done gets no logits."""
        n, search = 2 * self.beam, _best_continuations
        banned = torch.tensor([PAD, BOS], device=hidden.device).expand(self.n_sentences, self.beam, 2)
        if self.no_repeat_ngram:
            repeats = repeating_tokens(self.live_ids[:, :, : self.length], self.no_repeat_ngram)
            banned = torch.cat([banned, repeats], 2)
        allowed = self.allowed if self.allowed.shape[1] else None
        forced = self.prefixes[:, self.length] if self.length < self.prefixes.shape[1] else None
        if not self._n_done:
            return search(logits, hidden, self.live, n, banned=banned, forced=forced, allowed=allowed)
        going = (~self.done).nonzero().squeeze(1)
        hidden = hidden.unflatten(0, (-1, self.beam)).index_select(0, going).flatten(0, 1)
        forced = None if forced is None else forced.index_select(0, going)
        allowed = None if allowed is None else allowed.index_select(0, going)
        live, banned = self.live.index_select(0, going), banned.index_select(0, going)
        found = search(logits, hidden, live, n, banned=banned, forced=forced, allowed=allowed)
        values = self.live.new_full((self.n_sentences, n), _DEAD)
        parent = (torch.arange(n, device=going.device) % self.beam).repeat(self.n_sentences, 1)  # each from itself
        whole = values, parent, torch.full_like(parent, PAD)
        for column, part in zip(whole, found, strict=True):
            column.index_copy_(0, going, part)
        return whole

    def release(self) -> Int[Tensor, " b"] | None:
        """Store the results of sentences that are done, once they are enough; return the places of the others."""
        if not self._n_done or (self._n_done < self.n_sentences and self._n_done * _LEAVE < self.n_sentences):
            return None
        self._store_results(self.done.nonzero().squeeze(1))
        staying = (~self.done).nonzero().squeeze(1)
        self.n_sentences, self._n_done = len(staying), 0
        self.last_ids = self.last_ids.view(-1, self.beam).index_select(0, staying).view(-1, 1)
        for name in _OF_A_SENTENCE:
            setattr(self, name, getattr(self, name).index_select(0, staying))
        self._next_limit = int(self.limits.min()) if self.n_sentences else 0
        return staying

    def _finish(self, log_prob: Float[Tensor, "B k"], parent: Int[Tensor, "B k"]) -> None:
        """Keep the best among the finished hypotheses and those that end now; `log_prob` is -inf where nothing ends."""
        self.n_ended += (log_prob > _DEAD).sum(1)
        score = torch.cat([self.score, log_prob / self.length**self.alpha], 1)
        place = score.topk(self.n_best).indices
        if self._n_done:  # what is done stays as it is: hypotheses that were cut off come after finished ones
            place = torch.where(self.done[:, None], torch.arange(self.n_best, device=place.device), place)
        self.score = score.gather(1, place)
        self.log_prob = torch.cat([self.log_prob, log_prob], 1).gather(1, place)
        n_ids = torch.full_like(parent, self.length - 1)
        self.n_ids = torch.cat([self.n_ids, n_ids], 1).gather(1, place)
        self.ids = _pick(torch.cat([self.ids, _pick(self.live_ids, parent)], 1), place)
        self._any_ended = True

    def _move(self, parent: Int[Tensor, "B k"], token: Int[Tensor, "B k"]) -> Int[Tensor, " N"] | None:
        """Write the tokens behind the histories that they continue."""
        itself = torch.arange(self.beam, device=parent.device)
        rows = None
        if not torch.equal(parent, itself.expand_as(parent)):
            self.live_ids = _pick(self.live_ids, parent)
            rows = (parent + torch.arange(self.n_sentences, device=parent.device)[:, None] * self.beam).flatten()
        self.live_ids[:, :, self.length - 1] = token
        self.last_ids = token.reshape(-1, 1)
        return rows

    def _mark_done(self) -> None:
        """Find the sentences that are done; what is live of them dies."""
        at_limit = self.length >= self._next_limit
        if not self._any_ended and not at_limit:
            return
        best = self.live[:, 0] / self.limits**self.alpha
        enough = (self.n_ended >= self.quota) & (self.score[:, 0] >= self.live[:, 0] / self.length**self.alpha)
        done = enough | (self.score[:, -1] >= best)
        if at_limit:
            over = self.limits <= self.length
            self._cut_off((over & ~done & ~self.done).nonzero().squeeze(1))
            done |= over
        self.done |= done
        self._n_done = int(self.done.sum())
        if self._n_done:
            self.live = self.live.masked_fill(self.done[:, None], _DEAD)

    def _cut_off(self, at: Int[Tensor, " b"]) -> None:
        """Fill places without a finished hypothesis with the best live ones, in the sentences `at`."""
        if not len(at):
            return
        order = torch.arange(self.n_best, device=at.device)
        n_finished = (self.score[at] > _DEAD).sum(1, keepdim=True)
        place = (order - n_finished).clamp_min(0)  # [b, n]: the live hypothesis that comes into each place
        log_prob = self.live[at].gather(1, place)
        free = (order >= n_finished) & (log_prob > _DEAD)
        for name, value in (
            ("score", log_prob / self.length**self.alpha),
            ("log_prob", log_prob),
            ("n_ids", torch.full_like(place, self.length)),
            ("cut", torch.ones_like(free)),
        ):
            known = getattr(self, name)
            known[at] = torch.where(free, value, known[at])
        self.ids[at] = torch.where(free[:, :, None], _pick(self.live_ids[at], place), self.ids[at])

    def _store_results(self, at: Int[Tensor, " b"]) -> None:
        """Turn the finished hypotheses of the sentences `at` into results."""
        names = ("number", "score", "log_prob", "n_ids", "cut", "ids")
        for number, *columns in zip(*(getattr(self, name)[at].tolist() for name in names), strict=True):
            self.results[number] = [
                Hypothesis(ids=tuple(ids[:n_ids]), log_prob=log_prob, score=score, finished=not cut)
                for score, log_prob, n_ids, cut, ids in zip(*columns, strict=True)
                if score > _DEAD
            ]


_OF_A_SENTENCE = (
    "live",
    "live_ids",
    "score",
    "log_prob",
    "n_ids",
    "ids",
    "cut",
    "n_ended",
    "done",
    "number",
    "limits",
    "prefixes",
    "allowed",
)


def _pick(ids: Int[Tensor, "B m C"], place: Int[Tensor, "B n"]) -> Int[Tensor, "B n C"]:
    """The sequences of ids at `place` in each sentence."""
    return ids.gather(1, place[:, :, None].expand(-1, -1, ids.shape[2]))


def _best_continuations(
    logits: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N D"],
    log_prob: Float[Tensor, "B k"],
    n: int,
    *,
    banned: Int[Tensor, "B k b"],
    forced: Int[Tensor, " B"] | None = None,
    allowed: Int[Tensor, "B A"] | None = None,
) -> tuple[Float[Tensor, "B n"], Int[Tensor, "B n"], Int[Tensor, "B n"]]:
    """The n best of log_prob[b, i] + log_softmax(logits(hidden[b * k + i])) of every sentence b, best first.

    Returns the sums, the beams i and the tokens, [B, n] each; n is at most the number of continuations of one beam.
    Tokens that are `banned` for a beam are never chosen, though their probability counts; only its `forced` token is,
    in sentences where that is not padding. Only `allowed` tokens have a probability. Log-probabilities are float32.
    On a CPU some rows at a time go from hidden states to the best, so that their logits never leave its cache.
    """
    n_sentences, beam = log_prob.shape
    at_once = n_sentences if hidden.is_cuda else max(1, _TOGETHER // beam)
    parts = []
    must = torch.zeros_like(log_prob[:, 0], dtype=torch.int64) if forced is None else forced
    may = must[:, None] if allowed is None else allowed
    columns = (log_prob, must, may, banned)
    for part_hidden, part, token, tokens, ban in zip(
        hidden.split(at_once * beam), *(column.split(at_once) for column in columns), strict=True
    ):
        found = logits(part_hidden).float()
        found = found if allowed is None else keep_tokens(found, tokens.repeat_interleave(beam, 0))
        known = found.log_softmax(-1)
        # A prefix may repeat n-grams: where a token is forced, only padding and the start are banned.
        ban = ban if forced is None else ban.masked_fill((token != PAD)[:, None, None], PAD)
        known = known.scatter_(1, ban.flatten(0, 1), -math.inf)
        known = known if forced is None else keep_tokens(known, token.repeat_interleave(beam)[:, None])
        small = known.shape[1] < 4 * _COLUMNS or n > known.shape[1] // _COLUMNS
        parts.append((_best_at_once if small else _best_in_two_stages)(known, part, n))
    if len(parts) == 1:
        return parts[0]
    values, parents, tokens = (torch.cat(found) for found in zip(*parts, strict=True))
    return values, parents, tokens


def _best_at_once(known: Tensor, log_prob: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    n_tokens = known.shape[1]
    values, place = (known.view(*log_prob.shape, n_tokens) + log_prob[:, :, None]).flatten(1).topk(n)
    return values, place // n_tokens, place % n_tokens


def _best_in_two_stages(known: Tensor, log_prob: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n best are in the n chunks with the highest maxima: select these, then the best in them."""
    n_sentences, beam = log_prob.shape
    n_tokens = known.shape[1]
    n_full = n_tokens // _COLUMNS
    maxima = known[:, : n_full * _COLUMNS].unflatten(1, (n_full, _COLUMNS)).amax(-1)  # [N, chunks]
    if n_full * _COLUMNS < n_tokens:
        maxima = torch.cat([maxima, known[:, n_full * _COLUMNS :].amax(-1, keepdim=True)], dim=1)
    n_chunks = maxima.shape[1]
    chunk = (maxima.view(n_sentences, beam, n_chunks) + log_prob[:, :, None]).flatten(1).topk(n, sorted=False).indices
    parent, first = chunk // n_chunks, chunk % n_chunks * _COLUMNS  # [B, n]
    token = first[:, :, None] + torch.arange(_COLUMNS, device=known.device)  # [B, n, _COLUMNS]
    row = parent + torch.arange(n_sentences, device=known.device)[:, None] * beam
    inside = token < n_tokens
    values = known.take(row[:, :, None] * n_tokens + token.clamp_max(n_tokens - 1))
    values = (values + log_prob.gather(1, parent)[:, :, None]).masked_fill_(~inside, -math.inf)
    values, place = values.flatten(1).topk(n)
    return values, parent.gather(1, place // _COLUMNS), token.flatten(1).gather(1, place)
