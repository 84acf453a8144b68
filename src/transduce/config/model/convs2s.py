"""Settings of the convolutional encoder-decoder."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from transduce.config.model.base import Blocks, OutputSettings, PositionSettings, Preset


class ConvS2SSettings(OutputSettings, PositionSettings):
    """Gated convolutions with attention in every decoder layer (Gehring et al. 2017)."""

    task = "translation"
    presets: ClassVar[dict[str, Preset]] = {
        f"convs2s-{name}": {"n_encoder_layers": n, "n_decoder_layers": m, "d_model": d, "d_conv": d}
        for name, n, m, d in (("tiny", 6, 5, 128), ("small", 4, 3, 256), ("base", 20, 20, 512))
    }

    kind: Literal["convs2s"] = Field("convs2s", description="Architecture: a convolutional encoder and decoder.")
    n_encoder_layers: Blocks = Field(6, description="Number of gated convolutions of the encoder.")
    n_decoder_layers: Blocks = Field(5, ge=1, description="Number of gated convolutions with attention of the decoder.")
    d_conv: int = Field(128, ge=1, le=1 << 16, description="Width of the convolutions.")
    kernel_size: int = Field(3, ge=1, le=1024, description="Number of positions that a convolution sees.")
    positions: str = Field("learned", description="Positional scheme: learned (paper) or none.")

    @property
    def summary(self) -> str:
        layers = f"{self.n_encoder_layers}+{self.n_decoder_layers} layers"
        width = f"d_model {self.d_model}, d_conv {self.d_conv}"
        return f"{self.kind}, {layers}, {width}, kernel size {self.kernel_size}, {self.positions} positions"

    @property
    def layer_parameters(self) -> int:
        """One matrix per convolution, two more per attention layer, two per stack."""
        convolutions = 2 * self.kernel_size * self.d_conv**2 * sum(self.depth)
        return convolutions + 2 * (self.n_decoder_layers + 2) * self.d_model * self.d_conv

    @property
    def layer_activations(self) -> int:
        """Windows and gates; the scores and weights of attention count as if there were 128 source positions."""
        convolutions = (self.kernel_size + 6) * self.d_conv * sum(self.depth)
        return convolutions + self.n_decoder_layers * (4 * self.d_conv + 3 * 128)
