"""Beam search over any model with `start`, `advance` and `logits`; greedy search is a beam of one.

All bookkeeping is in tensors. Python handles each sentence only once, when it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from transduce.config.decoding import DecodingOptions
from transduce.decoding.constraints import (
    Beginning,
    Constraints,
    constrain,
    constraints_on,
    pad_copies,
    without_unscored,
)
from transduce.decoding.engine import Hypothesis, IsWanted
from transduce.nn.masks import SourceInput
from transduce.nn.state import DecodingState
from transduce.text.special import BOS, EOS, PAD

_DEAD = -math.inf  # log-probability of an empty slot
_LEAVE = 8  # done sentences are removed from a batch when they are 1/8 of it
_LOGIT_ROWS = 64  # rows of logits in memory at once on a CPU
_DEFAULT = DecodingOptions()
_COLUMNS = 64  # tokens in a chunk, which the first stage of `_best_in_two_stages` represents by its maximum


Continuations = tuple[Float[Tensor, "B n"], Int[Tensor, "B n"], Int[Tensor, "B n"]]
"""The best continuations of every sentence, best first: sums of log-probabilities, indices of beams, tokens."""


@runtime_checkable
class Stepper(Protocol):
    """The interface of a model for search. Row sentence * n_beams + beam of a tensor belongs to one hypothesis."""

    def start(self, src: Tensor, *, capacity: int, n_beams: int) -> DecodingState:
        """The state before the first token, for sources [B, S], with room for `capacity` tokens per row."""

    def advance(self, ids: Tensor, state: Any) -> Tensor:
        """Hidden states [N, 1, D] after the next token [N, 1] of every row; the state advances in place."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] for hidden states [..., D]."""


def beam_search(
    model: Stepper,
    src: SourceInput,
    options: DecodingOptions = _DEFAULT,
    *,
    max_length: int | Sequence[int],
    patience: float = 1.0,
    beginnings: Sequence[Beginning] = (),
    copies: Sequence[Sequence[int] | None] | None = None,
    watch: Callable[[Continuations], None] | None = None,
    is_wanted: IsWanted | None = None,
) -> list[list[Hypothesis]]:
    """The `n_best` hypotheses of every sentence, best first; fewer if the search found fewer.

    Each step extends the live hypotheses of a sentence. Of the `beam` best continuations, those that end are
    finished, and ranked by log_prob / length ** length_penalty (Wu et al. 2016, equation 14, without its constant). The
    `beam` best continuations that do not end become the live hypotheses. A sentence is done as soon as

    - beam * patience of its hypotheses have finished (Kasai et al. 2022; most systems use 1) and the best of them has
      at least the score of the best live one: otherwise bad hypotheses that end early could fill all slots, or
    - the last of its n_best finished ones cannot be beaten: its score is at least the best live log-probability, which
      can only fall, over max_length ** length_penalty, the largest divisor, or
    - max_length tokens, the end included, are reached: the best live hypotheses then fill the remaining slots, after
      all finished ones, with `finished=False`.

    The second rule saves time and never changes a result. With an infinite patience, only the last two rules apply.

    Outside prefixes, no n-gram of `options.no_repeat_ngram` tokens occurs twice in a hypothesis (Paulus et al. 2018,
    2.5): tokens that would repeat one are never chosen, but stay part of the distribution.

    Args:
        model: The model.
        src: Sources.
        options: Beam, n_best, length penalty and repeated n-grams.
        max_length: One limit, or one for each sentence.
        patience: See above.
        beginnings: For each sentence, the tokens that all its hypotheses start with; they count in scores and lengths.
        copies: For each sentence, the placeholders of its hypotheses; see `DecodingInput`.
        watch: Called at each step with the best continuations, before the search chooses among them.
        is_wanted: Whether a sentence is still wanted. If no open sentence is, the search ends without hypotheses for
            them.
    """
    if options.n_best > options.beam:
        raise ValueError(f"n_best = {options.n_best}: more than beam = {options.beam}")
    if patience <= 0:
        raise ValueError(f"patience {patience}: must be above 0")
    limits = torch.as_tensor(max_length, device=src.device).expand(len(src))
    with torch.inference_mode():
        search = _BeamState(
            limits, options, patience=patience, beginnings=beginnings, copies=pad_copies(copies, src), watch=watch
        )
        state = model.start(src, capacity=search.capacity, n_beams=options.beam)
        while True:
            rows = search.extend(model.logits, model.advance(search.last_ids.reshape(-1, 1), state)[:, -1])
            staying = search.release()
            if not search.n_sentences or (is_wanted is not None and not any(map(is_wanted, search.open_inputs()))):
                return search.finish()
            if rows is not None:
                state.reorder(rows)
            if staying is not None:
                state.select(staying)


