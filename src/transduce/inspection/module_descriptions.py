"""Descriptions of the classes of modules that an inspection shows. To show another class, add it to DESCRIPTIONS."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from transduce.nn.attention import (
    CrossAttention,
    MultiHeadAttention,
    SelfAttention,
    SharedProjection,
    attention_weights,
    merge_heads,
    scaled_dot_product_attention,
)
from transduce.nn.convolutional import GatedConvolution, MemoryAttention
from transduce.nn.embedding import TokenEmbedding, TokenTable, VectorEmbedding
from transduce.nn.feedforward import ConvFeedForward, FeedForward, GatedFeedForward
from transduce.nn.recurrent import GRU, LSTM, SSRU, StateAttention
from transduce.nn.relative_attention import RelativeAttention
from transduce.nn.stack import Decoder, PostNorm, PreNorm
from transduce.nn.star import RelayAttention, SatelliteAttention

MATRIX = ("position", "width")
OF_HEADS = ("head", "position", "width")
SCORES = ("head", "query", "key")
CANDIDATES = ("position", "token")


Rows = tuple[Tensor, Tensor | None]
Line = tuple[Callable[..., Any] | None, str]
Weight = Callable[[Any], Rows | None]
"""A function from a module to rows of a weight matrix and their bias; returns None if heads share one matrix."""


@dataclass(frozen=True, slots=True)
class Product:
    """The formula of cell [i, j] of a value: scale * left[i] . right[j] (transposed), or left[i] . right[:, j].

    left, right: names of values of the same module. weight: takes rows of a weight matrix and a bias instead of
    `right`. scaled: whether the scale is 1 / sqrt(d_k) instead of 1.
    """

    left: str
    right: str = ""
    scaled: bool = False
    transposed: bool = True
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a module to show.

    name: suffix of the recorded name; "" for the output. text: a sentence that explains one number of the value.
    of_keys: whether its rows are keys of attention. softmax: names of values of the same module; each row is the
    softmax of their sum. line: the function that computes it (None: the module's), and a part of the line of its code.
    """

    name: str
    title: str
    text: str = ""
    axes: tuple[str, ...] = MATRIX
    of_keys: bool = False
    product: Product | None = None
    softmax: tuple[str, ...] = ()
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class ModuleDescription:
    """The description of a class of modules. `source`: the function that computes the output (default: `forward`)."""

    kind: str
    equation: str
    text: str
    points: tuple[Value, ...]
    source: Callable[..., Any] | None = None


def _weight(path: str, n: int | None = None) -> Weight:
    """Return a `Weight` for the linear layer at `path`, or for the n-th part of a packed projection."""

    def find(module: Any) -> Rows | None:
        layer = module.get_submodule(path)
        if isinstance(layer, SharedProjection):
            return None
        if n is None:
            return layer.weight, layer.bias
        return layer.weight.split(layer.rows)[n], None if layer.bias is None else layer.bias.split(layer.rows)[n]

    return find


