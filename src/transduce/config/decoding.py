"""Decoding options. `DecodingSettings` and `DecodingOptions` are the only list of options.

The `[decoding]` settings of a run, the options of `transduce translate`, `generate`, `evaluate` and `inspect`, the
fields of `POST /v1/translate`, the bounds and the arguments of the native library are made from their fields. To add an
option, add a field here, its type to `DecodingKeywords` (a test compares them), and implement it in the search.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from transduce.config.section import (
    MAX_BATCH,
    MAX_BEAM,
    MAX_PENALTY,
    MAX_SEED,
    MAX_TOKENS,
    Section,
    Traits,
    explain,
    name_in,
    setting,
    traits_of,
)
from transduce.errors import SettingsError

_TRANSLATION, _ALL = ("translation",), ("translation", "causal")
_SEARCH = Traits(tasks=_TRANSLATION, inherited=_TRANSLATION, decoding="search")
_SAMPLES = Traits(tasks=_ALL, inherited=_ALL, decoding="samples")
_BOTH = Traits(tasks=_ALL, inherited=_ALL)

_ELSEWHERE = {
    "num_beams": "beam", "beam_size": "beam", "num_return_sequences": "n_best", "num_hypotheses": "n_best",
    "nbest": "n_best", "max_new_tokens": "max_length", "max_decoding_length": "max_length",
    "lenpen": "length_penalty", "do_sample": "sample", "no_repeat_ngram_size": "no_repeat_ngram",
    "sampling_topk": "top_k", "sampling_topp": "top_p",
}  # fmt: skip
"""Names of options in Hugging Face's Transformers, CTranslate2 and fairseq, with the corresponding names here."""


class DecodingSettings(Section):
    """The `[decoding]` settings of a run: values of options that a call does not give."""

    beam: int = setting(5, "Number of beams; 1 is greedy search.", _SEARCH, ge=1, le=MAX_BEAM)
    length_penalty: float = setting(1.0, "Exponent of the length normalization.", _SEARCH, ge=0, le=MAX_PENALTY)
    max_length: int = setting(
        256,
        "Maximum output length in tokens; a translation of n source tokens also has at most 2 n + 16, "
        "unless the call gives a maximum.",
        _BOTH,
        ge=1,
        le=MAX_TOKENS,
    )
    no_repeat_ngram: int = setting(
        0, "No sequence of this many tokens occurs twice in an output; 0: off.", _BOTH, ge=0, le=MAX_TOKENS
    )
    temperature: float = setting(
        1.0, "Divides the logits; below 1 is sharper, 0 takes the most likely token.", _SAMPLES, ge=0, le=1e9
    )
    top_k: int = setting(0, "Sample from the k most likely tokens; 0: all.", _SAMPLES, ge=0, le=(1 << 31) - 1)
    top_p: float = setting(
        1.0, "Sample from the fewest most likely tokens of total probability p.", _SAMPLES, ge=0, le=1
    )
    split: bool | None = setting(
        None,
        "Translate each sentence of a line separately. Unset: if the training text has one sentence a line.",
        Traits(tasks=_TRANSLATION, inherited=_TRANSLATION),
    )
    batch_tokens: int = setting(
        4096, "Source tokens per batch where PyTorch decodes, padding included.", _BOTH, ge=1, le=MAX_BATCH
    )


class DecodingKeywords(TypedDict, total=False):
    """The fields of `DecodingOptions` as keyword arguments of a call, for type checkers and editors."""

    beam: int
    length_penalty: float
    max_length: int
    no_repeat_ngram: int
    temperature: float
    top_k: int
    top_p: float
    split: bool | None
    batch_tokens: int
    n_best: int
    sample: bool
    seed: int
    scores: bool


class DecodingOptions(DecodingSettings):
    """Options of translation and text generation. Unset options are the run's `decoding` settings.

    Without `max_length`, a translation also has at most twice the tokens of its source and 16 more. For
    `no_repeat_ngram`, n-grams of a prompt count too. An unset beam is at least `n_best`.

    Raises:
        SettingsError: A value is out of bounds, or options contradict each other.
    """

    n_best: int = setting(1, "Outputs per input.", ge=1, le=MAX_BEAM)
    sample: bool = setting(False, "Draw outputs instead of searching for the best ones.")
    seed: int = setting(1, "Seed of the random numbers.", Traits(decoding="samples"), ge=0, le=MAX_SEED)
    scores: bool = setting(True, "If false, log-probabilities may be left out; greedy search is faster.")

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, validate: ModelWrapValidatorHandler[DecodingOptions]) -> DecodingOptions:
        if isinstance(values, dict) and (theirs := next((name for name in values if name in _ELSEWHERE), None)):
            raise SettingsError(f"unknown key '{theirs}'; did you mean '{_ELSEWHERE[theirs]}'?")
        try:
            options = validate(values)
        except ValidationError as error:
            raise SettingsError(explain(error, cls), name_in(error)) from None
        given = options.model_fields_set
        other_kind = "search" if options.sample else "samples"
        if wrong := ", ".join(
            sorted(name for name in given if traits_of(cls.model_fields[name]).decoding == other_kind)
        ):
            advice = "leave it out, or do not sample" if options.sample else "add sample = true, or leave it out"
            raise SettingsError(
                f"{wrong}: no effect on {'samples' if options.sample else 'a search'}; {advice}", "sample"
            )
        if "beam" in given and options.n_best > options.beam:
            raise SettingsError(f"n_best = {options.n_best}: more than beam = {options.beam}; raise the beam", "n_best")
        return options

    def with_values(self, **decoding: Unpack[DecodingKeywords]) -> DecodingOptions:
        """Return a copy with the given values. Raises `SettingsError` for an unknown or invalid option."""
        return DecodingOptions(**{**self.model_dump(exclude_unset=True), **decoding}) if decoding else self

    def most_output(self, n_source: int) -> int:
        """Return the maximum output length: `max_length` and, if it is unset, at most 2 * `n_source` + 16 tokens."""
        return self.max_length if "max_length" in self.model_fields_set else min(self.max_length, 2 * n_source + 16)

    def over(self, settings: DecodingSettings) -> DecodingOptions:
        """Return complete options: unset options get their values from `settings`, the settings of a run.

        `model_fields_set` still contains only the options that were set.
        """
        given = self.model_fields_set
        others = [name for name in DecodingSettings.model_fields if name not in given]
        values = dict(self) | {name: getattr(settings, name) for name in others}
        if self.sample or "beam" not in given:
            values["beam"] = self.n_best if self.sample else max(values["beam"], self.n_best)
        return DecodingOptions.model_construct(_fields_set=given, **values)
