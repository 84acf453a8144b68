"""Settings of the encoder-decoder Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.attention import DecoderSettings, SourceSettings
from transduce.config.model.base import Blocks, Preset

_FAST: Preset = {"n_encoder_layers": 6, "n_decoder_layers": 2, "decoder_self": "ssru"}  # Kim et al. 2019


class TransformerSettings(DecoderSettings, SourceSettings):
    """The encoder-decoder Transformer (Vaswani et al. 2017)."""

    task = "translation"
    presets: ClassVar[Mapping[str, Preset]] = {
        name: {"n_encoder_layers": n, "n_decoder_layers": n, "d_model": d, "d_ff": ff, "n_heads": h}
        for name, n, d, ff, h in (
            ("tiny", 4, 128, 256, 4),
            ("small", 4, 256, 1024, 4),
            ("base", 6, 512, 2048, 8),
            ("big", 6, 1024, 4096, 16),
        )
    } | {
        name: {**_FAST, "d_model": d, "d_ff": ff, "n_heads": h}
        for name, d, ff, h in (("fast-small", 256, 1024, 4), ("fast", 512, 2048, 8))
    }

    kind: Literal["transformer"] = Field("transformer", description="Architecture: an encoder and a decoder.")
    n_encoder_layers: Blocks = Field(4, description="Number of encoder blocks.")
    n_decoder_layers: Blocks = Field(4, ge=1, description="Number of decoder blocks.")
    encoder_pattern: str = Field(
        "full", description="Who attends to whom in the encoder: full, local, strided or fixed (Child et al. 2019)."
    )
    decoder_self: str = Field(
        "attention", description="How the decoder uses earlier tokens: attention, or ssru (a recurrent unit, faster)."
    )

    @property
    def replaces_self_attention(self) -> bool:
        return self.decoder_self == "ssru"

    @property
    def n_attentions(self) -> int:
        return self.n_encoder_layers + 2 * self.n_decoder_layers
