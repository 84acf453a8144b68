"""Descriptions of the classes of modules: PART_KINDS. The page, its JSON and the Python API follow from it.

To show a new kind of module, add an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from transduce.nn.attention import CrossAttention, SelfAttention
from transduce.nn.convolutional import GatedConvolution, MemoryAttention
from transduce.nn.embedding import TokenEmbedding, VectorEmbedding
from transduce.nn.feedforward import ConvFeedForward, FeedForward, GatedFeedForward
from transduce.nn.projections import SharedProjection
from transduce.nn.recurrent import GRU, LSTM
from transduce.nn.recurrent_decoder import StateAttention
from transduce.nn.relative_attention import RelativeAttention
from transduce.nn.residual import PostNorm, PreNorm
from transduce.nn.ssru import SSRU
from transduce.nn.star import RelayAttention, SatelliteAttention

MATRIX = ("position", "width")
OF_HEADS = ("head", "position", "width")
SCORES = ("head", "query", "key")
CANDIDATES = ("position", "token")


Rows = tuple[Tensor, Tensor | None]
Weight = Callable[[Any], Rows | None]
"""From a module to rows of a weight matrix, and their bias; None where heads share one matrix."""


@dataclass(frozen=True, slots=True)
class Product:
    """The formula of each cell of a value: scale * left[i] . right[j] (transposed), or left[i] . right[:, j].

    left, right: points of the same part; `weight` in place of `right`: rows of a weight matrix, and its bias.
    """

    left: str
    right: str = ""
    scale: Callable[[Any], float] = lambda module: 1.0
    transposed: bool = True
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A value to show of a part.

    name: after the part's, as in `recording`; "" for its output. keys: its columns are what is attended to.
    """

    name: str
    title: str
    axes: tuple[str, ...] = MATRIX
    keys: bool = False
    of_keys: bool = False  # its rows are what is attended to
    product: Product | None = None


@dataclass(frozen=True, slots=True)
class PartKind:
    """The description of a class of modules; `source`: the function that computes it (default: `forward`)."""

    kind: str
    equation: str
    text: str
    points: tuple[Point, ...]
    source: Callable[..., Any] | None = None


def _rows(n: int) -> Weight:
    """The n-th part of the packed projection of self-attention."""

    def find(attention: Any) -> Rows | None:
        packed = attention.query_key_value
        if isinstance(packed, SharedProjection):
            return None
        bias = None if packed.bias is None else packed.bias.split(packed.rows)[n]
        return packed.weight.split(packed.rows)[n], bias

    return find


def _linear(path: str) -> Weight:
    def find(module: Any) -> Rows | None:
        layer = module.get_submodule(path)
        return None if isinstance(layer, SharedProjection) else (layer.weight, layer.bias)

    return find


def _scale(attention: Any) -> float:
    return float(attention.d_key**-0.5)


_INPUT = Point("input", "x, the input")
_ATTENTION = (
    Point("scores", "scores before the mask", SCORES, keys=True, product=Product("query", "key", _scale)),
    Point("bias", "mask and position bias", SCORES, keys=True),
    Point("weights", "weights, after the softmax", SCORES, keys=True),
    Point("heads", "output of each head", OF_HEADS, product=Product("weights", "value", transposed=False)),
    Point("output.input", "heads concatenated"),
    Point("", "output projection", product=Product("output.input", weight=_linear("output"))),
)
_SELF = (
    _INPUT,
    Point("query", "Q", OF_HEADS, product=Product("input", weight=_rows(0))),
    Point("key", "K", OF_HEADS, of_keys=True, product=Product("input", weight=_rows(1))),
    Point("value", "V", OF_HEADS, of_keys=True, product=Product("input", weight=_rows(2))),
    *_ATTENTION,
)


def _feed_forward(expanded: str, hidden: str) -> tuple[Point, ...]:
    return (
        _INPUT,
        Point("expand", expanded, product=Product("input", weight=_linear("expand"))),
        Point("contract.input", hidden),
        Point("", "output", product=Product("contract.input", weight=_linear("contract"))),
    )


_NORM = "The vector of each position is normalized."
_RESIDUAL = "The sub-layer's input is added to its output: each layer adds to a stream that reaches the end."

