"""Common settings of architectures."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from transduce.config.section import MAX_TOKENS, Section

Tie = Literal["three_way", "two_way", "none"]
Blocks = Annotated[int, Field(ge=0, le=1024)]
Preset = Mapping[str, Any]


class ModelSettings(Section):
    """Fields that every architecture has. The properties are what other packages ask without knowing the architecture.

    An architecture has its own module, class and presets; the sizes of its defaults are those of a tiny model.
    """

    task: ClassVar[str] = ""
    """The task that the architecture is trained for; the first architecture of a task is its default."""
    presets: ClassVar[Mapping[str, Preset]] = {}
    """Sizes by name. Only architectures of different tasks may share a name."""
    carries_state: ClassVar[bool] = False
    """Whether a language model carries state from one part of a text to the next: it reads contiguous streams."""

    preset: str | None = Field(None, description="Named sizes, such as tiny or base; other keys override them.")
    kind: str = Field(description="Architecture; default: the usual one of the task.")
    d_model: int = Field(128, ge=1, le=1 << 16, description="Width of the embeddings and hidden states (paper 3.1).")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout on embeddings and sub-layer outputs (paper 5.4).")

    @model_validator(mode="before")
    @classmethod
    def _record_kind(cls, values: Any) -> Any:
        """Count the architecture as given, so that it stays with the values that were."""
        return {"kind": cls.model_fields["kind"].default, **values} if isinstance(values, Mapping) else values

    @property
    def depth(self) -> tuple[int, ...]:
        """Number of layers of each stack, the encoder's first."""
        fields = [name for name in ("n_encoder_layers", "n_decoder_layers") if name in type(self).model_fields]
        return tuple(getattr(self, name) for name in fields)

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model can represent; None: no limit."""
        return None

    @property
    def reads_vectors(self) -> bool:
        """Whether the source is sequences of vectors, not of tokens."""
        return False

    @property
    def replaces_self_attention(self) -> bool:
        """Whether a recurrent unit takes the place of a Transformer decoder's self-attention."""
        return False

    @property
    def own_context(self) -> int | None:
        """The number of tokens that a language model reads at once; None: as many as data.context says."""
        return None

    @property
    def remembered(self) -> int | None:
        """The length of a language model's memory in validation, evaluation and generation; None: it has no memory."""
        return None

    @property
    def separates_documents(self) -> bool:
        """Whether the model can hide the documents before a token's own, as `data.separate_documents` asks."""
        return False

    @property
    @abstractmethod
    def summary(self) -> str:
        """The architecture and its sizes in a line."""

    @property
    def width_step(self) -> int:
        """`compare` gives models widths that are multiples of this."""
        return 8

    @property
    @abstractmethod
    def layer_parameters(self) -> int:
        """Number of parameters of all layers without embeddings, roughly: the work per token is proportional to it."""

    @property
    @abstractmethod
    def layer_activations(self) -> int:
        """Numbers per token that all layers keep for the gradient, roughly."""


class PositionSettings(ModelSettings):
    """Settings of architectures with positions; the schemes differ."""

    positions: str = Field(description="Positional scheme.")
    max_positions: int = Field(1024, ge=1, le=MAX_TOKENS, description="Longest sequence for learned positions.")

    @property
    def position_limit(self) -> int | None:
        """Learned positions have a limit."""
        return self.max_positions if self.positions == "learned" else None


class OutputSettings(ModelSettings):
    """Settings of architectures that predict tokens."""

    tie: Tie = Field("three_way", description="Shared embeddings: three_way (source, target, output), two_way or none.")
    output_bias: Literal[True, False, "fixed"] = Field(
        False, description="Add a bias to the logits; fixed: one that is not trained."
    )


NORM_EPSILONS = {"layer": 1e-5, "rms": 1e-6}
"""The default epsilon of each norm."""


