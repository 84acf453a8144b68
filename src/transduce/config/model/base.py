"""What the settings of every architecture have in common."""

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
    """What architectures with positions share; which schemes they know differs."""

    positions: str = Field(description="Positional scheme.")
    max_positions: int = Field(1024, ge=1, le=MAX_TOKENS, description="Longest sequence for learned positions.")

    @property
    def position_limit(self) -> int | None:
        """Learned positions have a limit."""
        return self.max_positions if self.positions == "learned" else None


class OutputSettings(ModelSettings):
    """What architectures that predict tokens share."""

    tie: Tie = Field("three_way", description="Shared embeddings: three_way (source, target, output), two_way or none.")
    output_bias: bool | Literal["fixed"] = Field(
        False, description="Add a bias to the logits; fixed: one that is not trained."
    )
