"""Settings of the Star-Transformer: as a classifier, and as the encoder of an encoder-decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.attention import DecoderSettings
from transduce.config.model.base import Blocks, PositionSettings, Preset


class StarSettings(DecoderSettings):
    """The encoder of Guo et al. 2019 with a Transformer's decoder.

    The form of the encoder is fixed: norm, residual connections, key widths, numbers of key heads and feed-forward
    networks are the decoder's.
    """

    task = "translation"
    presets: ClassVar[Mapping[str, Preset]] = {
        f"star-{name}": {"n_encoder_layers": 6, "n_decoder_layers": 4, "d_model": d, "d_ff": ff, "n_heads": 4}
        for name, d, ff in (("tiny", 128, 256), ("small", 256, 1024))
    }

    kind: Literal["star"] = Field(
        "star",
        description="Architecture: a Star-Transformer encoder, of fixed form, and a decoder.",
    )
    n_encoder_layers: Blocks = Field(6, description="Number of rounds of the encoder.")
    n_decoder_layers: Blocks = Field(4, ge=1, description="Number of decoder blocks.")

    @property
    def n_attentions(self) -> int:
        """Two in each round and in each decoder block."""
        return 2 * sum(self.depth)

    @property
    def layer_parameters(self) -> int:
        """Four matrices per attention, two per feed-forward network; the encoder has none."""
        return 4 * self.n_attentions * self.d_model**2 + 2 * self.n_decoder_layers * self.d_model * self.d_ff


class StarClassifierSettings(PositionSettings):
    """A text classifier (Guo et al. 2019)."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        f"star-classifier-{name}": {"n_encoder_layers": n, "d_model": d, "n_heads": d // 32}
        for name, n, d in (("tiny", 2, 128), ("mini", 2, 256), ("small", 4, 320))
    }

    kind: Literal["star-classifier"] = Field("star-classifier", description="Architecture: a star and a label.")
    n_encoder_layers: Blocks = Field(2, description="Number of rounds.")
    n_heads: int = Field(4, ge=1, le=1 << 16, description="Number of attention heads.")
    positions: str = Field("learned", description="Positional scheme: learned (paper), sinusoidal or none.")
    n_segments: int = Field(2, ge=0, le=1024, description="Number of learned segment embeddings; 0: none.")
    n_labels: int | None = Field(None, ge=2, le=1 << 20, description="Number of labels (default: from the data).")

    @property
    def width_step(self) -> int:
        return 2 * self.n_heads

    @property
    def summary(self) -> str:
        size = f"{self.n_encoder_layers} rounds, d_model {self.d_model}, {self.n_heads} heads"
        return f"{self.kind}, {size}, {self.positions} positions"

    @property
    def layer_parameters(self) -> int:
        """Two attentions with four matrices each per round."""
        return 8 * self.n_encoder_layers * self.d_model**2

    @property
    def layer_activations(self) -> int:
        """Projections, and for each token five keys and five values."""
        return 30 * self.n_encoder_layers * self.d_model
