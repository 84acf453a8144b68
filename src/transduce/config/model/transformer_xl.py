"""Settings of Transformer-XL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.attention import BlockSettings
from transduce.config.model.base import Blocks, OutputSettings, Preset
from transduce.config.section import MAX_TOKENS


class TransformerXLSettings(BlockSettings, OutputSettings):
    """A causal language model that remembers earlier segments of its text (Dai et al. 2019)."""

    task = "causal"
    carries_state = True
    presets: ClassVar[Mapping[str, Preset]] = {
        f"transformer-xl-{name}": {
            **{"residual": "pre", "activation": "gelu"},
            **{"n_decoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": h},
        }
        for name, n, d, h in (("tiny", 4, 128, 4), ("small", 6, 384, 6))
    }

    kind: Literal["transformer-xl"] = Field("transformer-xl", description="Architecture: a decoder with a memory.")
    bias: bool = Field(True, description="Add biases in the feed-forward networks and norms; attention has none.")
    n_decoder_layers: Blocks = Field(4, ge=1, description="Number of decoder blocks.")
    segment_length: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Tokens that are read at once (default: data.context)."
    )
    memory_length: int = Field(
        128, ge=0, le=MAX_TOKENS, description="Tokens before a segment that it attends to in training; 0: none."
    )
    eval_memory_length: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS,
        description="The same in validation, evaluation and generation (default: memory_length).",
    )

    @property
    def own_context(self) -> int | None:
        return self.segment_length

    @property
    def remembered(self) -> int:
        """The memory of evaluation; it may be empty."""
        return self.memory_length if self.eval_memory_length is None else self.eval_memory_length

    @property
    def layer_activations(self) -> int:
        """With the weights of attention to a segment and a memory."""
        n_keys = 2 * (self.memory_length + (self.segment_length or 128))  # by content, and by distance
        return self.n_attentions * (24 * self.d_model + 4 * self.d_ff + n_keys * self.n_heads)
