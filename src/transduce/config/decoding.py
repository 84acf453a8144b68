"""Decoding options. These two classes are the only list of them.

The `[decoding]` settings of a run, the options of `transduce translate`, `generate`, `evaluate` and `inspect`, the
fields of `POST /v1/translate`, the bounds and what the native library is given are made from their fields. A new option
is a field here and its implementation in the search.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from transduce.config.section import MAX_BATCH, MAX_BEAM, MAX_PENALTY, MAX_SEED, MAX_TOKENS, Section, explain
from transduce.errors import SettingsError

OF_SEARCH = frozenset({"beam", "length_penalty", "shortlist"})
"""Options without effect on samples."""
OF_SAMPLES = frozenset({"temperature", "top_k", "top_p", "seed"})
"""Options without effect on a search."""


class DecodingSettings(Section):
    """A run's values of options that are not given."""

    beam: int = Field(5, ge=1, le=MAX_BEAM, description="Number of beams; 1 is greedy search.")
    length_penalty: float = Field(1.0, ge=0, le=MAX_PENALTY, description="Exponent of the length normalization.")
    max_length: int = Field(
        256,
        ge=1,
        le=MAX_TOKENS,
        description="Maximum output length in tokens; a translation of n source tokens also has at most 2 n + 16, "
        "unless the call gives a maximum.",
    )
    no_repeat_ngram: int = Field(
        0, ge=0, le=MAX_TOKENS, description="No sequence of this many tokens occurs twice in an output; 0: off."
    )
    temperature: float = Field(
        1.0, ge=0, le=1e9, description="Divides the logits; below 1 is sharper, 0 takes the most likely token."
    )
    top_k: int = Field(0, ge=0, le=(1 << 31) - 1, description="Sample from the k most likely tokens; 0: all.")
    top_p: float = Field(
        1.0, ge=0, le=1, description="Sample from the fewest most likely tokens of total probability p."
    )
    batch_tokens: int = Field(
        4096, ge=1, le=MAX_BATCH, description="Source tokens per batch where PyTorch decodes, padding included."
    )


class DecodingOptions(DecodingSettings):
    """Options of translation and text generation. Unset ones are those of the run's `decoding` settings.

    Raises `SettingsError` for values out of bounds, and for options that contradict each other. Without `max_length`,
    a translation also has at most twice the tokens of its source and 16 more. An n-gram of a prompt counts as one of
    the output. A beam that is not given is at least `n_best`.
    """

    n_best: int = Field(1, ge=1, le=MAX_BEAM, description="Outputs per input.")
    sample: bool = Field(False, description="Draw outputs instead of searching for the best ones.")
    seed: int = Field(1, ge=0, le=MAX_SEED, description="Seed of what is drawn.")
    shortlist: bool = Field(
        False,
        description="Only tokens of a sentence's shortlist have a probability; faster with beams (see transduce "
        "shortlist).",
    )
    scores: bool = Field(True, description="If false, log-probabilities may be left out; greedy search is faster.")

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, validate: ModelWrapValidatorHandler[DecodingOptions]) -> DecodingOptions:
        if isinstance(values, dict):
            values = {name: value for name, value in values.items() if value is not None}  # null: not given
        try:
            options = validate(values)
        except ValidationError as error:
            raise SettingsError(explain(error, cls)) from None
        given = options.model_fields_set
        if wrong := ", ".join(sorted(given & (OF_SEARCH if options.sample else OF_SAMPLES))):
            advice = "leave it out, or do not sample" if options.sample else "add sample = true, or leave it out"
            raise SettingsError(f"{wrong}: no effect on {'samples' if options.sample else 'a search'}; {advice}")
        if "beam" in given and options.n_best > options.beam:
            raise SettingsError(f"n_best = {options.n_best}: more than beam = {options.beam}; raise the beam")
        return options

    def most_output(self, n_source: int) -> int:
        """Most tokens of the output of a source of n tokens: `max_length`; if that is not given, at most 2 n + 16."""
        return self.max_length if "max_length" in self.model_fields_set else min(self.max_length, 2 * n_source + 16)

    def over(self, settings: DecodingSettings) -> DecodingOptions:
        """All options: those given here, and the others from the settings of a run.

        `model_fields_set` still has those given here only.
        """
        given = self.model_fields_set
        others = [name for name in DecodingSettings.model_fields if name not in given]
        values = dict(self) | {name: getattr(settings, name) for name in others}
        if self.sample or "beam" not in given:
            values["beam"] = self.n_best if self.sample else max(values["beam"], self.n_best)
        return DecodingOptions.model_construct(_fields_set=given, **values)
