"""Decoding options of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from transduce.config import MAX_BATCH, MAX_BEAM, MAX_PENALTY, MAX_SEED, MAX_TOKENS
from transduce.decoding.generator import Generator
from transduce.decoding.results import Generation
from transduce.decoding.sample import Sampling
from transduce.decoding.translator import Translation, Translator
from transduce.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Search:
    """How to look for translations; None is what the run's settings say. With `sampling` they are drawn instead."""

    beam: int | None = None
    n_best: int = 1
    max_length: int | None = None
    length_penalty: float | None = None
    batch_tokens: int | None = None
    sampling: Sampling | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        temperature = 1.0 if self.sampling is None else self.sampling.temperature
        if not 0 <= temperature < math.inf:  # nan too
            raise SettingsError(f"temperature {temperature}: must be a number, at least 0")
        if self.sampling is not None and (self.beam, self.length_penalty) != (None, None):
            raise SettingsError("samples are drawn, not searched: --beam and --length-penalty do not go with --sample")
        for name, value, most in (
            ("--beam", self.beam, MAX_BEAM),
            ("--nbest", self.n_best, MAX_BEAM),
            ("--max-length", self.max_length, MAX_TOKENS),
            ("--length-penalty", self.length_penalty, MAX_PENALTY),
            ("--batch-tokens", self.batch_tokens, MAX_BATCH),
            ("--seed", self.seed, MAX_SEED),
        ):
            if value is not None and not 0 <= value <= most:
                raise SettingsError(f"{name} {value}: must be a number, at most {most:,}")

    def __call__(self, translator: Translator, lines: Iterable[str]) -> Iterator[Translation]:
        """The translations of the lines, in order, as a stream."""
        if self.sampling is not None:
            return translator.sample(
                lines,
                sampling=self.sampling,
                seed=self.seed,
                n_best=self.n_best,
                max_length=self.max_length,
                batch_tokens=self.batch_tokens,
            )
        return translator.translate_lines(
            lines,
            beam=self.beam,
            n_best=self.n_best,
            max_length=self.max_length,
            length_penalty=self.length_penalty,
            batch_tokens=self.batch_tokens,
        )


@dataclass(frozen=True, slots=True)
class Asking:
    """Options for generating text."""

    max_length: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    n_samples: int = 1
    cut_prompt: bool = False

    def __call__(self, generator: Generator, prompts: Sequence[str]) -> list[Generation]:
        """The texts of these prompts."""
        return generator.generate(
            prompts,
            max_length=self.max_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            n_samples=self.n_samples,
            cut_prompt=self.cut_prompt,
        )

    def stream(self, generator: Generator, prompt: str) -> Iterator[str]:
        """The text of one prompt, as it comes."""
        return generator.stream(
            prompt,
            max_length=self.max_length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            cut_prompt=self.cut_prompt,
        )
