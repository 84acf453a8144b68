"""Decoding options: one frozen object that goes unchanged from the CLI or the Python API to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from transduce.config.section import MAX_BATCH, MAX_BEAM, MAX_PENALTY, MAX_SEED, MAX_TOKENS
from transduce.config.settings import DecodingSettings
from transduce.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens: the logits are divided by `temperature`, then cut to the `top_k`, then to the `top_p` best.

    A temperature of 0 takes the most likely token; `top_k` 0 and `top_p` 1 keep all tokens. No n-gram of
    `no_repeat_ngram` tokens is drawn that occurs in the prompt or the output before; 0: off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    no_repeat_ngram: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 1e9)
        _check("top_k", self.top_k, 0, 1 << 31)
        _check("top_p", self.top_p, 0, 1)
        _check("no_repeat_ngram", self.no_repeat_ngram, 0, MAX_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationOptions:
    """How to translate. None: the run's `decoding` settings.

    Args:
        beam: Hypotheses kept; 1 is greedy search. None widens the run's beam to `n_best` where that is larger.
        n_best: Translations returned per sentence.
        max_length: Longest output in tokens. None: the run's setting, at most twice the source and 16 more.
        length_penalty: Exponent of the length that divides the log-probability of a hypothesis.
        no_repeat_ngram: No sequence of this many tokens occurs twice in an output; 0: off.
        sampling: Draw translations instead of searching for the best ones.
        seed: Seed of what is drawn.
        batch_tokens: Padded source tokens decoded at once.
        shortlist: Only tokens of a sentence's shortlist have a probability (see `transduce shortlist`): faster.
        scores: False: an engine may leave out log-probabilities and scores (0 instead); greedy search is then faster.
    """

    beam: int | None = None
    n_best: int = 1
    max_length: int | None = None
    length_penalty: float | None = None
    no_repeat_ngram: int | None = None
    sampling: Sampling | None = None
    seed: int = 1
    batch_tokens: int | None = None
    shortlist: bool = False
    scores: bool = True

    def __post_init__(self) -> None:
        _check("beam", self.beam, 1, MAX_BEAM)
        _check("n_best", self.n_best, 1, MAX_BEAM)
        _check("max_length", self.max_length, 1, MAX_TOKENS)
        _check("length_penalty", self.length_penalty, 0, MAX_PENALTY)
        _check("no_repeat_ngram", self.no_repeat_ngram, 0, MAX_TOKENS)
        _check("seed", self.seed, 0, MAX_SEED)
        _check("batch_tokens", self.batch_tokens, 1, MAX_BATCH)
        if self.sampling is not None and (self.beam, self.length_penalty) != (None, None):
            raise SettingsError("beam and length_penalty have no effect on sampling; leave them out, or do not sample")
        if self.sampling is not None and self.no_repeat_ngram is not None:
            raise SettingsError("no_repeat_ngram: give it to the sampling, Sampling(no_repeat_ngram=...)")
        if self.sampling is not None and self.shortlist:
            raise SettingsError("a shortlist is for greedy and beam search; leave it out, or do not sample")
        if self.beam is not None and self.n_best > self.beam:
            raise SettingsError(f"n_best = {self.n_best}: more than beam = {self.beam}; raise the beam")

    def over(self, settings: DecodingSettings) -> DecodingSettings:
        """`settings` with the values that are given here."""
        names = ("max_length", "length_penalty", "no_repeat_ngram", "batch_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        beam = max(settings.beam, self.n_best) if self.beam is None else self.beam
        return settings.model_copy(update=given | {"beam": beam})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How to continue prompts.

    Args:
        max_length: Most new tokens. None: the run's `decoding.max_length`.
        sampling: How tokens are drawn.
        seed: Seed of what is drawn.
        n_samples: Texts per prompt.
        cut_prompt: Cut the beginning off a prompt that is longer than the model's context instead of refusing it.
    """

    max_length: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 1
    n_samples: int = 1
    cut_prompt: bool = False

    def __post_init__(self) -> None:
        _check("max_length", self.max_length, 1, MAX_TOKENS)
        _check("seed", self.seed, 0, MAX_SEED)
        _check("n_samples", self.n_samples, 1, 1 << 31)


def _check(name: str, value: float | None, least: int, most: float) -> None:
    if value is not None and not least <= value <= most:  # nan too
        raise SettingsError(f"{name} = {value}: must be from {least} to {most:,.0f}")