class _BeamState:
    """The hypotheses of a batch: per sentence `beam` slots for live and `n_best` slots for finished hypotheses.

    The first axis of all tensors is the sentence.
    """

    def __init__(
        self,
        limits: Int[Tensor, " B"],
        options: DecodingOptions,
        *,
        patience: float,
        beginnings: Sequence[Beginning],
        copies: Int[Tensor, "B P"],
        watch: Callable[[Continuations], None] | None,
    ) -> None:
        self.beam, self.n_best = beam, n_best = options.beam, options.n_best
        self.alpha, self.no_repeat_ngram, self.quota = options.length_penalty, options.no_repeat_ngram, beam * patience
        self.n_sentences, self.capacity = len(limits), int(limits.max())
        self.results: list[list[Hypothesis]] = [[] for _ in range(self.n_sentences)]
        self.length = 0  # tokens of every live hypothesis
        size, device = (self.n_sentences,), limits.device
        self.live = torch.full((*size, beam), _DEAD, device=device)  # log-probabilities, best first
        self.live[:, 0] = 0.0
        self.live_ids = torch.full((*size, beam, self.capacity), PAD, device=device)
        self.last_ids = torch.full((*size, beam), BOS, device=device)
        self.score = torch.full((*size, n_best), _DEAD, device=device)  # scores of finished hypotheses, best first
        self.log_prob = torch.full((*size, n_best), _DEAD, device=device)
        self.n_ids = torch.zeros((*size, n_best), dtype=torch.int64, device=device)
        self.ids = torch.full((*size, n_best, self.capacity), PAD, device=device)
        self.cut = torch.zeros((*size, n_best), dtype=torch.bool, device=device)
        self.n_ended = torch.zeros(size, dtype=torch.int64, device=device)
        self.done = torch.zeros(size, dtype=torch.bool, device=device)
        self.number = torch.arange(self.n_sentences, device=device)  # index of each sentence in the results
        self.limits, self._next_limit = limits, int(limits.min())
        self.beginnings, self.copies, self.watch = beginnings, copies, watch
        self._n_done, self._any_ended = 0, False

    def extend(self, logits: Callable[[Tensor], Tensor], hidden: Float[Tensor, "N D"]) -> Int[Tensor, " N"] | None:
        """Extend every live hypothesis by a token; return the row that each continues (None: each its own row)."""
        beam = self.beam
        values, parent, token = self._continuations(logits, hidden)
        values = without_unscored(values, self.beginnings, self.length)
        if self.watch is not None:
            self.watch((values, parent, token))
        self.length += 1
        ends = token == EOS
        if ends.any():
            self._finish(values[:, :beam].masked_fill(~ends[:, :beam], _DEAD), parent[:, :beam])
            # stable, so that the continuations that do not end stay in order, best first, as `watch` expects
            slot = ends.byte().argsort(dim=1, stable=True)[:, :beam]
            self.live = values.masked_fill(ends, _DEAD).gather(1, slot)
            parent, token = parent.gather(1, slot), token.gather(1, slot)
        else:
            self.live, parent, token = values[:, :beam].contiguous(), parent[:, :beam], token[:, :beam]
        rows = self._move(parent, token)
        self._mark_done()
        return rows

    def _continuations(self, logits: Callable[[Tensor], Tensor], hidden: Float[Tensor, "N D"]) -> Continuations:
        """The 2 * beam best continuations of every sentence. No logits are computed for sentences that are done."""
        n, search = 2 * self.beam, _best_continuations
        constraints = constraints_on(
            self.live_ids[:, :, : self.length], self.beginnings, self.copies, no_repeat_ngram=self.no_repeat_ngram
        )
        if not self._n_done:
            return search(logits, hidden, self.live, n, constraints)
        open_sentences = (~self.done).nonzero().squeeze(1)
        hidden = hidden.unflatten(0, (-1, self.beam)).index_select(0, open_sentences).flatten(0, 1)
        live, *rows = (column.index_select(0, open_sentences) for column in (self.live, *constraints))
        best = search(logits, hidden, live, n, Constraints(*rows))
        values = self.live.new_full((self.n_sentences, n), _DEAD)
        parent = (torch.arange(n, device=live.device) % self.beam).repeat(self.n_sentences, 1)  # each continues itself
        whole = values, parent, torch.full_like(parent, PAD)
        for column, part in zip(whole, best, strict=True):
            column.index_copy_(0, open_sentences, part)
        return whole

    def release(self) -> Int[Tensor, " b"] | None:
        """Store the results of done sentences, once there are enough; return the remaining indices, else None."""
        if not self._n_done or (self._n_done < self.n_sentences and self._n_done * _LEAVE < self.n_sentences):
            return None
        self._store_results(self.done.nonzero().squeeze(1))
        staying = (~self.done).nonzero().squeeze(1)
        self.n_sentences, self._n_done = len(staying), 0
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.index_select(0, staying))
        if self.beginnings:
            self.beginnings = [self.beginnings[number] for number in staying.tolist()]
        self._next_limit = int(self.limits.min()) if self.n_sentences else 0
        return staying

    def open_inputs(self) -> list[int]:
        """Return the indices, among the inputs, of the sentences that are not done."""
        numbers: list[int] = self.number[~self.done].tolist()
        return numbers

    def finish(self) -> list[list[Hypothesis]]:
        """Store the results of the last done sentences; return all results."""
        self._store_results(self.done.nonzero().squeeze(1))
        return self.results

    def _finish(self, log_prob: Float[Tensor, "B k"], parent: Int[Tensor, "B k"]) -> None:
        """Keep the best finished and newly ending hypotheses. `log_prob`: -inf for candidates that do not end."""
        self.n_ended += (log_prob > _DEAD).sum(1)
        score = torch.cat([self.score, log_prob / self.length**self.alpha], 1)
        slot = score.topk(self.n_best).indices
        if self._n_done:  # results of done sentences must not change: cut-off hypotheses stay after finished ones
            slot = torch.where(self.done[:, None], torch.arange(self.n_best, device=slot.device), slot)
        self.score = score.gather(1, slot)
        self.log_prob = torch.cat([self.log_prob, log_prob], 1).gather(1, slot)
        n_ids = torch.full_like(parent, self.length - 1)
        self.n_ids = torch.cat([self.n_ids, n_ids], 1).gather(1, slot)
        self.ids = _pick(torch.cat([self.ids, _pick(self.live_ids, parent)], 1), slot)
        self._any_ended = True

    def _move(self, parent: Int[Tensor, "B k"], token: Int[Tensor, "B k"]) -> Int[Tensor, " N"] | None:
        """Append each token to the tokens of its parent; return the parents' rows (None: all are in place)."""
        itself = torch.arange(self.beam, device=parent.device)
        rows = None
        if not torch.equal(parent, itself.expand_as(parent)):
            self.live_ids = _pick(self.live_ids, parent)
            rows = (parent + torch.arange(self.n_sentences, device=parent.device)[:, None] * self.beam).flatten()
        self.live_ids[:, :, self.length - 1] = token
        self.last_ids = token
        return rows

    def _mark_done(self) -> None:
        """Find the sentences that are done, and drop their live hypotheses."""
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
        """In the sentences `at`, fill slots without a finished hypothesis with the best live hypotheses."""
        if not len(at):
            return
        order = torch.arange(self.n_best, device=at.device)
        n_finished = (self.score[at] > _DEAD).sum(1, keepdim=True)
        slot = (order - n_finished).clamp_min(0)  # [b, n]: the live hypothesis for each slot
        log_prob = self.live[at].gather(1, slot)
        free = (order >= n_finished) & (log_prob > _DEAD)
        for name, value in (
            ("score", log_prob / self.length**self.alpha),
            ("log_prob", log_prob),
            ("n_ids", torch.full_like(slot, self.length)),
            ("cut", torch.ones_like(free)),
        ):
            column = getattr(self, name)
            column[at] = torch.where(free, value, column[at])
        self.ids[at] = torch.where(free[:, :, None], _pick(self.live_ids[at], slot), self.ids[at])

    def _store_results(self, at: Int[Tensor, " b"]) -> None:
        """Turn the finished hypotheses of the sentences `at` into results."""
        names = ("number", "score", "log_prob", "n_ids", "cut", "ids")
        for number, *columns in zip(*(getattr(self, name)[at].tolist() for name in names), strict=True):
            self.results[number] = [
                Hypothesis(ids=tuple(ids[:n_ids]), log_prob=log_prob, score=score, finished=not cut)
                for score, log_prob, n_ids, cut, ids in zip(*columns, strict=True)
                if score > _DEAD
            ]


