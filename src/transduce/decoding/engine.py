"""The engine protocol: token ids in, hypotheses out.

`torch_engine` is the reference, `native_engine` the fast one. This module does not import torch, so that translation
with the native library starts without it.
"""

from __future__ import annotations

import math
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from transduce.config import DecodingSettings
from transduce.config.section import MAX_TOKENS
from transduce.data.examples import Example, Ids, RowExample
from transduce.decoding.options import Sampling, TranslationOptions
from transduce.errors import SettingsError
from transduce.text.special import BOS, EOS, PAD

Watch = Callable[[list[int], list[list[int]]], None]
"""Called after each step with the places of the active sentences and the token of each of their samples (0: ended)."""


@dataclass(frozen=True, slots=True)
class Source:
    """Token ids to translate or to continue, or vectors [S, N] to translate.

    `key` identifies it: what is drawn for it is a function of the seed and the key. `limit`: most new tokens.
    `prefix`: tokens that every output starts with; they count in its length, its log-probability and `limit`.
    `allowed`: for `TranslationOptions.shortlist`, the tokens of the output, ascending, with the prefix; None: all.
    """

    key: tuple[int, ...]
    ids: Ids
    limit: int
    prefix: tuple[int, ...] = ()
    allowed: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.limit > MAX_TOKENS:
            raise SettingsError(f"limit = {self.limit}: at most {MAX_TOKENS:,} tokens are allowed")
        if len(self.prefix) > self.limit:
            raise SettingsError(f"a prefix of {len(self.prefix)} tokens: longer than the limit of {self.limit} tokens")
        if any(special in self.prefix for special in (PAD, BOS, EOS)):
            raise SettingsError("a prefix must not contain padding, the start or the end of a sentence")


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output. `ids` without special ids; the end of the sentence counts in `log_prob` and in the length.

    log_prob: sum of the log-probabilities (nats) of its tokens. score: log_prob / length ** length_penalty.
    finished: False where the output was cut off at the length limit, before an end of sentence.
    """

    ids: tuple[int, ...]
    log_prob: float
    score: float
    finished: bool = True


MOST_SOURCE = (1 << 16) - 1
"""Most tokens of a source: the memory of attention grows with the square of their number."""

PATIENCE = 60.0
"""Seconds after which a sentence without a deadline is as urgent as one whose deadline is now."""

Outcome = Literal["done", "tokens", "cancelled", "expired", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("done", "tokens", "cancelled", "expired", "failed")
"""All but `tokens` are the end of a sentence. The order is that of the codes of the native library."""


@dataclass(frozen=True, slots=True)
class Event:
    """What came of a sentence.

    Attributes:
        ticket: Its number.
        outcome: done, cancelled, expired or failed, once each; before it `tokens`, any number of times.
        hypotheses: done: as `Engine.translate` returns them.
        tokens: tokens: those that the best hypothesis continues with, whatever comes.
        reason: failed: why.
    """

    ticket: int
    outcome: Outcome
    hypotheses: list[Hypothesis] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    reason: str = ""


Deliver = Callable[[Event], object]


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A sentence to translate. `deadline`: a time of `time.monotonic`; infinite: none."""

    ticket: int
    source: Source
    options: TranslationOptions
    deadline: float
    stream: bool
    submitted: float

    @property
    def urgency(self) -> tuple[float, int, int]:
        """Sorts by deadline, then the longest first, then by arrival."""
        due = self.submitted + PATIENCE if self.deadline == math.inf else self.deadline
        return due, -len(self.source.ids), self.ticket


@runtime_checkable
class Backend(Protocol):
    """Translates orders with threads of its own, until it is closed."""

    def takes(self, source: Source, options: TranslationOptions) -> bool:
        """Whether it can do this."""

    def submit(self, order: Order) -> None:
        """Start; one event that is an end follows, perhaps before this returns. Errors: nothing follows."""

    def cancel(self, ticket: int) -> None:
        """End a sentence at the next step; no effect if it has ended."""

    def workload(self) -> Mapping[str, int]:
        """Amount of work at hand: at least `n_waiting`, sentences of which nothing is decoded yet."""

    def close(self) -> None:
        """Cancel all, and end the threads when they have delivered their events."""


def sample_numbers(seed: Sequence[int], sample: int, n: int) -> np.ndarray:
    """Numbers of [0, 1) for n tokens of a sample: a function of the seed and the sample's number only."""
    return np.random.default_rng([*seed, sample]).random(n)


@runtime_checkable
class Engine(Protocol):
    """What `Translator` and `Generator` need of a model. Safe to call from several threads."""

    @property
    def settings(self) -> DecodingSettings:
        """The values of options that are not given."""

    @property
    def device(self) -> str:
        """Where the engine computes, by PyTorch's names: cpu, cuda:0."""

    def pytorch_model(self) -> Any:
        """The PyTorch model, in eval mode. An engine that does not use it loads it when it is first asked for."""

    def translate(self, sources: Sequence[Source], options: TranslationOptions) -> list[list[Hypothesis]]:
        """`options.n_best` hypotheses per source, best first; drawn instead where `options.sampling` is set.

        A language model draws one continuation per source.
        """

    def backends(self, deliver: Deliver, loop: AbstractEventLoop | None) -> Sequence[Backend]:
        """What translates for a `TranslationQueue`: the first that takes a sentence gets it, and the last takes all.

        `loop`: where events are delivered; None: in threads of the backends.
        """

    def sample(
        self, prompts: Sequence[Source], sampling: Sampling, *, seed: int, watch: Watch | None = None
    ) -> list[Hypothesis]:
        """One continuation per prompt."""

    def score(self, pairs: Sequence[Example], *, batch_tokens: int | None = None) -> list[list[float]]:
        """Log-probabilities (nats) of every target token and of the end, given the source."""

    def score_rows(
        self, rows: Sequence[RowExample], *, separate: bool, batch_tokens: int | None = None
    ) -> list[list[float]]:
        """Log-probabilities (nats) of every target of rows of running text; see `collate_rows` for `separate`."""
