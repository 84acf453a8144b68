"""Settings of the model: one class per architecture, with only the fields that it has, and the named sizes (presets).

This module does not import torch, so that a wrong recipe is refused at once. `transduce.models.registry` has the code
of each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, model_validator

from transduce.config.section import MAX_TOKENS, Section
from transduce.errors import SettingsError, nearest

Tie = Literal["three_way", "two_way", "none"]
Blocks = Annotated[int, Field(ge=0, le=1024)]
Preset = Mapping[str, Any]
SettingsT = TypeVar("SettingsT", bound="ModelSettings")


class ModelSettings(Section):
    """Fields that every architecture has; the defaults are the paper's, the sizes those of `tiny`."""

    task: ClassVar[str] = ""
    """The task that the architecture is trained for; the first architecture of a task is its default."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Sizes by name."""

    preset: str | None = Field(None, description="Named sizes, such as tiny or base; other keys override them.")
    kind: str = Field(description="Architecture; default: the usual one of the task.")
    d_model: int = Field(128, ge=1, le=1 << 16, description="Width of the residual stream (paper 3.1).")
    d_ff: int = Field(256, ge=1, le=1 << 20, description="Inner width of the feed-forward network (paper 3.3).")
    n_heads: int = Field(4, ge=1, le=1 << 16, description="Number of attention heads (paper 3.2.2).")
    n_kv_heads: int | None = Field(None, ge=1, description="Number of key and value heads (default: n_heads).")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs (paper 5.4).")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention weights.")
    activation_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout inside the feed-forward network.")
    residual: str = Field("post", description="Norm after the residual connection (post, paper) or before (pre).")
    norm: str = Field("layer", description="Normalization: layer or rms.")
    norm_eps: float | None = Field(None, gt=0, description="Norm epsilon (default: 1e-5 for layer, 1e-6 for rms).")
    embedding_norm: bool = Field(False, description="Normalize the sum of embeddings and positions (BART, BERT).")
    scale_embeddings: bool = Field(True, description="Multiply embeddings by sqrt(d_model) (paper 3.4).")
    positions: str = Field(
        "sinusoidal", description="Positional scheme, e.g. sinusoidal, learned, rotary, alibi, t5, none."
    )
    feed_forward: str = Field("plain", description="Feed-forward network: plain, gated or conv.")
    activation: str = Field("relu", description="Activation: relu, gelu, gelu_tanh or silu.")
    kernel_size: int = Field(1, ge=1, le=1024, description="Kernel size of the conv feed-forward network.")
    projection: str = Field("full", description="Head projections: full, or shared (one matrix for all heads).")
    bias: bool = Field(True, description="Add biases in linear layers and layer norms.")
    max_positions: int = Field(1024, ge=1, le=MAX_TOKENS, description="Longest sequence for learned positions.")

    @model_validator(mode="before")
    @classmethod
    def _record_kind(cls, values: Any) -> Any:
        """Count the architecture as given, so that it stays with the values that were."""
        return {"kind": cls.model_fields["kind"].default, **values} if isinstance(values, Mapping) else values

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def depth(self) -> tuple[int, ...]:
        """Number of blocks of each stack, the encoder's first."""
        fields = [name for name in ("n_encoder_layers", "n_decoder_layers") if name in type(self).model_fields]
        return tuple(getattr(self, name) for name in fields)

    @property
    def n_attentions(self) -> int:
        """Number of attention sub-layers."""
        return sum(self.depth)


class OutputSettings(ModelSettings):
    """What architectures that predict tokens share."""

    tie: Tie = Field("three_way", description="Shared embeddings: three_way (source, target, output), two_way or none.")
    output_bias: bool | Literal["fixed"] = Field(
        False, description="Add a bias to the logits; fixed: one that is not trained."
    )


class DecoderSettings(OutputSettings):
    """What architectures with a decoder share."""

    window: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Decoder self-attention to the last N tokens only (default: to all)."
    )


_FAST: Preset = {"n_encoder_layers": 6, "n_decoder_layers": 2, "decoder_self": "ssru"}  # Kim et al. 2019