def _pick(ids: Int[Tensor, "B m C"], slot: Int[Tensor, "B n"]) -> Int[Tensor, "B n C"]:
    """Select the token sequences in the given slots of each sentence."""
    return ids.gather(1, slot[:, :, None].expand(-1, -1, ids.shape[2]))


def _best_continuations(
    logits: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N D"],
    log_prob: Float[Tensor, "B k"],
    n: int,
    constraints: Constraints,
) -> Continuations:
    """Find the n best log_prob[b, i] + log_softmax(logits(hidden[b * k + i])) of every sentence b, best first.

    n is at most the number of continuations of one beam. All tokens count in the probabilities, which are float32. On a
    CPU, logits are computed and searched for a few rows at a time, so that they stay in the cache.
    """
    n_sentences, beam = log_prob.shape
    at_once = n_sentences if hidden.is_cuda else max(1, _LOGIT_ROWS // beam)
    parts = []
    columns = (column.split(at_once) for column in (log_prob, *constraints))
    for part_hidden, part, *rows in zip(hidden.split(at_once * beam), *columns, strict=True):
        token_log_probs = constrain(logits(part_hidden).float().log_softmax(-1), Constraints(*rows))
        n_tokens = token_log_probs.shape[1]
        is_small = n_tokens < 4 * _COLUMNS or n > n_tokens // _COLUMNS
        parts.append((_best_at_once if is_small else _best_in_two_stages)(token_log_probs, part, n))
    if len(parts) == 1:
        return parts[0]
    values, parents, tokens = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, parents, tokens


def _best_at_once(token_log_probs: Tensor, log_prob: Tensor, n: int) -> Continuations:
    n_tokens = token_log_probs.shape[1]
    values, index = (token_log_probs.view(*log_prob.shape, n_tokens) + log_prob[:, :, None]).flatten(1).topk(n)
    return values, index // n_tokens, index % n_tokens


def _best_in_two_stages(token_log_probs: Tensor, log_prob: Tensor, n: int) -> Continuations:
    """Find the n best by maxima of chunks of tokens: the n chunks with the highest maxima contain them."""
    n_sentences, beam = log_prob.shape
    n_tokens = token_log_probs.shape[1]
    n_full = n_tokens // _COLUMNS
    maxima = token_log_probs[:, : n_full * _COLUMNS].unflatten(1, (n_full, _COLUMNS)).amax(-1)  # [N, chunks]
    if n_full * _COLUMNS < n_tokens:
        maxima = torch.cat([maxima, token_log_probs[:, n_full * _COLUMNS :].amax(-1, keepdim=True)], dim=1)
    n_chunks = maxima.shape[1]
    chunk = (maxima.view(n_sentences, beam, n_chunks) + log_prob[:, :, None]).flatten(1).topk(n, sorted=False).indices
    parent, first = chunk // n_chunks, chunk % n_chunks * _COLUMNS  # [B, n]
    token = first[:, :, None] + torch.arange(_COLUMNS, device=token_log_probs.device)  # [B, n, _COLUMNS]
    row = parent + torch.arange(n_sentences, device=token_log_probs.device)[:, None] * beam
    inside = token < n_tokens
    values = token_log_probs.take(row[:, :, None] * n_tokens + token.clamp_max(n_tokens - 1))
    values = (values + log_prob.gather(1, parent)[:, :, None]).masked_fill_(~inside, -math.inf)
    values, index = values.flatten(1).topk(n)
    return values, parent.gather(1, index // _COLUMNS), token.flatten(1).gather(1, index)
