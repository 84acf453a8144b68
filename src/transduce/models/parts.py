"""Common parts of the architectures: modules built from settings, initial weights, and bases of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from transduce.config.architectures import StarClassifierSettings
from transduce.config.model import AttentionSettings, BlockSettings, ModelSettings, OutputSettings
from transduce.errors import SettingsError
from transduce.nn.attention import PROJECTIONS, CrossAttention, FullProjection, SelfAttention
from transduce.nn.embedding import TokenEmbedding, TokenTable, VectorEmbedding
from transduce.nn.feedforward import ACTIVATIONS, FEED_FORWARDS, FeedForward
from transduce.nn.masks import SourceInput
from transduce.nn.patterns import PATTERNS, SPREADS, Factors, Pattern, SparsePattern, SummaryPattern, make_patterns
from transduce.nn.positions import POSITIONS, Positions
from transduce.nn.recurrent import SSRU
from transduce.nn.stack import NORMS, RESIDUALS, Decoder, DecoderBlock, Encoder, EncoderBlock, PostNorm

StateT = TypeVar("StateT")

DECODER_SELF: dict[str, Callable[[Mapping[str, Any]], SelfAttention | SSRU]] = {
    "attention": lambda options: SelfAttention(**options),
    "ssru": lambda options: SSRU(d_model=options["d_model"], bias=options["bias"]),
}
"""Functions that make the first sub-layer of a decoder block, given the keyword arguments of self-attention."""

BLOCK_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "residual": RESIDUALS,
    "norm": NORMS,
    "feed_forward": FEED_FORWARDS,
    "activation": ACTIVATIONS,
}
"""For each setting of `BlockSettings` that names an option, the table of its values."""
OPTIONS = {**BLOCK_OPTIONS, "positions": POSITIONS, "projection": PROJECTIONS}
"""For each setting of `AttentionSettings` that names an option, the table of its values."""
ENCODER_OPTIONS = {**OPTIONS, "encoder_pattern": PATTERNS, "factors": SPREADS}
DECODER_OPTIONS = {**OPTIONS, "decoder_pattern": PATTERNS, "factors": SPREADS}


def head_problems(s: BlockSettings | StarClassifierSettings) -> Iterator[str]:
    """Yield an error message if d_model is not divisible by n_heads."""
    if s.d_model % s.n_heads:
        yield f"model.d_model = {s.d_model} is not divisible by model.n_heads = {s.n_heads}"


def size_problems(s: AttentionSettings) -> Iterator[str]:
    """Yield an error message for each inconsistency of sizes; option names are checked before."""
    kv = s.n_kv_heads or s.n_heads
    if None in (s.d_key, s.d_value):
        yield from head_problems(s)
    if s.n_heads % kv:
        yield f"model.n_heads = {s.n_heads} is not divisible by model.n_kv_heads = {kv}"
    widths = {"d_key": s.key_width, "d_value": s.value_width}
    if problem := PROJECTIONS[s.projection].problem(n_heads=s.n_heads, n_kv_heads=kv, **widths):
        yield problem
    if s.kernel_size > 1 and not FEED_FORWARDS[s.feed_forward].convolves:
        yield f"model.kernel_size = {s.kernel_size} needs model.feed_forward = 'conv'"
    if problem := POSITIONS[s.positions].problem(**widths):
        yield problem


def stack_problems(s: AttentionSettings) -> Iterator[str]:
    """Yield an error message for each inconsistency of sizes or attention patterns; option names are checked before."""
    yield from size_problems(s)
    patterns = s.patterns
    options = {f"model.{stack}_pattern = '{name}'": name for stack, name in patterns.items()}
    sparse = [text for text, name in options.items() if any(isinstance(f, SparsePattern) for f in _factors(name))]
    if s.window is None and sparse:
        yield f"{sparse[0]} needs model.window"
    if s.window is not None and not sparse:
        yield f"model.window = {s.window} has no effect with {' and '.join(options)}"
    split = [text for text, name in options.items() if len(_factors(name)) > 1]
    if split and s.factors == "heads" and s.n_heads < 2:
        yield f"{split[0]} with model.factors = 'heads' needs model.n_heads of at least 2, not {s.n_heads}"


def unused_by_stacks(s: AttentionSettings) -> Iterator[str]:
    """Yield an error message for each changed pattern setting without an effect; sizes are already checked."""
    patterns = s.patterns
    factored = [getattr(s, f"n_{stack}_layers") for stack, name in patterns.items() if len(_factors(name)) > 1]
    if is_changed(s, "summary_tokens"):
        if not any(isinstance(f, SummaryPattern) for name in patterns.values() for f in _factors(name)):
            yield f"model.summary_tokens = {s.summary_tokens} has no effect without the pattern 'fixed'"
        elif s.window is not None and s.summary_tokens > s.window:
            yield f"model.summary_tokens = {s.summary_tokens} is more than model.window = {s.window}"
    if is_changed(s, "factors") and not factored:
        yield f"model.factors = '{s.factors}' has no effect without the pattern 'strided' or 'fixed'"
    elif s.factors == "layers" and min(factored) < 2:
        yield "model.factors = 'layers' needs at least 2 layers: one has the first factor only"


def _factors(pattern: str) -> Factors:
    return PATTERNS[pattern](1, 1, True)


def is_changed(s: ModelSettings, name: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(getattr(s, name) != type(s).model_fields[name].default)


class BlockParts:
    """Builds the common parts of Transformer blocks from settings; each call returns a new module."""

    def __init__(self, settings: BlockSettings) -> None:
        self.settings = settings

    def norm(self) -> nn.Module:
        s = self.settings
        return NORMS[s.norm](s.d_model, eps=s.epsilon, bias=s.bias)

    def residual(self) -> PostNorm:
        return RESIDUALS[self.settings.residual](self.norm(), dropout=self.settings.dropout)

    def final_norm(self) -> nn.Module:
        """Make the norm after the last block, or an identity if the residual connections need no final norm."""
        return self.norm() if RESIDUALS[self.settings.residual].final_norm else nn.Identity()

    def feed_forward(self, *, causal: bool, kernel_size: int = 1) -> FeedForward:
        """Make a feed-forward network; `causal` and `kernel_size` matter only if it is convolutional."""
        s = self.settings
        return FEED_FORWARDS[s.feed_forward](
            d_model=s.d_model,
            d_ff=s.d_ff,
            activation=s.activation,
            dropout=s.activation_dropout,
            bias=s.bias,
            kernel_size=kernel_size,
            causal=causal,
        )


class Parts(BlockParts):
    """Builds the parts of Transformers from settings; each call returns a new module."""

    settings: AttentionSettings

    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__(settings)
        names = "d_model", "n_heads", "n_kv_heads", "d_key", "d_value", "bias", "projection"
        self._attention: dict[str, Any] = {name: getattr(settings, name) for name in names}
        self._attention["dropout"] = settings.attention_dropout

    def source_embedding(self, n_src: int) -> TokenEmbedding | VectorEmbedding:
        """Make the encoder's embedding of a vocabulary of `n_src` tokens, or of input vectors of `n_src` numbers."""
        s = self.settings
        if not s.reads_vectors:
            return self.embedding(n_src, causal=False)
        norm = self.norm() if s.embedding_norm else None
        return VectorEmbedding(n_src, s.d_model, positions=self._positions(causal=False), dropout=s.dropout, norm=norm)

    def embedding(self, vocab_size: int, *, causal: bool, alias: tuple[int, int] | None = None) -> TokenEmbedding:
        """Make token embeddings with the positional scheme of their stack, which is a decoder if `causal`.

        `alias`: a pair of ids; the first id uses the second id's vector.
        """
        s, positions = self.settings, self._positions(causal=causal)
        scale, norm = None if s.scale_embeddings else 1.0, self.norm() if s.embedding_norm else None
        return TokenEmbedding(
            vocab_size, s.d_model, positions=positions, dropout=s.dropout, scale=scale, norm=norm, alias=alias
        )

    def encoder(self) -> Encoder:
        blocks = [
            EncoderBlock(
                attention=SelfAttention(**self._attention),
                feed_forward=self.feed_forward(causal=False, kernel_size=self.settings.kernel_size),
                residual=self.residual,
            )
            for _ in range(self.settings.depth[0])
        ]
        return Encoder(blocks, norm=self.final_norm(), patterns=self._patterns("encoder"))

    def decoder(self, *, cross: bool, own: str = "attention") -> Decoder:
        """Make the decoder's stack.

        `cross`: whether blocks attend to a memory. `own`: "attention", or "ssru" in place of self-attention.
        """
        blocks = [
            DecoderBlock(
                attention=DECODER_SELF[own](self._attention),
                cross=CrossAttention(**self._attention) if cross else None,
                feed_forward=self.feed_forward(causal=True, kernel_size=self.settings.kernel_size),
                residual=self.residual,
            )
            for _ in range(self.settings.depth[-1])
        ]
        return Decoder(blocks, norm=self.final_norm(), patterns=self._patterns("decoder"))

    def _positions(self, *, causal: bool) -> Positions:
        s = self.settings
        return POSITIONS[s.positions](
            d_model=s.d_model, d_head=s.key_width, max_positions=s.max_positions, n_heads=s.n_heads, causal=causal
        )

    def _patterns(self, stack: str) -> tuple[Pattern, ...]:
        s, pattern, causal = self.settings, self.settings.patterns[stack], stack == "decoder"
        return make_patterns(pattern, size=s.window or 0, summary=s.summary_tokens, spread=s.factors, causal=causal)