_INPUT = Value(
    "input", "x, the input", "The vector that this part reads: the residual stream at this position, or its norm."
)
_QUERY = Value("query", "Q", "A query asks: it is the input of its position times W_Q of this head.", OF_HEADS)
_KEY = Value(
    "key",
    "K",
    "A key is what a position is recognized by: the position's vector times W_K of this head.",
    OF_HEADS,
    of_keys=True,
)
_VALUE = Value(
    "value",
    "V",
    "A value is what a position hands over when it is read: the position's vector times W_V of this head.",
    OF_HEADS,
    of_keys=True,
)
_WEIGHTS = Value(
    "weights",
    "weights, after the softmax",
    "The share of this key: e to the power of its score, divided by the sum over all keys.",
    SCORES,
    softmax=("scores", "bias"),
    line=(attention_weights, ".softmax(-1)"),
)
_ATTENTION = (
    Value(
        "scores",
        "scores before the mask",
        "How well the query matches this key: their dot product, divided by √d_k.",
        SCORES,
        product=Product("query", "key", scaled=True),
        line=(attention_weights, "scores = matmul"),
    ),
    Value(
        "bias",
        "mask and position bias",
        "It is added to the score: −∞ hides the key; other numbers come from the positions.",
        SCORES,
        line=(attention_weights, "torch.add(bias"),
    ),
    _WEIGHTS,
    Value(
        "heads",
        "output of each head",
        "The values of all keys, each multiplied by its weight, and added.",
        OF_HEADS,
        product=Product("weights", "value", transposed=False),
        line=(scaled_dot_product_attention, "output = matmul"),
    ),
    Value(
        "output.input", "heads concatenated", "The outputs of all heads side by side.", line=(merge_heads, "transpose")
    ),
    Value(
        "",
        "output projection",
        "W_O mixes the outputs of the heads. The result is added to the residual stream.",
        product=Product("output.input", weight=_weight("output")),
        line=(MultiHeadAttention.attend, "self.output("),
    ),
)
_SELF = (
    _INPUT,
    *(
        replace(
            value, product=Product("input", weight=_weight("query_key_value", n)), line=(None, "self.query_key_value")
        )
        for n, value in enumerate((_QUERY, _KEY, _VALUE))
    ),
    *_ATTENTION,
)
_OF_MEMORY = tuple(
    replace(
        value,
        title=f"{value.title}, of the source",
        product=Product("key_value.input", weight=_weight("key_value", n)),
        line=(Decoder.start, "cross.key_value(memory)"),
    )
    for n, value in enumerate((_KEY, _VALUE))
)


def _feed_forward(expanded: str, hidden: str) -> tuple[Value, ...]:
    return (
        _INPUT,
        Value(
            "expand",
            expanded,
            "A detector: how much the input looks like one row of W₁.",
            product=Product("input", weight=_weight("expand")),
            line=(None, "self.expand(x)"),
        ),
        Value(
            "contract.input",
            hidden,
            "The activation keeps what the detector reports, and silences the rest.",
            line=(None, "self.activate("),
        ),
        Value(
            "",
            "output",
            "Each active detector writes its column of W₂. The sum is added to the residual stream.",
            product=Product("contract.input", weight=_weight("contract")),
            line=(None, "self.contract("),
        ),
    )


_NORM = "The vector of each position is normalized."
_RESIDUAL = "x is added to the output of the sub-layer: each layer adds to a stream that reaches the end."

