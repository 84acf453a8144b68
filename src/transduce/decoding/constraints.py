"""Constraints on search and sampling: tokens of a prefix, placeholders to copy, no repeated n-grams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from transduce.data.batch import pad_rows
from transduce.decoding.engine import Spelling
from transduce.text.special import BOS, EOS, PAD, PLACEHOLDER_IDS, UNK

MISPLACED = 0.01
"""Minimum probability of a missing placeholder, as a fraction of EOS's. Without it, a model that would end writes
unrelated text, because EOS is ruled out until every placeholder is written."""


class Constraints(NamedTuple):
    """The tokens that may follow each hypothesis.

    Attributes:
        allowed: The only tokens that may follow; a row of padding allows all tokens.
        banned: Tokens that may not follow, and padding.
        missing: Whether the hypothesis still lacks each placeholder.
    """

    allowed: Int[Tensor, "B k A"]
    banned: Int[Tensor, "B k b"]
    missing: Bool[Tensor, "B k P"]


class Beginning:
    """The tokens that the outputs of a sentence may begin with. `DecodingInput` describes the arguments."""

    def __init__(self, prefix: Sequence[int], spelling: Spelling = (), n_unscored: int = 0) -> None:
        self.n_unscored, self._prefix = n_unscored, prefix
        self._next_state = dict[int, dict[int, int]]()
        for state, token, next_state in spelling:
            self._next_state.setdefault(state, {})[token] = next_state
        self.length = len(prefix) + len(self._next_state)
        """Output length in tokens from which on any token may follow."""

    def next_tokens(self, ids: Int[Tensor, "k T"]) -> list[list[int]]:
        """List the tokens that may follow each hypothesis; an empty list allows all tokens."""
        n_free = ids.shape[1] - len(self._prefix)
        if n_free < 0:
            return [[self._prefix[n_free]]] * len(ids)
        return [list(self._next_state.get(self._state_after(row), ())) for row in ids[:, len(self._prefix) :].tolist()]

    def _state_after(self, tokens: Sequence[int]) -> int:
        state = 0
        for token in tokens:
            state = self._next_state.get(state, {}).get(token, -1)
        return state


def _allowed_tokens(beginnings: Sequence[Beginning], ids: Int[Tensor, "B k T"]) -> Int[Tensor, "B k A"]:
    if all(ids.shape[2] >= beginning.length for beginning in beginnings):
        return ids[:, :, :0]
    sentences = zip(beginnings, ids, strict=True)
    rows = [tokens for beginning, hypotheses in sentences for tokens in beginning.next_tokens(hypotheses)]
    return pad_rows(rows).to(ids.device).unflatten(0, ids.shape[:2])


def without_unscored(
    log_probs: Float[Tensor, "B k"], beginnings: Sequence[Beginning], n_before: int
) -> Float[Tensor, "B k"]:
    """Set log-probabilities to 0 if the token after the first `n_before` is unscored (`DecodingInput.n_unscored`).

    `log_probs`: sums over each hypothesis up to this token, or the token's own. Ruled-out tokens keep -inf.
    """
    if all(n_before >= beginning.n_unscored for beginning in beginnings):
        return log_probs
    unscored = torch.tensor([[n_before < beginning.n_unscored] for beginning in beginnings], device=log_probs.device)
    return log_probs.masked_fill(unscored & (log_probs > -math.inf), 0.0)


def pad_copies(copies: Sequence[Sequence[int] | None] | None, src: Tensor) -> Int[Tensor, "B P"]:
    """Count each placeholder in each sentence's `copies`; no columns if there are no placeholders."""
    if not copies or copies[0] is None:
        return torch.empty(len(src), 0, dtype=torch.int64, device=src.device)
    counts = [[list(row or ()).count(i) for i in PLACEHOLDER_IDS] for row in copies]
    return torch.tensor(counts, device=src.device)


def _missing_placeholders(ids: Int[Tensor, "B k T"], copies: Int[Tensor, "B P"]) -> Bool[Tensor, "B k P"]:
    placeholders = torch.tensor(PLACEHOLDER_IDS[: copies.shape[1]], device=ids.device)
    return (ids[..., None] == placeholders).sum(2) < copies[:, None]


def _banned_tokens(missing: Bool[Tensor, "B k P"]) -> Int[Tensor, "B k b"]:
    """Tokens to rule out: special tokens, complete placeholders, and the end while a placeholder is missing."""
    shape, device = missing.shape, missing.device
    never = torch.tensor([PAD, UNK, BOS], device=device).expand(*shape[:2], 3)
    if not shape[2]:
        return never
    complete = torch.tensor(PLACEHOLDER_IDS, device=device).masked_fill(missing, PAD)
    end = torch.where(missing.any(2, keepdim=True), EOS, PAD)
    return torch.cat([never, complete, end], 2)


def constrain(scores: Float[Tensor, "N V"], constraints: Constraints) -> Float[Tensor, "N V"]:
    """Set the scores (logits or log-probabilities) of tokens that may not follow to -inf, in place.

    A missing placeholder becomes at least `MISPLACED` times as probable as the end.
    """
    allowed, banned, missing = (rows.flatten(0, 1) for rows in constraints)
    if missing.shape[1]:
        placeholders = scores[:, PLACEHOLDER_IDS.start : PLACEHOLDER_IDS.stop]
        least = (scores[:, EOS : EOS + 1] + math.log(MISPLACED)).masked_fill(~missing, -math.inf)
        placeholders.copy_(placeholders.maximum(least))
    scores.scatter_(1, banned, -math.inf)
    if not allowed.shape[1]:
        return scores
    others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, allowed, False)
    return scores.masked_fill(others & (allowed[:, :1] != PAD), -math.inf)


def repeating_tokens(ids: Int[Tensor, "*N T"], n: int) -> Int[Tensor, "*N w"]:
    """The tokens after which an n-gram of `ids` would occur a second time, and padding.

    >>> repeating_tokens(torch.tensor([5, 6, 7, 5, 6]), 3).tolist()
    [7, 0, 0]
    """
    if ids.shape[-1] < n:
        return ids[..., :0]
    grams = ids.unfold(-1, n, 1)  # [*N, w, n]
    last = ids[..., ids.shape[-1] - n + 1 :]
    return grams[..., -1].masked_fill((grams[..., :-1] != last[..., None, :]).any(-1), PAD)


def constraints_on(
    ids: Int[Tensor, "B k T"],
    beginnings: Sequence[Beginning],
    copies: Int[Tensor, "B P"],
    *,
    no_repeat_ngram: int,
    n_prompt: int = 0,
) -> Constraints:
    """Collect the constraints on each hypothesis. Tokens of a prefix may repeat an n-gram.

    `n_prompt`: length of the prompt at the start of `ids`.
    """
    allowed, missing = _allowed_tokens(beginnings, ids[:, :, n_prompt:]), _missing_placeholders(ids, copies)
    banned = _banned_tokens(missing)
    if no_repeat_ngram:
        banned = torch.cat([banned, repeating_tokens(ids, no_repeat_ngram)], 2)
    is_limited = (allowed != PAD).any(2, keepdim=True)
    return Constraints(allowed, banned.masked_fill(is_limited, PAD), missing & ~is_limited)