class TokenPredictor(nn.Module):
    """Base of models that predict tokens: the output matrix, from hidden states to logits."""

    output_embedding: TokenTable
    output_bias: nn.Parameter | None

    def add_output(self, settings: OutputSettings, vocab_size: int, *, tied: TokenTable) -> None:
        """Use `tied` as output matrix or, if the settings do not tie it, a new table; create the output bias."""
        self.output_embedding = tied
        if not settings.ties_output:
            self.output_embedding = TokenTable(vocab_size, settings.d_model)
            nn.init.normal_(self.output_embedding.weight, std=settings.d_model**-0.5)
        bias, is_trained = settings.output_bias, settings.output_bias != "fixed"
        self.output_bias = nn.Parameter(torch.zeros(vocab_size), requires_grad=is_trained) if bias else None

    @property
    def output_weight(self) -> Float[Tensor, "V D"]:
        """The matrix before the softmax, [V, D] (paper 3.4)."""
        return self.output_embedding.weight

    def read(self, *inputs: Tensor) -> Iterator[Float[Tensor, "B t D"]]:
        """Yield the hidden states of whole texts, for scoring, in one or more segments along the time axis."""
        yield self(*inputs)

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Compute the logits (unnormalized log-probabilities) of all tokens."""
        return self.output_embedding.logits(hidden, self.output_bias)


class EncoderDecoder(TokenPredictor, ABC, Generic[StateT]):
    """Base of encoder-decoders.

    `forward(src, tgt_in)` is `advance(tgt_in, start(src))`, so that training and decoding share one path.
    """

    src_embedding: TokenEmbedding | VectorEmbedding
    tgt_embedding: TokenEmbedding

    def tie(self, settings: OutputSettings, n_tgt: int) -> None:
        """Share the source and target embeddings and the output matrix, as `settings.tie` says; create the output."""
        if settings.ties_inputs:
            if not isinstance(self.src_embedding, TokenEmbedding):
                raise SettingsError(
                    f"model.tie = '{settings.tie}': vectors share no embedding; use 'two_way' or 'none'"
                )
            self.src_embedding.table.weight = self.tgt_embedding.table.weight
        self.add_output(settings, n_tgt, tied=self.tgt_embedding.table)

    @abstractmethod
    def start(self, src: SourceInput, *, capacity: int = 0, n_beams: int = 1) -> StateT:
        """Encode `src` and return the decoder's initial state, with room for `capacity` target tokens per row.

        With capacity 0, `advance` can be called only once, with the whole target, as in training. Otherwise, the memory
        is padded to a multiple of 16 positions, so that results do not depend on the batch's longest sentence.
        """

    @abstractmethod
    def advance(self, ids: Int[Tensor, "N T"], state: StateT) -> Float[Tensor, "N T D"]:
        """Return the hidden states after each of the next T tokens of every row; `state` is updated in place."""

    def forward(self, src: SourceInput, tgt_in: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Return the hidden states before the output matrix; position t depends on src and tgt_in[:, :t + 1]."""
        return self.advance(tgt_in, self.start(src))


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Initialize a model: Glorot-uniform matrices, zero biases, embeddings from N(0, variance 1/d_model).

    Matrices packed in one weight, such as queries, keys and values, are drawn separately and scaled by 1/sqrt(2), which
    is the variance of one matrix [3 d_model, d_model]. Embeddings times sqrt(d_model) have unit variance (paper 3.4).
    """
    for module in model.modules():
        if isinstance(module, FullProjection) and module.rows:
            for part in module.weight.split(module.rows):
                nn.init.xavier_uniform_(part, gain=2**-0.5)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