PART_KINDS: dict[type[nn.Module], PartKind] = {
    TokenEmbedding: PartKind(
        "embedding",
        "x = s E[token] + position",
        "Each token becomes a vector. Transformers scale it with s = √d_model, and add the position, unless the scheme "
        "works inside attention.",
        (Point("table", "E[token], before scaling"), Point("", "embedded tokens")),
    ),
    VectorEmbedding: PartKind(
        "embedding",
        "x = W v + b + position",
        "Each vector of the input is projected to the model's width.",
        (Point("projection.input", "input vectors"), Point("", "embedded vectors")),
    ),
    SelfAttention: PartKind(
        "self_attention",
        "softmax(Q Kᵀ / √d_k + mask) V",
        "Every position asks (Q) all positions of the same sequence, finds those that match (K), and reads them (V).",
        _SELF,
    ),
    CrossAttention: PartKind(
        "cross_attention",
        "softmax(Q Kᵀ / √d_k + mask) V, with K and V of the encoder's output",
        "Every position of the decoder asks the positions of the source.",
        (
            _INPUT,
            Point("query", "Q", OF_HEADS, product=Product("input", weight=_linear("query"))),
            Point("key", "K, of the source", OF_HEADS, of_keys=True),
            Point("value", "V, of the source", OF_HEADS, of_keys=True),
            *_ATTENTION,
        ),
    ),
    RelativeAttention: PartKind(
        "self_attention",
        "softmax((q+u)·k + (q+v)·W_R R) V over the memory and the segment",
        "Scores depend on the distance of query and key; keys of earlier segments come first (the memory).",
        (_INPUT, *(Point(p, t, OF_HEADS) for p, t in (("query", "Q + u"), ("key", "K"), ("value", "V"))), *_ATTENTION),
    ),
    StateAttention: PartKind(
        "attention",
        "a = softmax(score(s, m)),  context = Σ a m",
        "The decoder's state is compared with the encoder's states, and reads their weighted mean.",
        (
            Point("query", "states of the decoder", ("position", "width")),
            Point("memory", "states of the encoder", ("position", "width"), of_keys=True),
            Point("scores", "scores before the mask", SCORES, keys=True),
            Point("weights", "weights, after the softmax", SCORES, keys=True),
        ),
        StateAttention.weights,
    ),
    MemoryAttention: PartKind(
        "attention",
        "a = softmax(d · z),  c = Σ a v",
        "Each layer of the decoder attends to the source with one head.",
        (
            Point("hidden", "hidden states"),
            Point("scores", "scores before the mask", SCORES, keys=True),
            Point("weights", "weights, after the softmax", SCORES, keys=True),
        ),
        MemoryAttention.weights,
    ),
    SatelliteAttention: PartKind(
        "attention",
        "attention of each token to its neighbours, itself, its embedding and the relay node",
        "A token sees only five vectors; the relay node carries what is far away. These weights are not recorded.",
        (_INPUT, Point("", "output")),
    ),
    SSRU: PartKind(
        "recurrent",
        "c_t = f_t c_(t-1) + (1 - f_t) W x_t,  output = ReLU(c_t)",
        "A recurrent unit in place of the decoder's self-attention: one vector remembers all earlier tokens.",
        (_INPUT, Point("", "ReLU(c)")),
    ),
    FeedForward: PartKind(
        "feed_forward",
        "max(0, x W₁ + b₁) W₂ + b₂",
        "The same two-layer network at every position.",
        _feed_forward("x W₁ + b₁", "after the activation"),
    ),
    GatedFeedForward: PartKind(
        "feed_forward",
        "(activate(x W) · x V) W₂",
        "One half of the hidden layer gates the other.",
        _feed_forward("x W and x V", "gated"),
    ),
    ConvFeedForward: PartKind(
        "feed_forward",
        "two convolutions over positions",
        "A feed-forward network that also sees neighbouring positions.",
        (_INPUT, Point("", "output")),
    ),
    PostNorm: PartKind(
        "residual",
        "LayerNorm(x + Sublayer(x))",
        _RESIDUAL,
        (_INPUT, Point("norm.input", "x + Sublayer(x)"), Point("", "after the norm")),
    ),
    PreNorm: PartKind(
        "residual",
        "x + Sublayer(LayerNorm(x))",
        _RESIDUAL,
        (_INPUT, Point("norm", "LayerNorm(x)"), Point("", "x + Sublayer(LayerNorm(x))")),
    ),
    LSTM: PartKind(
        "recurrent",
        "c' = f c + i g,  h' = o tanh(c')",
        "Gates decide what the cell keeps (f), takes in (i, g) and shows (o).",
        (
            _INPUT,
            Point("gates.i", "input gate i"),
            Point("gates.f", "forget gate f"),
            Point("gates.g", "new content g"),
            Point("gates.o", "output gate o"),
            Point("0", "hidden state h"),
            Point("1", "cell state c"),
        ),
    ),
    GRU: PartKind(
        "recurrent",
        "n = tanh(W x + r (U h)),  h' = (1 - z) n + z h",
        "The update gate z keeps the state; the reset gate r hides it from the new one.",
        (
            _INPUT,
            Point("gates.r", "reset gate r"),
            Point("gates.z", "update gate z"),
            Point("gates.n", "new content n"),
            Point("0", "hidden state h"),
        ),
    ),
    GatedConvolution: PartKind(
        "convolution",
        "v(x) · σ(g(x)) of a window of positions",
        "A convolution over neighbouring positions whose output gates itself.",
        (_INPUT, Point("", "output")),
    ),
    nn.LayerNorm: PartKind(
        "norm",
        "(x - mean) / √(var + ε) · γ + β",
        _NORM,
        (_INPUT, Point("", "after the norm")),
    ),
}
PART_KINDS[nn.RMSNorm] = PartKind("norm", "x / rms(x) · γ", _NORM, PART_KINDS[nn.LayerNorm].points)


PART_KINDS[RelayAttention] = replace(
    PART_KINDS[CrossAttention],
    kind="relay_attention",
    equation="softmax(Q Kᵀ / √d_k + mask) V, with K and V of all tokens and the relay node",
    text="The relay node asks all tokens, and carries the answer to them in the next layer.",
)


def logits_kind(text: str, weight: Weight, source: Callable[..., Any] | None) -> PartKind:
    """The description of the last product and the softmax, which are no module."""
    points = (
        Point("input", "h, the last hidden states"),
        Point("", "logits", CANDIDATES, product=Product("input", weight=weight)),
        Point("probabilities", "probabilities, after the softmax", CANDIDATES),
    )
    return PartKind("logits", "softmax(h Eᵀ + b)", text, points, source)


def kind_of(module: nn.Module) -> PartKind | None:
    """The entry of a module's class or of the nearest class above it; None for what is not shown."""
    return next((PART_KINDS[one] for one in type(module).__mro__ if one in PART_KINDS), None)