class BlockSettings(ModelSettings):
    """Fields of every stack of attention and feed-forward networks; the defaults are the paper's."""

    d_ff: int = Field(256, ge=1, le=1 << 20, description="Inner width of the feed-forward network (paper 3.3).")
    n_heads: int = Field(4, ge=1, le=1 << 16, description="Number of attention heads (paper 3.2.2).")
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention weights.")
    activation_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout inside the feed-forward network.")
    residual: str = Field("post", description="Norm after the residual connection (post, paper) or before (pre).")
    norm: str = Field("layer", description="Normalization: layer or rms.")
    norm_eps: float | None = Field(None, gt=0, description="Norm epsilon (default: 1e-5 for layer, 1e-6 for rms).")
    scale_embeddings: bool = Field(True, description="Multiply embeddings by sqrt(d_model) (paper 3.4).")
    feed_forward: str = Field("plain", description="Feed-forward network: plain, gated or conv.")
    activation: str = Field("relu", description="Activation: relu, gelu, gelu_tanh or silu.")
    bias: bool = Field(True, description="Add biases in linear layers and layer norms.")

    @property
    def width_step(self) -> int:
        """Heads of equal, even width."""
        return 2 * self.n_heads

    @property
    def epsilon(self) -> float:
        """The epsilon of all norms."""
        return self.norm_eps or NORM_EPSILONS[self.norm]

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def n_attentions(self) -> int:
        return sum(self.depth)

    @property
    def summary(self) -> str:
        if not any(self.depth):
            return f"{self.kind}, no attention layers, d_model {self.d_model}"
        size = f"{'+'.join(map(str, self.depth))} layers, d_model {self.d_model}, d_ff {self.d_ff}"
        return f"{self.kind}, {size}, {self.n_heads} heads, {self.residual}-norm"

    @property
    def layer_parameters(self) -> int:
        """Four matrices per attention, two per feed-forward network."""
        return 4 * self.n_attentions * self.d_model**2 + 2 * sum(self.depth) * self.d_model * self.d_ff

    @property
    def layer_activations(self) -> int:
        """Of sentences; the weights of attention count as if there were 128 keys."""
        return self.n_attentions * (20 * self.d_model + 4 * self.d_ff + 128 * self.n_heads)


class AttentionSettings(BlockSettings, PositionSettings):
    """Fields of the Transformers whose attention is that of the paper, with any positional scheme and pattern."""

    n_kv_heads: int | None = Field(None, ge=1, description="Number of key and value heads (default: n_heads).")
    d_key: int | None = Field(
        None, ge=1, le=1 << 16, description="Width d_k of a head's queries and keys (default: d_model / n_heads)."
    )
    embedding_norm: bool = Field(False, description="Normalize the sum of embeddings and positions (BART, BERT).")
    positions: str = Field(
        "sinusoidal", description="Positional scheme, e.g. sinusoidal, learned, rotary, alibi, t5, shaw, none."
    )
    kernel_size: int = Field(1, ge=1, le=1024, description="Kernel size of the conv feed-forward network.")
    projection: str = Field("full", description="Head projections: full, or shared (one matrix for all heads).")
    window: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="Tokens in the window of the local pattern; stride of strided and fixed."
    )
    summary_tokens: int = Field(
        8, ge=1, le=MAX_TOKENS, description="Last tokens of each block that all queries see in the fixed pattern."
    )
    factors: str = Field(
        "heads", description="The two factors of strided and fixed: of half the heads each, or of the layers in turn."
    )

    @property
    def key_width(self) -> int:
        """Width of the queries and keys of one head."""
        return self.d_key or self.d_head

    @property
    def patterns(self) -> dict[str, str]:
        """The attention pattern of each stack that has a choice."""
        stacks = [stack for stack in ("encoder", "decoder") if f"{stack}_pattern" in type(self).model_fields]
        return {stack: getattr(self, f"{stack}_pattern") for stack in stacks}

    @property
    def separates_documents(self) -> bool:
        """Attention can be masked; a convolution reads beyond the start of a document."""
        return self.kernel_size == 1

    @property
    def summary(self) -> str:
        return f"{super().summary}, {self.positions} positions"


class SourceSettings(ModelSettings):
    """The input of the encoder, in models that have a choice."""

    source: Literal["tokens", "vectors"] = Field(
        "tokens", description="Input of the encoder: tokens, or vectors such as image patches or frames of audio."
    )

    @property
    def reads_vectors(self) -> bool:
        return self.source == "vectors"


class DecoderSettings(AttentionSettings, OutputSettings):
    """Settings of Transformers with a decoder."""

    decoder_pattern: str = Field(
        "full", description="Who attends to whom in the decoder: full, local, strided or fixed (Child et al. 2019)."
    )
