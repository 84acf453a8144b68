"""The settings of each architecture: a class with only the fields that the architecture has, and named sizes (presets).
At the end, the table of all architectures, by kind, task and preset.

Nothing here imports torch, so that a wrong recipe is refused at once. `transduce.models.registry` has the code of each
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import Field

from transduce.config.model import (
    OWN,
    SIZE,
    AttentionSettings,
    Blocks,
    BlockSettings,
    DecoderSettings,
    ModelSettings,
    OutputSettings,
    PositionSettings,
    Preset,
    SourceSettings,
)
from transduce.config.section import MAX_TOKENS, setting
from transduce.errors import SettingsError, nearest

_FAST: Preset = {"n_encoder_layers": 6, "n_decoder_layers": 2, "decoder_self": "ssru"}  # Kim et al. 2019


class TransformerSettings(DecoderSettings, SourceSettings):
    """Settings of the encoder-decoder Transformer (Vaswani et al. 2017)."""

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

    kind: Literal["transformer"] = setting("transformer", "Architecture: an encoder and a decoder.", OWN)
    n_encoder_layers: Blocks = setting(4, "Number of encoder blocks.", SIZE)
    n_decoder_layers: Blocks = setting(4, "Number of decoder blocks.", SIZE, ge=1)
    encoder_pattern: str = setting(
        "full", "Who attends to whom in the encoder: full, local, strided or fixed (Child et al. 2019)."
    )
    decoder_self: str = setting(
        "attention", "How the decoder uses earlier tokens: attention, or ssru (a recurrent unit, faster)."
    )

    one_end: bool = setting(False, "Read the begin-of-sentence token as the end-of-sentence token (M2M-100, BART).")
    source_end: bool = setting(True, "Let the encoder read the end-of-sentence token (not in OpenNMT-py).")
    language_last: bool = setting(
        False, "Give a source's first token, its language, the position after its end (mBART-25)."
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
Length = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class RecurrentSettings(OutputSettings):
    """Settings of recurrent encoder-decoders (Sutskever et al. 2014; Bahdanau et al. 2015; Luong et al. 2015)."""

    task = "translation"
    kept_values = 2
    presets: ClassVar[Mapping[str, Preset]] = {
        f"rnn-{name}": {"d_model": d, "d_hidden": hidden, "n_encoder_layers": n, "n_decoder_layers": n}
        for name, d, hidden, n in (("tiny", 128, 256, 1), ("small", 256, 512, 1), ("base", 512, 1024, 2))
    }

    kind: Literal["rnn"] = setting("rnn", "Architecture: a recurrent encoder and decoder.", OWN)
    cell: str = setting("lstm", "Recurrent unit: lstm or gru.")
    attention: str = setting(
        "general", "Attention to the source: bahdanau, dot, general, concat (Luong) or none (Sutskever)."
    )
    input_feeding: bool = setting(True, "Feed each attentional vector to the next step (Luong).")
    direction: str = setting(
        "both", "Reading direction of the encoder: both (each has half of d_hidden), forward or backward."
    )
    bridge: str = setting("dense", "The decoder's first state: dense (of the encoder's last) or copy.")
    readout_scale: float = setting(
        4.0, "Factor of the readout, which tanh bounds, before the output matrix.", gt=0, le=1e4
    )
    d_hidden: int = setting(256, "Width of the state of each layer.", ge=1, le=1 << 16)
    n_encoder_layers: Layers = setting(1, "Number of encoder layers.", SIZE)
    n_decoder_layers: Layers = setting(1, "Number of decoder layers.", SIZE)

    @property
    def n_gates(self) -> int:
        """Number of gates of a recurrent unit, including the candidate state."""
        return 3 if self.cell == "gru" else 4

    @property
    def layer_parameters(self) -> int:
        """Estimate: parameters of units (two matrices, for input and state), and of a decoder's context and readout."""
        d, hidden = self.d_model, self.d_hidden
        first = (hidden // (2 if self.direction == "both" else 1)) + d
        encoder = self.n_gates * hidden * (first + (self.n_encoder_layers - 1) * 2 * hidden)
        decoder = self.n_gates * hidden * (hidden + 2 * d + (self.n_decoder_layers - 1) * 2 * hidden)
        return encoder + decoder + hidden * (hidden + 2 * d)


class ConvS2SSettings(OutputSettings, PositionSettings):
    """Settings of ConvS2S: gated convolutions with attention in every decoder layer (Gehring et al. 2017)."""

    task = "translation"
    kept_values = 2
    presets: ClassVar[dict[str, Preset]] = {
        f"convs2s-{name}": {"n_encoder_layers": n, "n_decoder_layers": m, "d_model": d, "d_conv": d}
        for name, n, m, d in (("tiny", 6, 5, 128), ("small", 4, 3, 256), ("base", 20, 20, 512))
    }

    kind: Literal["convs2s"] = setting("convs2s", "Architecture: a convolutional encoder and decoder.", OWN)
    n_encoder_layers: Blocks = setting(6, "Number of gated convolutions of the encoder.", SIZE)
    n_decoder_layers: Blocks = setting(5, "Number of gated convolutions with attention of the decoder.", SIZE, ge=1)
    d_conv: int = setting(128, "Width of the convolutions.", ge=1, le=1 << 16)
    kernel_size: int = setting(3, "Number of positions that a convolution sees.", ge=1, le=1024)
    positions: str = setting("learned", "Positional scheme: learned (paper) or none.")

    @property
    def layer_parameters(self) -> int:
        """Estimate: parameters of one matrix per convolution, two more per attention layer, and two per stack."""
        convolutions = 2 * self.kernel_size * self.d_conv**2 * sum(self.depth)
        return convolutions + 2 * (self.n_decoder_layers + 2) * self.d_model * self.d_conv


class StarSettings(DecoderSettings):
    """Settings of an encoder-decoder with the Star-Transformer's encoder (Guo et al. 2019) and a Transformer's decoder.

    The form of the encoder is fixed. Settings of norms, residual connections, key widths, numbers of key heads,
    projections and feed-forward networks apply to the decoder only.
    """

    task = "translation"
    presets: ClassVar[Mapping[str, Preset]] = {
        f"star-{name}": {"n_encoder_layers": 6, "n_decoder_layers": 4, "d_model": d, "d_ff": ff, "n_heads": 4}
        for name, d, ff in (("tiny", 128, 256), ("small", 256, 1024))
    }

    kind: Literal["star"] = setting(
        "star", "Architecture: a Star-Transformer encoder, of fixed form, and a decoder.", OWN
    )
    positions: str = setting("sinusoidal", "Positional scheme: sinusoidal, learned or none.")
    n_encoder_layers: Blocks = setting(6, "Number of rounds of the encoder.", SIZE)
    n_decoder_layers: Blocks = setting(4, "Number of decoder blocks.", SIZE, ge=1)

    @property
    def n_attentions(self) -> int:
        """Number of attention sub-layers: two in each block of the encoder and two in each block of the decoder."""
        return 2 * sum(self.depth)

    @property
    def layer_parameters(self) -> int:
        """Estimate: four matrices per attention, two per feed-forward network of the decoder (the encoder has none)."""
        return 4 * self.n_attentions * self.d_model**2 + 2 * self.n_decoder_layers * self.d_model * self.d_ff


class StarClassifierSettings(PositionSettings):
    """Settings of the Star-Transformer as a text classifier (Guo et al. 2019)."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        f"star-classifier-{name}": {"n_encoder_layers": n, "d_model": d, "n_heads": d // 32}
        for name, n, d in (("tiny", 2, 128), ("mini", 2, 256), ("small", 4, 320))
    }

    kind: Literal["star-classifier"] = setting("star-classifier", "Architecture: a star and a label.", OWN)
    n_encoder_layers: Blocks = setting(2, "Number of rounds.", SIZE)
    n_heads: int = setting(4, "Number of attention heads.", SIZE, ge=1, le=1 << 16)
    positions: str = setting("learned", "Positional scheme: learned (paper), sinusoidal or none.")
    n_segments: int = setting(2, "Number of learned segment embeddings; 0: none.", ge=0, le=1024)
    n_labels: int | None = setting(None, "Number of labels (default: from the data).", OWN, ge=2, le=1 << 20)

    @property
    def layer_parameters(self) -> int:
        """Estimate: two attention sub-layers with four matrices each in every block."""
        return 8 * self.n_encoder_layers * self.d_model**2


_GPT: Preset = {"residual": "pre", "activation": "gelu"}


class GPTSettings(DecoderSettings):
    """Settings of GPT, a causal language model: a decoder without an encoder (Radford et al. 2018, 2019)."""

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

    kind: Literal["gpt"] = setting("gpt", "Architecture: a decoder without an encoder.", OWN)
    n_decoder_layers: Blocks = setting(4, "Number of decoder blocks.", SIZE, ge=1)
    one_end: bool = setting(False, "Read the begin-of-text token as the end-of-text token (GPT-2).")


class TransformerXLSettings(BlockSettings, OutputSettings):
    """Settings of Transformer-XL, a causal language model with a memory of earlier segments (Dai et al. 2019)."""

    task = "causal"
    carries_state = True
    presets: ClassVar[Mapping[str, Preset]] = {
        f"transformer-xl-{name}": {
            **{"residual": "pre", "activation": "gelu"},
            **{"n_decoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": h},
        }
        for name, n, d, h in (("tiny", 4, 128, 4), ("small", 6, 384, 6))
    }

    kind: Literal["transformer-xl"] = setting("transformer-xl", "Architecture: a decoder with a memory.", OWN)
    bias: bool = setting(True, "Add biases in the feed-forward networks and norms; attention has none.")
    n_decoder_layers: Blocks = setting(4, "Number of decoder blocks.", SIZE, ge=1)
    segment_length: Length | None = setting(None, "Tokens that are read at once (default: data.context).", ge=1)
    memory_length: Length = setting(128, "Tokens before a segment that it attends to in training; 0: none.", OWN)
    eval_memory_length: Length | None = setting(
        None, "Tokens of memory in validation, evaluation and generation (default: memory_length).", OWN
    )

    @property
    def own_context(self) -> int | None:
        return self.segment_length

    @property
    def remembered(self) -> int:
        return self.memory_length if self.eval_memory_length is None else self.eval_memory_length

    @property
    def layer_activations(self) -> int:
        """Estimate of values kept per token, including two scores, by content and by distance, per key in memory."""
        return super().layer_activations + 2 * self.n_attentions * self.memory_length * self.n_heads


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
    """Common settings of BERT's variants, which are encoders without a decoder (Devlin et al. 2019)."""

    presets: ClassVar[Mapping[str, Preset]] = {
        f"bert-{name}": {**_BERT, "n_encoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": d // 64}
        for name, n, d in (("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("base", 12, 768))
    }

    n_encoder_layers: Blocks = setting(4, "Number of encoder blocks.", SIZE)
    encoder_pattern: str = setting(
        "full", "Who attends to whom in the encoder: full, local, strided or fixed (Child et al. 2019)."
    )
    n_segments: int = setting(0, "Number of learned segment embeddings; 0: none.", ge=0, le=1024)


class BertSettings(EncoderSettings, OutputSettings):
    """Settings of BERT as a masked language model."""

    task = "masked"

    kind: Literal["bert"] = setting("bert", "Architecture: an encoder that predicts masked tokens.", OWN)
    next_sentence: bool = setting(False, "Also predict whether segment B follows A in the text (BERT).", OWN)


class PoolingSettings(EncoderSettings):
    """Settings of encoders that give one vector per text."""

    pooling: str = setting("first", "Vector of a text: first token ([CLS], BERT), mean, max or conv (CNN).", OWN)


class BertEncoderSettings(PoolingSettings):
    """Settings of an encoder without an output layer, as an import makes it."""

    task = "encoding"

    kind: Literal["bert-encoder"] = setting("bert-encoder", "Architecture: an encoder without a head.", OWN)


class BertClassifierSettings(PoolingSettings, SourceSettings):
    """Settings of BERT as a classifier; with `source` = "vectors" a Vision Transformer (Dosovitskiy et al. 2021)."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        **EncoderSettings.presets,
        "cnn": {"n_encoder_layers": 0, "positions": "none", "scale_embeddings": False, "pooling": "conv"},  # Kim 2014
    }

    kind: Literal["bert-classifier"] = setting("bert-classifier", "Architecture: an encoder and a label.", OWN)
    n_labels: int | None = setting(None, "Number of labels (default: from the data).", OWN, ge=2, le=1 << 20)


SettingsT = TypeVar("SettingsT", bound=ModelSettings)

AnyModelSettings = Annotated[
    TransformerSettings
    | RecurrentSettings
    | ConvS2SSettings
    | StarSettings
    | GPTSettings
    | TransformerXLSettings
    | BertSettings
    | BertEncoderSettings
    | BertClassifierSettings
    | StarClassifierSettings,
    Field(discriminator="kind"),
]
"""The settings of any architecture; `kind` selects the class."""

MODEL_SETTINGS: dict[str, type[ModelSettings]] = {
    section.model_fields["kind"].default: section for section in get_args(get_args(AnyModelSettings)[0])
}
"""Settings classes by the value of `model.kind`."""


def kinds_for(task: str) -> tuple[str, ...]:
    """Return the values of `model.kind` that a task allows, its default first."""
    return tuple(kind for kind, section in MODEL_SETTINGS.items() if section.task == task)


def default_kind(task: str, preset: str | None = None) -> str:
    """Return the kind of a task's architecture with this preset, or the task's default kind.

    Return "transformer" for an unknown task.
    """
    kinds = kinds_for(task)
    fitting = [kind for kind in kinds if preset in MODEL_SETTINGS[kind].presets]
    return next(iter((*fitting, *kinds)), "transformer")


def model_settings(**values: Any) -> Any:
    """Return settings of the architecture that `kind` or `preset` names, or of a Transformer without either."""
    preset = values.get("preset")
    kinds = [kind for kind, section in MODEL_SETTINGS.items() if preset in section.presets]
    kind = values.get("kind", kinds[0] if kinds else "transformer")
    return MODEL_SETTINGS[kind](**{**values, "kind": kind})


def preset_values(settings: ModelSettings) -> dict[str, Any]:
    """Return the values of the preset that the settings name, without keys that their architecture lacks.

    The name may be short: "tiny" is "gpt-tiny" for a GPT.
    """
    name = settings.preset
    if name is None:
        return {}
    fitting = [other for other in settings.presets if other == name or other.endswith(f"-{name}")]
    if not fitting:
        others = sorted({other for section in MODEL_SETTINGS.values() for other in section.presets})
        if name in others:
            raise SettingsError(
                f"model.preset = '{name}' is another kind of model; allowed for '{settings.kind}': "
                f"{', '.join(settings.presets)}"
            )
        raise SettingsError(f"model.preset = {name!r}{nearest(name, others)}; allowed: {', '.join(settings.presets)}")
    values = settings.presets[name if name in fitting else fitting[0]]
    return {key: value for key, value in values.items() if key in type(settings).model_fields}


def resolve_preset(settings: SettingsT) -> SettingsT:
    """Return the settings with the values of their preset for all settings that were not given."""
    values = preset_values(settings)
    if not values:
        return settings
    given = {key: getattr(settings, key) for key in settings.model_fields_set if key != "preset"}
    return type(settings)(**{**values, **given})