class TransformerSettings(DecoderSettings):
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
    decoder_self: str = Field(
        "attention", description="How the decoder uses earlier tokens: attention, or ssru (a recurrent unit, faster)."
    )

    @property
    def n_attentions(self) -> int:
        """Number of attention sub-layers: a decoder block has two, one of which may be a recurrent unit."""
        return self.n_encoder_layers + 2 * self.n_decoder_layers


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


class EncoderSettings(ModelSettings):
    """An encoder without a decoder (Devlin et al. 2019, BERT): what its variants share."""

    presets: ClassVar[Mapping[str, Preset]] = {
        f"bert-{name}": {**_BERT, "n_encoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": d // 64}
        for name, n, d in (("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("base", 12, 768))
    }

    n_encoder_layers: Blocks = Field(4, description="Number of encoder blocks.")
    n_segments: int = Field(0, ge=0, le=1024, description="Number of learned segment embeddings; 0: none.")


class BertSettings(EncoderSettings, OutputSettings):
    """A masked language model."""

    task = "masked"

    kind: Literal["bert"] = Field("bert", description="Architecture: an encoder that predicts masked tokens.")
    next_sentence: bool = Field(False, description="Also predict whether segment B follows A in the text (BERT).")


class PoolingSettings(EncoderSettings):
    """What encoders that give one vector per text share."""

    pooling: str = Field("first", description="Vector of a text: first token ([CLS], BERT), mean, max or conv (CNN).")


class BertEncoderSettings(PoolingSettings):
    """An encoder without a head, as imported."""

    task = "encoding"

    kind: Literal["bert-encoder"] = Field("bert-encoder", description="Architecture: an encoder without a head.")


class BertClassifierSettings(PoolingSettings):
    """A text classifier."""

    task = "classification"
    presets: ClassVar[Mapping[str, Preset]] = {
        **EncoderSettings.presets,
        "cnn": {"n_encoder_layers": 0, "positions": "none", "scale_embeddings": False, "pooling": "conv"},  # Kim 2014
    }

    kind: Literal["bert-classifier"] = Field("bert-classifier", description="Architecture: an encoder and a label.")
    n_labels: int | None = Field(None, ge=2, le=1 << 20, description="Number of labels (default: from the data).")


AnyModelSettings = Annotated[
    TransformerSettings | GPTSettings | BertSettings | BertEncoderSettings | BertClassifierSettings,
    Field(discriminator="kind"),
]
"""The settings of any architecture, by `kind`."""

MODEL_SETTINGS: dict[str, type[ModelSettings]] = {
    section.model_fields["kind"].default: section
    for section in (TransformerSettings, GPTSettings, BertSettings, BertEncoderSettings, BertClassifierSettings)
}
"""By `model.kind`."""


def kinds_for(task: str) -> tuple[str, ...]:
    """The architectures that do a task, its default first."""
    return tuple(kind for kind, section in MODEL_SETTINGS.items() if section.task == task)


def model_settings(**values: Any) -> Any:
    """Settings of the architecture that `kind`, or else `preset`, names; a Transformer's without either."""
    preset = values.get("preset")
    kinds = [kind for kind, section in MODEL_SETTINGS.items() if preset in section.presets]
    kind = values.get("kind", kinds[0] if kinds else "transformer")
    return MODEL_SETTINGS[kind](**{**values, "kind": kind})


def preset_values(settings: ModelSettings) -> dict[str, Any]:
    """The values of the preset that the settings name, as far as their architecture has them; none without a preset."""
    name = settings.preset
    if name is None:
        return {}
    if name not in settings.presets:
        others = sorted({other for section in MODEL_SETTINGS.values() for other in section.presets})
        if name in others:
            raise SettingsError(
                f"model.preset = '{name}' is another kind of model; allowed for '{settings.kind}': "
                f"{', '.join(settings.presets)}"
            )
        raise SettingsError(f"model.preset = {name!r}{nearest(name, others)}; allowed: {', '.join(settings.presets)}")
    return {key: value for key, value in settings.presets[name].items() if key in type(settings).model_fields}


def resolve_preset(settings: SettingsT) -> SettingsT:
    """The same settings with the preset's values filled in, except where another value was given."""
    values = preset_values(settings)
    if not values:
        return settings
    given = {key: getattr(settings, key) for key in settings.model_fields_set if key != "preset"}
    return type(settings)(**{**values, **given})
