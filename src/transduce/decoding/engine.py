"""The engine protocol: token ids in, hypotheses out.

`torch_engine` is the reference, `native_engine` the fast one. This module does not import torch, so that translation
with the native library starts without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from transduce.config.decoding import DecodingOptions, DecodingSettings
from transduce.config.section import MAX_TOKENS
from transduce.data.examples import Example, Ids, RowExample
from transduce.errors import SettingsError
from transduce.text.special import BOS, EOS, PAD

OnToken = Callable[[int, int], None]
"""Called with the place of an input and the next token of its best hypothesis, once the token is final."""


@dataclass(frozen=True, slots=True)
class DecodingInput:
    """Token ids to translate or to continue, or vectors [S, N] to translate.

    `key` identifies it: what is drawn for it is a function of the seed and the key. `limit`: most new tokens.
    `prefix`: tokens that every output starts with; they count in its length, its log-probability and `limit`.
    `allowed`: for `DecodingOptions.shortlist`, the tokens of the output, ascending, with the prefix; None: all.
    """

    key: tuple[int, ...]
    ids: Ids
    limit: int
    prefix: tuple[int, ...] = ()
    allowed: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.limit <= MAX_TOKENS:
            raise SettingsError(f"limit = {self.limit}: must be from 1 to {MAX_TOKENS:,} tokens")
        if len(self.prefix) > self.limit:
            raise SettingsError(f"a prefix of {len(self.prefix)} tokens: longer than the limit of {self.limit} tokens")
        if any(special in self.prefix for special in (PAD, BOS, EOS)):
            raise SettingsError("a prefix must not contain padding, the start or the end of a sentence")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output. `ids` without special ids; the end of the sentence counts in `log_prob` and in the length.

    log_prob: sum of the log-probabilities (nats) of its tokens. score: log_prob / length ** length_penalty.
    finished: False where the output was cut off at the length limit, before an end of sentence.
    attention: of the head that was trained to align, where the search kept it: [ids, source ids and their end], at the
    step that reads the id; zeros for the last id of an output that was cut off.
    """

    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True
    attention: np.ndarray | None = field(default=None, compare=False, repr=False)


BATCH_TOKENS = DecodingSettings().batch_tokens
"""Tokens that are scored at once, padding included, if nothing else is asked for."""

PATIENCE = 60.0
"""Seconds after which an input without a deadline is as urgent as one whose deadline is now."""

Outcome = Literal["done", "tokens", "cancelled", "expired", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("done", "tokens", "cancelled", "expired", "failed")
"""All but `tokens` are the end of an input. The order is that of the codes of the native library."""


@dataclass(frozen=True, slots=True)
class Event:
    """News of an input that was submitted.

    Attributes:
        ticket: Its number.
        outcome: done, cancelled, expired or failed, once each; before it `tokens`, any number of times.
        hypotheses: done: as `Engine.translate` returns them.
        tokens: tokens: the next ones of the best hypothesis, which are final.
        reason: failed: why.
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
        deadline: float,
        stream: bool,
    ) -> None:
        """Add inputs with the tickets first_ticket, first_ticket + 1, ...; all or, with an error, none.

        One event that is an end follows for each. `deadline`: a time of `time.monotonic`, infinite for none. `stream`:
        deliver `tokens` too, where possible.
        """

    def cancel(self, ticket: int) -> None:
        """End an input at the next step; no effect if it has ended."""

    def workload(self) -> dict[str, int]:
        """Amount of work at hand: at least `n_waiting`, inputs of which nothing is decoded yet."""

    async def close(self) -> None:
        """Cancel all, and deliver their ends. Nothing may be submitted after it."""


def sample_numbers(seed: Sequence[int], sample: int, n: int) -> np.ndarray:
    """Numbers of [0, 1) for n tokens of a sample: a function of the seed and the sample's number only."""
    return np.random.default_rng([*seed, sample]).random(n)


@runtime_checkable
class Engine(Protocol):
    """A model as `Translator` and `Generator` use it. Safe to call from several threads."""

    @property
    def device(self) -> str:
        """The device of the engine, by PyTorch's names: cpu, cuda:0."""

    def pytorch_model(self) -> Any:
        """The PyTorch model, in eval mode. An engine that does not use it loads it when it is first asked for."""

    def translate(
        self, sources: Sequence[DecodingInput], options: DecodingOptions, *, on_token: OnToken | None = None
    ) -> list[list[Hypothesis]]:
        """`options.n_best` hypotheses per source, best first, or samples. All options count, given or not.

        A language model draws one continuation per source, whose tokens `on_token` sees as they are drawn. Of a search,
        only the native library calls it.
        """

    def open_batcher(self, deliver: Deliver) -> Batcher:
        """Start what decodes for a `DecodingQueue`. The running event loop calls `deliver`."""

    def score(self, pairs: Sequence[Example], *, batch_tokens: int = BATCH_TOKENS) -> list[list[float]]:
        """Log-probabilities (nats) of every target token and of the end, given the source."""

    def attention(self, pairs: Sequence[Example], heads: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Weights of cross-attention of a Transformer for each pair: [heads, targets, sources], with both ends.

        `heads`: (decoder layer, head), from 0. Row t reads target token t - 1 and predicts target token t.
        """

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int = BATCH_TOKENS
    ) -> list[list[float]]:
        """Log-probabilities (nats) of every target of rows of running text; see `collate_rows` for `separate`."""
