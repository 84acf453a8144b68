"""The settings of each architecture: one class with only the fields that it has, and named sizes (presets).

Nothing here imports torch, so that a wrong recipe is refused at once. `transduce.models.registry` has the code of each
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from transduce.config.model import (
    AttentionSettings,
    Blocks,
    BlockSettings,
    DecoderSettings,
    OutputSettings,
    PositionSettings,
    Preset,
    SourceSettings,
)
from transduce.config.section import MAX_TOKENS

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
    def guided_head(self) -> tuple[int, int]:
        """Decoder layer (the last but one) and head that `training.guided_alignment` trains (Garg et al. 2019)."""
        return max(0, self.n_decoder_layers - 2), 0

    @property
    def n_attentions(self) -> int:
        return self.n_encoder_layers + 2 * self.n_decoder_layers


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


class StarSettings(DecoderSettings):
    """The encoder of Guo et al. 2019 with a Transformer's decoder.

    The form of the encoder is fixed: norm and its epsilon, residual connections, key widths, numbers of key heads,
    projections and feed-forward networks are the decoder's.
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
    positions: str = Field("sinusoidal", description="Positional scheme: sinusoidal, learned or none.")
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


_BERT: Preset = {
    "activation": "gelu",
    "attention_dropout": 0.1,
    "norm_eps": 1e-12,
    "embedding_norm": True,
    "scale_embeddings": False,
    "positions": "learned",
    "max_positions": 512,
    "n_segments": 2,
    "output_bias": True,
}


class EncoderSettings(AttentionSettings):
    """An encoder without a decoder (Devlin et al. 2019, BERT): what its variants share."""

    presets: ClassVar[Mapping[str, Preset]] = {
        f"bert-{name}": {**_BERT, "n_encoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": d // 64}
        for name, n, d in (("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("base", 12, 768))
    }

    n_encoder_layers: Blocks = Field(4, description="Number of encoder blocks.")
    encoder_pattern: str = Field(
        "full", description="Who attends to whom in the encoder: full, local, strided or fixed (Child et al. 2019)."
    )
    n_segments: int = Field(0, ge=0, le=1024, description="Number of learned segment embeddings; 0: none.")


class BertSettings(EncoderSettings, OutputSettings):
    """A masked language model."""

    task = "masked"

    kind: Literal["bert"] = Field("bert", description="Architecture: an encoder that predicts masked tokens.")
    next_sentence: bool = Field(False, description="Also predict whether segment B follows A in the text (BERT).")


class PoolingSettings(EncoderSettings):
    """Settings of encoders that give one vector per text."""

    pooling: str = Field("first", description="Vector of a text: first token ([CLS], BERT), mean, max or conv (CNN).")


class BertEncoderSettings(PoolingSettings):
    """An encoder without a head, as imported."""

    task = "encoding"

    kind: Literal["bert-encoder"] = Field("bert-encoder", description="Architecture: an encoder without a head.")


class BertClassifierSettings(PoolingSettings, SourceSettings):
    """A classifier of texts; with `source` = "vectors" a Vision Transformer (Dosovitskiy et al. 2021)."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        **EncoderSettings.presets,
        "cnn": {"n_encoder_layers": 0, "positions": "none", "scale_embeddings": False, "pooling": "conv"},  # Kim 2014
    }

    kind: Literal["bert-classifier"] = Field("bert-classifier", description="Architecture: an encoder and a label.")
    n_labels: int | None = Field(None, ge=2, le=1 << 20, description="Number of labels (default: from the data).")
