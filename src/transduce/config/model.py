"""Common settings of architectures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from transduce.config.section import MAX_TOKENS, Section, Traits, setting, traits_of
from transduce.errors import SettingsError

Tie = Literal["three_way", "two_way", "inputs", "none"]
Blocks = Annotated[int, Field(ge=0, le=1024)]
Preset = Mapping[str, Any]

OWN, SIZE = Traits(own=True), Traits(size=True)

_SUMMARY = {
    "cell": "{}",
    **{name: f"{name} {{}}" for name in ("d_model", "d_ff", "d_hidden", "d_conv")},
    "n_heads": "{} heads",
    "attention": "attention {}",
    "residual": "{}-norm",
    "positions": "{} positions",
    "pooling": "{} pooling",
}
"""Settings in the summary of a model, each with its format."""


class ModelSettings(Section):
    """Base of the settings of all architectures. Other packages use its properties without knowing the architecture.

    Each architecture has its own settings class and presets; its default sizes make a tiny model.
    """

    task: ClassVar[str] = ""
    """The task that the architecture is trained for; the first architecture of a task is its default."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Sizes by name. Only architectures of different tasks may share a name."""
    carries_state: ClassVar[bool] = False
    """Whether a language model carries state from one part of a text to the next: it reads contiguous streams."""
    kept_values: ClassVar[int] = 4
    """Estimate of the values kept for the gradient per output value of a matrix, including attention weights."""

    preset: str | None = setting(None, "Named sizes, such as tiny or base; other keys override them.", SIZE)
    kind: str = Field(description="Architecture; default: the usual one of the task.")
    d_model: int = setting(128, "Width of the embeddings and hidden states (paper 3.1).", SIZE, ge=1, le=1 << 16)
    dropout: float = setting(0.1, "Dropout on embeddings and sub-layer outputs (paper 5.4).", OWN, ge=0, lt=1)

    @model_validator(mode="before")
    @classmethod
    def _record_kind(cls, values: Any) -> Any:
        """Mark `kind` (the architecture) as set, so that an export of the set values contains it."""
        return {"kind": cls.model_fields["kind"].default, **values} if isinstance(values, Mapping) else values

    @classmethod
    def size_keys(cls) -> frozenset[str]:
        """Names of the settings that decide the size of the model."""
        return frozenset(key for key, field in cls.model_fields.items() if traits_of(field).size)

    @property
    def depth(self) -> tuple[int, ...]:
        """Number of layers of each stack, with the encoder first."""
        fields = [name for name in ("n_encoder_layers", "n_decoder_layers") if name in type(self).model_fields]
        return tuple(getattr(self, name) for name in fields)

    @property
    def position_limit(self) -> int | None:
        """Number of positions that the model can represent, or None without a limit."""
        return None

    @property
    def reads_vectors(self) -> bool:
        """Whether the source is sequences of vectors, not of tokens."""
        return False

    def require_text(self, use: str, *, run: object = "") -> None:
        """Raise `SettingsError` if the source is vectors. `use`: the feature that needs text. `run`: the run folder."""
        if self.reads_vectors:
            of_run = f"{run} has " if run else ""
            raise SettingsError(f"{of_run}model.source = 'vectors'; {use} needs a model whose source is text")

    @property
    def replaces_self_attention(self) -> bool:
        """Whether a recurrent unit replaces the self-attention of a Transformer decoder."""
        return False

    @property
    def own_context(self) -> int | None:
        """Number of tokens that a language model reads at once, or None if `data.context` decides."""
        return None

    @property
    def remembered(self) -> int | None:
        """Tokens in a language model's memory in validation, evaluation and generation; None if it has no memory."""
        return None

    @property
    def separates_documents(self) -> bool:
        """Whether attention can be restricted to a token's own document (`data.separate_documents`)."""
        return False

    @property
    def summary(self) -> str:
        """The architecture and its sizes in a line."""
        fields, layers = type(self).model_fields, f"{'+'.join(map(str, self.depth))} layers"
        sizes = [text.format(getattr(self, name)) for name, text in _SUMMARY.items() if name in fields]
        return ", ".join([self.kind, layers, *sizes])

    @property
    @abstractmethod
    def layer_parameters(self) -> int:
        """Rough number of parameters of all layers without embeddings; the work per token is proportional to it."""

    @property
    def layer_activations(self) -> int:
        """Rough number of values per token that all layers keep for the gradient."""
        return self.kept_values * self.layer_parameters // self.d_model


class PositionSettings(ModelSettings):
    """Settings of architectures with positions. Architectures support different positional schemes."""

    positions: str = Field(description="Positional scheme.")
    max_positions: int = setting(1024, "Longest sequence for learned positions.", ge=1, le=MAX_TOKENS)

    @property
    def position_limit(self) -> int | None:
        return self.max_positions if self.positions == "learned" else None


