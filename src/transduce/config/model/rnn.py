"""Settings of the recurrent encoder-decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from transduce.config.model.base import OutputSettings, Preset

Layers = Annotated[int, Field(ge=1, le=1024)]


class RecurrentSettings(OutputSettings):
    """An encoder and a decoder of recurrent units (Sutskever et al. 2014; Bahdanau et al. 2015; Luong et al. 2015)."""

    task = "translation"
    presets: ClassVar[Mapping[str, Preset]] = {
        f"rnn-{name}": {"d_model": d, "d_hidden": hidden, "n_encoder_layers": n, "n_decoder_layers": n}
        for name, d, hidden, n in (("tiny", 128, 256, 1), ("small", 256, 512, 1), ("base", 512, 1024, 2))
    }

    kind: Literal["rnn"] = Field("rnn", description="Architecture: a recurrent encoder and decoder.")
    cell: str = Field("lstm", description="Recurrent unit: lstm or gru.")
    attention: str = Field(
        "general", description="Attention to the source: bahdanau, dot, general, concat (Luong) or none (Sutskever)."
    )
    input_feeding: bool = Field(True, description="Feed each attentional vector to the next step (Luong).")
    direction: str = Field(
        "both", description="Reading direction of the encoder: both (each has half of d_hidden), forward or backward."
    )
    bridge: str = Field("dense", description="The decoder's first state: dense (of the encoder's last) or copy.")
    readout_scale: float = Field(
        4.0, gt=0, le=1e4, description="Factor of the readout, which tanh bounds, before the output matrix."
    )
    d_hidden: int = Field(256, ge=1, le=1 << 16, description="Width of the state of each layer.")
    n_encoder_layers: Layers = Field(1, description="Number of encoder layers.")
    n_decoder_layers: Layers = Field(1, description="Number of decoder layers.")

    @property
    def n_gates(self) -> int:
        """Matrices of a recurrent unit."""
        return 3 if self.cell == "gru" else 4

    @property
    def summary(self) -> str:
        size = f"{'+'.join(map(str, self.depth))} layers, d_model {self.d_model}, d_hidden {self.d_hidden}"
        return f"{self.kind}, {self.cell}, {size}, attention {self.attention}"

    @property
    def layer_parameters(self) -> int:
        """Each unit has a matrix for its input and one for its state; a decoder also the context and the readout."""
        d, hidden = self.d_model, self.d_hidden
        first = (hidden // (2 if self.direction == "both" else 1)) + d
        encoder = self.n_gates * hidden * (first + (self.n_encoder_layers - 1) * 2 * hidden)
        decoder = self.n_gates * hidden * (hidden + 2 * d + (self.n_decoder_layers - 1) * 2 * hidden)
        return encoder + decoder + hidden * (hidden + 2 * d)

    @property
    def layer_activations(self) -> int:
        """Gates and states of each layer, and of attention a vector for each of 32 source tokens."""
        n = (self.n_gates + 4) * sum(self.depth)
        return n * self.d_hidden + 4 * self.d_model + (0 if self.attention == "none" else 34 * self.d_hidden)
