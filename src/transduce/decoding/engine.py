"""The engine protocol: token ids in, hypotheses out.

`torch_engine` is the reference, `native_engine` is faster. This module does not import torch, so that translation with
the native library starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.data.store import Example, Ids, RowExample

Spelling = tuple[tuple[int, int, int], ...]
"""An automaton of the token sequences that spell a text: sorted rows (state, token, next state).

In a state with rows only the tokens of these rows may follow, and each leads to a higher state. In a state without rows
any token may follow.
"""


@dataclass(frozen=True, slots=True)
class DecodingInput:
    """Token ids to translate or to continue, or vectors [S, N] to translate.

    Attributes:
        key: Identifies the input. Random numbers are a function of the seed and the key.
        ids: The tokens or vectors.
        limit: Maximum number of new tokens.
        prefix: Tokens that every output starts with. They count in its length, its log-probability and `limit`.
        copies: Placeholders that every output must contain as often as this list, and no others; None if the vocabulary
            has no placeholders.
        spelling: The tokens that may follow the prefix, from state 0 on.
        n_unscored: Number of tokens at the start of the prefix that belong to the input: they count in the length, but
            not in the log-probability.
    """

    key: tuple[int, ...]
    ids: Ids
    limit: int
    prefix: tuple[int, ...] = ()
    copies: tuple[int, ...] | None = None
    spelling: Spelling = ()
    n_unscored: int = 0


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output.

    Attributes:
        ids: Tokens without special ids; the end of the sentence counts in `log_prob` and in the length.
        log_prob: Sum of the log-probabilities (nats) of the tokens.
        score: log_prob / length ** length_penalty.
        finished: False if the output was cut off at the length limit, before an end of sentence.
        attention: Weights [ids, source ids + 1] of the head trained to align, if the search stored them. Row t is from
            the step that reads id t; the last row of a cut-off output is zero.
    """

    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True
    attention: np.ndarray | None = field(default=None, compare=False, repr=False)


BATCH_TOKENS = DecodingSettings().batch_tokens
"""Default number of tokens that are scored at once, padding included."""

IsWanted = Callable[[int], bool]
"""Called between steps with the index of an input that is not done; returns False if nobody waits for the input."""

Outcome = Literal["done", "tokens", "cancelled", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("done", "tokens", "cancelled", "failed")
"""All outcomes, in the order of the native library's codes. All but `tokens` end an input."""


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens or the end of a submitted input.

    Attributes:
        ticket: Number that identifies the input.
        outcome: `tokens`, any number of times, and finally `done`, `cancelled` or `failed`.
        hypotheses: With `done`: the hypotheses, as `Engine.translate` returns them.
        tokens: With `tokens`: the next tokens of the best hypothesis; they are final.
        reason: With `failed`: the error message.
    """

    ticket: int
    outcome: Outcome
    hypotheses: list[Hypothesis] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    reason: str = ""


Deliver = Callable[[Event], object]


@runtime_checkable
class Batcher(Protocol):
    """Decodes the inputs of a `DecodingQueue` together, in its own threads. Used from one event loop."""

    def submit(
        self,
        first_ticket: int,
        inputs: Sequence[DecodingInput],
        options: DecodingOptions,
        *,
        order: float,
        stream: bool,
    ) -> None:
        """Add inputs with the tickets first_ticket, first_ticket + 1, ...; if there is an error, none is added.

        Each input gets one event that ends it. Inputs are decoded by `order`, smallest first, and inputs of equal
        `order` by arrival. `stream`: also deliver events with `tokens`, if the engine can.
        """

    def cancel(self, ticket: int) -> None:
        """End an input at the next decoding step; no effect if it has ended."""

    def workload(self) -> dict[str, int]:
        """Return figures about the open work; `n_waiting`: number of inputs whose decoding has not begun."""

    async def close(self) -> None:
        """Cancel all inputs and deliver their last events. Nothing may be submitted afterwards."""


def cost_of(inputs: Sequence[DecodingInput], options: DecodingOptions) -> float:
    """Number of tokens of the inputs and of their longest outputs, times the number of beams or samples."""
    width = options.n_best if options.sample else options.beam
    return float(width * sum(len(source.ids) + source.limit for source in inputs))


def sample_numbers(seed: Sequence[int], sample: int, n: int) -> np.ndarray:
    """Return n random numbers in [0, 1), one per token, that depend only on the seed and the sample's index."""
    return np.random.default_rng([*seed, sample]).random(n)


@runtime_checkable
class Engine(Protocol):
    """The interface of a model for `Translator` and `Generator`. Safe to call from several threads."""

    @property
    def device(self) -> str:
        """The device of the engine, by PyTorch's names: cpu, cuda:0."""

    def pytorch_model(self) -> Any:
        """The PyTorch model, in eval mode. The native engine loads it when this is first called."""

    def translate(self, sources: Sequence[DecodingInput], options: DecodingOptions) -> list[list[Hypothesis]]:
        """Return `options.n_best` hypotheses per source, best first; with `options.sample`, as many samples.

        A language model samples one continuation per source.
        """

    def open_batcher(self, deliver: Deliver) -> Batcher:
        """Start decoding for a `DecodingQueue`. `deliver` is called in the running event loop."""

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """For each pair, log-probabilities (nats) of every target token and of the end, given the source."""

    def attention(self, pairs: Sequence[Example], heads: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Cross-attention weights of a Transformer for each pair: [heads, target tokens + 1, source tokens + 1].

        `heads`: (decoder layer, head), from 0. Row t reads target token t - 1 and predicts target token t.
        """

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
        """Log-probabilities (nats) of every target in rows of running text. `separate`: see `collate_rows`."""