DESCRIPTIONS: dict[type[nn.Module], ModuleDescription] = {
    TokenEmbedding: ModuleDescription(
        "embedding",
        "x = s E[token] + position",
        "Each token becomes a vector. Transformers scale it with s = √d_model, and add the position, unless the scheme "
        "works inside attention.",
        (
            Value(
                "table",
                "E[token], before scaling",
                "The row of the embedding table for this token, learned in training.",
                line=(None, "self.table(ids)"),
            ),
            Value(
                "",
                "embedded tokens",
                "The token's vector, scaled, with the vector of its position if positions are added here.",
                line=(None, "self.positions.add("),
            ),
        ),
    ),
    VectorEmbedding: ModuleDescription(
        "embedding",
        "x = W v + b + position",
        "Each vector of the input is projected to the model's width.",
        (Value("projection.input", "input vectors"), Value("", "embedded vectors")),
    ),
    SelfAttention: ModuleDescription(
        "self_attention",
        "softmax(Q Kᵀ / √d_k + mask) V",
        "Every position asks (Q) all positions of the same sequence, finds those that match (K), and reads them (V).",
        _SELF,
    ),
    CrossAttention: ModuleDescription(
        "cross_attention",
        "softmax(Q Kᵀ / √d_k + mask) V, with K and V of the encoder's output",
        "Every position of the decoder asks the positions of the source.",
        (
            _INPUT,
            Value(
                "key_value.input",
                "memory, the encoder's output",
                "The encoder's output: all that the decoder knows about the source.",
                of_keys=True,
            ),
            replace(_QUERY, product=Product("input", weight=_weight("query")), line=(None, "self.query(x)")),
            *_OF_MEMORY,
            *_ATTENTION,
        ),
    ),
    RelativeAttention: ModuleDescription(
        "self_attention",
        "softmax((q+u)·k + (q+v)·W_R R) V over the memory and the segment",
        "Scores depend on the distance of query and key; keys of earlier segments come first (the memory).",
        (
            _INPUT,
            *(
                replace(value, title=title, of_keys=False, line=(None, "self.query_key_value(x)"))
                for value, title in ((_QUERY, "Q + u"), (_KEY, "K"), (_VALUE, "V"))
            ),
            *_ATTENTION,
        ),
    ),
    StateAttention: ModuleDescription(
        "attention",
        "a = softmax(score(s, m)),  context = Σ a m",
        "The decoder's state is compared with the encoder's states, and reads their weighted mean.",
        (
            Value("query", "states of the decoder"),
            Value("memory", "states of the encoder", of_keys=True),
            Value("scores", "scores before the mask", axes=SCORES),
            _WEIGHTS,
        ),
        StateAttention.weights,
    ),
    MemoryAttention: ModuleDescription(
        "attention",
        "a = softmax(d · z),  c = Σ a v",
        "Each layer of the decoder attends to the source with one head.",
        (Value("hidden", "hidden states"), Value("scores", "scores before the mask", axes=SCORES), _WEIGHTS),
        MemoryAttention.weights,
    ),
    SatelliteAttention: ModuleDescription(
        "attention",
        "attention of each token to its neighbours, itself, its embedding and the relay node",
        "A token sees only five vectors; the relay node carries what is far away. These weights are not recorded.",
        (_INPUT, Value("", "output")),
    ),
    SSRU: ModuleDescription(
        "recurrent",
        "c_t = f_t c_(t-1) + (1 - f_t) W x_t,  output = ReLU(c_t)",
        "A recurrent unit in place of the decoder's self-attention: one vector remembers all earlier tokens.",
        (_INPUT, Value("", "ReLU(c)")),
    ),
    FeedForward: ModuleDescription(
        "feed_forward",
        "activate(x W₁ + b₁) W₂ + b₂",
        "The same two-layer network at every position.",
        _feed_forward("x W₁ + b₁", "after the activation"),
    ),
    GatedFeedForward: ModuleDescription(
        "feed_forward",
        "(activate(x W) · x V) W₂",
        "One half of the hidden layer gates the other.",
        _feed_forward("x W and x V", "gated"),
    ),
    ConvFeedForward: ModuleDescription(
        "feed_forward",
        "two convolutions over positions",
        "A feed-forward network that also sees neighbouring positions.",
        (_INPUT, Value("", "output")),
    ),
    PostNorm: ModuleDescription(
        "residual",
        "LayerNorm(x + Sublayer(x))",
        _RESIDUAL,
        (
            _INPUT,
            Value(
                "norm.input",
                "x + Sublayer(x)",
                "The vector before the sub-layer, plus what the sub-layer adds.",
                line=(None, "x + self.dropout("),
            ),
            Value(
                "",
                "after the norm",
                "The sum, shifted and scaled to a mean of 0 and a variance of 1, then by γ and β.",
                line=(None, "self.norm("),
            ),
        ),
    ),
    PreNorm: ModuleDescription(
        "residual",
        "x + Sublayer(LayerNorm(x))",
        _RESIDUAL,
        (
            _INPUT,
            Value(
                "",
                "x + Sublayer(LayerNorm(x))",
                "The vector before the sub-layer, plus what the sub-layer adds.",
                line=(None, "x + self.dropout("),
            ),
        ),
    ),
    LSTM: ModuleDescription(
        "recurrent",
        "c' = f c + i g,  h' = o tanh(c')",
        "Gates decide what the cell keeps (f), takes in (i, g) and shows (o).",
        (
            _INPUT,
            Value("gates.i", "input gate i"),
            Value("gates.f", "forget gate f"),
            Value("gates.g", "new content g"),
            Value("gates.o", "output gate o"),
            Value("0", "hidden state h"),
            Value("1", "cell state c"),
        ),
    ),
    GRU: ModuleDescription(
        "recurrent",
        "n = tanh(W x + r (U h)),  h' = (1 - z) n + z h",
        "The update gate z keeps the state; the reset gate r hides it from the new one.",
        (
            _INPUT,
            Value("gates.r", "reset gate r"),
            Value("gates.z", "update gate z"),
            Value("gates.n", "new content n"),
            Value("0", "hidden state h"),
        ),
    ),
    GatedConvolution: ModuleDescription(
        "convolution",
        "v(x) · σ(g(x)) of a window of positions",
        "A convolution over neighbouring positions whose output gates itself.",
        (_INPUT, Value("", "output")),
    ),
    nn.LayerNorm: ModuleDescription(
        "norm", "(x - mean) / √(var + ε) · γ + β", _NORM, (_INPUT, Value("", "after the norm"))
    ),
}
DESCRIPTIONS[nn.RMSNorm] = ModuleDescription("norm", "x / rms(x) · γ", _NORM, DESCRIPTIONS[nn.LayerNorm].points)
DESCRIPTIONS[RelayAttention] = replace(
    DESCRIPTIONS[CrossAttention],
    kind="relay_attention",
    equation="softmax(Q Kᵀ / √d_k + mask) V, with K and V of all tokens and the relay node",
    text="The relay node asks all tokens, and carries the answer to them in the next layer.",
)


