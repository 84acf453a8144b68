"""Settings of the causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.attention import DecoderSettings
from transduce.config.model.base import Blocks, Preset

_GPT: Preset = {"residual": "pre", "activation": "gelu"}


class GPTSettings(DecoderSettings):
    """A decoder without an encoder: a causal language model (Radford et al. 2018, 2019)."""

    task = "causal"
    presets: ClassVar[Mapping[str, Preset]] = {
        "gpt-tiny": {**_GPT, "n_decoder_layers": 4, "d_model": 128, "d_ff": 512, "n_heads": 4},
        "gpt-small": {**_GPT, "n_decoder_layers": 6, "d_model": 384, "d_ff": 1536, "n_heads": 6},
        "gpt2": {
            **_GPT,
            **{"n_decoder_layers": 12, "d_model": 768, "d_ff": 3072, "n_heads": 12},
            **{"positions": "learned", "max_positions": 1024},
        },
    }

    kind: Literal["gpt"] = Field("gpt", description="Architecture: a decoder without an encoder.")
    n_decoder_layers: Blocks = Field(4, ge=1, description="Number of decoder blocks.")
    one_end: bool = Field(False, description="Read the begin-of-text token as the end-of-text token (GPT-2).")