class OutputSettings(ModelSettings):
    """Settings of architectures that predict tokens."""

    tie: Tie = setting(
        "three_way",
        "Shared embeddings: three_way (all), two_way (target, output), inputs (source, target) or none.",
    )
    output_bias: Literal[True, False, "fixed"] = setting(
        False, "Add a bias to the logits; fixed: one that is not trained."
    )

    @property
    def ties_inputs(self) -> bool:
        """Whether source and target share an embedding."""
        return self.tie in ("three_way", "inputs")

    @property
    def ties_output(self) -> bool:
        """Whether the output matrix is the embedding of the target."""
        return self.tie in ("three_way", "two_way")


NORM_EPSILONS = {"layer": 1e-5, "rms": 1e-6}
"""The default epsilon of each norm."""


class BlockSettings(ModelSettings):
    """Settings of stacks of attention and feed-forward networks; the defaults are the paper's."""

    d_ff: int = setting(256, "Inner width of the feed-forward network (paper 3.3).", SIZE, ge=1, le=1 << 20)
    n_heads: int = setting(4, "Number of attention heads (paper 3.2.2).", SIZE, ge=1, le=1 << 16)
    attention_dropout: float = setting(0.0, "Dropout on attention weights.", OWN, ge=0, lt=1)
    activation_dropout: float = setting(0.0, "Dropout inside the feed-forward network.", OWN, ge=0, lt=1)
    residual: str = setting("post", "Norm after the residual connection (post, paper) or before (pre).")
    norm: str = setting("layer", "Normalization: layer or rms.")
    norm_eps: float | None = setting(None, "Norm epsilon (default: 1e-5 for layer, 1e-6 for rms).", gt=0)
    scale_embeddings: bool = setting(True, "Multiply embeddings by sqrt(d_model) (paper 3.4).")
    feed_forward: str = setting("plain", "Feed-forward network: plain, gated or conv.")
    activation: str = setting("relu", "Activation: relu, gelu, gelu_tanh or silu.")
    bias: bool = setting(True, "Add biases in linear layers and layer norms.")

    @property
    def epsilon(self) -> float:
        return self.norm_eps or NORM_EPSILONS[self.norm]

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def n_attentions(self) -> int:
        return sum(self.depth)

    @property
    def layer_parameters(self) -> int:
        """Estimate of the number of parameters: four matrices per attention and two per feed-forward network."""
        return 4 * self.n_attentions * self.d_model**2 + 2 * sum(self.depth) * self.d_model * self.d_ff


class AttentionSettings(BlockSettings, PositionSettings):
    """Settings of Transformers with the paper's attention, any positional scheme and any attention pattern."""

    n_kv_heads: int | None = setting(None, "Number of key and value heads (default: n_heads).", ge=1)
    d_key: int | None = setting(
        None, "Width d_k of a head's queries and keys (default: d_model / n_heads).", ge=1, le=1 << 16
    )
    d_value: int | None = setting(None, "Width d_v of a head's values (default: d_model / n_heads).", ge=1, le=1 << 16)
    embedding_norm: bool = setting(False, "Normalize the sum of embeddings and positions (BART, BERT).")
    positions: str = setting(
        "sinusoidal", "Positional scheme, e.g. sinusoidal, learned, rotary, alibi, t5, shaw, none."
    )
    kernel_size: int = setting(1, "Kernel size of the conv feed-forward network.", ge=1, le=1024)
    projection: str = setting("full", "Head projections: full, or shared (one matrix for all heads).")
    window: int | None = setting(
        None, "Tokens in the window of the local pattern; stride of strided and fixed.", ge=1, le=MAX_TOKENS
    )
    summary_tokens: int = setting(
        8, "Last tokens of each block that all queries see in the fixed pattern.", ge=1, le=MAX_TOKENS
    )
    factors: str = setting(
        "heads", "The two factors of strided and fixed: of half the heads each, or of the layers in turn."
    )

    @property
    def key_width(self) -> int:
        return self.d_key or self.d_head

    @property
    def value_width(self) -> int:
        return self.d_value or self.d_head

    @property
    def patterns(self) -> dict[str, str]:
        stacks = [stack for stack in ("encoder", "decoder") if f"{stack}_pattern" in type(self).model_fields]
        return {stack: getattr(self, f"{stack}_pattern") for stack in stacks}

    @property
    def separates_documents(self) -> bool:
        """Whether documents can be masked from each other; a convolution reads beyond the start of a document."""
        return self.kernel_size == 1


class SourceSettings(ModelSettings):
    """The encoder's input, tokens or vectors, for architectures that support both."""

    source: Literal["tokens", "vectors"] = setting(
        "tokens", "Input of the encoder: tokens, or vectors such as image patches or frames of audio."
    )

    @property
    def reads_vectors(self) -> bool:
        return self.source == "vectors"


class DecoderSettings(AttentionSettings, OutputSettings):
    """Settings of Transformers with a decoder."""

    decoder_pattern: str = setting(
        "full", "Who attends to whom in the decoder: full, local, strided or fixed (Child et al. 2019)."
    )