def describe_logits(equation: str, text: str, weight: Weight, source: Callable[..., Any] | None) -> ModuleDescription:
    """Describe the output matrix and the softmax, for which models have no module."""
    points = (
        Value("input", "h, the last hidden states", "What the model knows before it predicts the next token."),
        Value(
            "",
            "logits",
            "How well the hidden state matches the vector of this output: their dot product.",
            CANDIDATES,
            product=Product("input", weight=weight),
            line=None if source is None else (TokenTable.logits, "self.linear("),
        ),
        Value(
            "probabilities",
            "probabilities, after the softmax",
            "The share of this output: e to the power of its logit, divided by the sum over all outputs.",
            CANDIDATES,
            softmax=("",),
        ),
    )
    return ModuleDescription("logits", equation, text, points, source)


def description_of(module: nn.Module) -> ModuleDescription | None:
    """Return the description of a module's class or nearest base class; None if the module is not shown."""
    return next((DESCRIPTIONS[kind] for kind in type(module).__mro__ if kind in DESCRIPTIONS), None)


def specialized(kind: ModuleDescription, module: nn.Module, residual: nn.Module | None) -> ModuleDescription:
    """Complete the description of a class for one module: its norm, its activation and its input.

    `residual`: the connection around the module; with pre-norm, the module reads LayerNorm(x).
    """
    words = dict[str, str]()
    if isinstance(module, FeedForward):
        words["activate"] = module.activation
    if isinstance(module, PostNorm) and isinstance(module.norm, nn.RMSNorm):
        words["LayerNorm"] = "RMSNorm"
    if isinstance(residual, PreNorm):
        words["x"] = "RMSNorm(x)" if isinstance(residual.norm, nn.RMSNorm) else "LayerNorm(x)"

    def filled(text: str) -> str:
        return re.sub(r"\b[A-Za-z]+\b", lambda word: words.get(word[0], word[0]), text)

    points = tuple(replace(point, title=filled(point.title)) for point in kind.points)
    return replace(kind, equation=filled(kind.equation), points=points)
