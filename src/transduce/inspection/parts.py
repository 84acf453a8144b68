"""What there is to see in each part of a model: PARTS, from which the page, its JSON and the Python API follow.

A part is a module. To show a new kind of module, add an entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import transduce
from transduce.errors import SettingsError
from transduce.inspection.arrays import NamedArray, to_numpy
from transduce.inspection.recording import Recording, title
from transduce.nn.attention import CrossAttention, SelfAttention, SharedProjection
from transduce.nn.convolutional import GatedConvolution, MemoryAttention
from transduce.nn.embedding import TokenEmbedding, VectorEmbedding
from transduce.nn.feedforward import ConvFeedForward, FeedForward, GatedFeedForward
from transduce.nn.recurrent import GRU, LSTM, RecurrentEncoder
from transduce.nn.recurrent_decoder import StateAttention
from transduce.nn.relative_attention import RelativeAttention
from transduce.nn.ssru import SSRU
from transduce.nn.stack import PostNorm, PreNorm
from transduce.nn.star import SatelliteAttention

MATRIX = ("position", "width")
OF_HEADS = ("head", "position", "width")
SCORES = ("head", "query", "key")


Rows = tuple[Tensor, Tensor | None]
Weight = Callable[[Any], Rows | None]
"""From a module to rows of a weight matrix, and their bias; None where heads share one matrix."""


@dataclass(frozen=True, slots=True)
class Product:
    """How each cell of a value follows: scale * left[i] . right[j] (transposed), or left[i] . right[:, j].

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
    """What to say and to show of a class of modules; `source`: the function that computes it."""

    kind: str
    equation: str
    text: str
    points: tuple[Point, ...]
    source: Callable[..., Any]


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
_RESIDUAL = "The input goes on beside the sub-layer, so that each layer adds to a stream that reaches to the end."

PARTS: dict[type[nn.Module], PartKind] = {
    TokenEmbedding: PartKind(
        "embedding",
        "x = E[token] · √d_model + position",
        "Each token becomes a vector; the position is added, unless the scheme works inside attention.",
        (Point("table", "E[token], before scaling"), Point("", "embedded tokens")),
        TokenEmbedding.forward,
    ),
    VectorEmbedding: PartKind(
        "embedding",
        "x = W v + b + position",
        "Each vector of the input is projected to the model's width.",
        (Point("projection.input", "input vectors"), Point("", "embedded vectors")),
        VectorEmbedding.forward,
    ),
    SelfAttention: PartKind(
        "self_attention",
        "softmax(Q Kᵀ / √d_k + mask) V",
        "Every position asks (Q) all positions of its own sequence, finds those that match (K), and reads them (V).",
        _SELF,
        SelfAttention.forward,
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
        CrossAttention.forward,
    ),
    RelativeAttention: PartKind(
        "self_attention",
        "softmax((q+u)·k + (q+v)·W_R R) V over the memory and the segment",
        "Scores depend on the distance of query and key; keys of earlier segments come first (the memory).",
        (_INPUT, *(Point(p, t, OF_HEADS) for p, t in (("query", "Q + u"), ("key", "K"), ("value", "V"))), *_ATTENTION),
        RelativeAttention.forward,
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
        StateAttention.attend,
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
        MemoryAttention.attend,
    ),
    SatelliteAttention: PartKind(
        "attention",
        "attention of each token to its neighbours, itself, its embedding and the relay node",
        "A token sees only five vectors; the relay node carries what is far away.",
        (_INPUT, Point("", "output")),
        SatelliteAttention.forward,
    ),
    SSRU: PartKind(
        "recurrent",
        "c_t = f_t c_(t-1) + (1 - f_t) W x_t,  output = ReLU(c_t)",
        "A recurrent unit in place of the decoder's self-attention: one vector remembers all earlier tokens.",
        (_INPUT, Point("", "ReLU(c)")),
        SSRU.forward,
    ),
    FeedForward: PartKind(
        "feed_forward",
        "max(0, x W₁ + b₁) W₂ + b₂",
        "The same two-layer network at every position.",
        (
            _INPUT,
            Point("expand", "x W₁ + b₁", product=Product("input", weight=_linear("expand"))),
            Point("contract.input", "after the activation"),
            Point("", "output", product=Product("contract.input", weight=_linear("contract"))),
        ),
        FeedForward.forward,
    ),
    GatedFeedForward: PartKind(
        "feed_forward",
        "(activate(x W) · x V) W₂",
        "One half of the hidden layer gates the other.",
        (
            _INPUT,
            Point("expand", "x W and x V", product=Product("input", weight=_linear("expand"))),
            Point("contract.input", "gated"),
            Point("", "output", product=Product("contract.input", weight=_linear("contract"))),
        ),
        GatedFeedForward.forward,
    ),
    ConvFeedForward: PartKind(
        "feed_forward",
        "two convolutions over positions",
        "A feed-forward network that also sees neighbouring positions.",
        (_INPUT, Point("", "output")),
        ConvFeedForward.forward,
    ),
    PostNorm: PartKind(
        "residual",
        "LayerNorm(x + Sublayer(x))",
        _RESIDUAL,
        (_INPUT, Point("norm.input", "x + Sublayer(x)"), Point("", "after the norm")),
        PostNorm.forward,
    ),
    PreNorm: PartKind(
        "residual",
        "x + Sublayer(LayerNorm(x))",
        _RESIDUAL,
        (_INPUT, Point("norm", "LayerNorm(x)"), Point("", "x + Sublayer(LayerNorm(x))")),
        PreNorm.forward,
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
        LSTM.forward,
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
        GRU.forward,
    ),
    GatedConvolution: PartKind(
        "convolution",
        "v(x) · σ(g(x)) of a window of positions",
        "A convolution over neighbouring positions whose output gates itself.",
        (_INPUT, Point("", "output")),
        GatedConvolution.forward,
    ),
    nn.LayerNorm: PartKind(
        "norm",
        "(x - mean) / √(var + ε) · γ + β",
        "The norm after the last block.",
        (_INPUT, Point("", "after the norm")),
        nn.LayerNorm.forward,
    ),
}
PARTS[nn.RMSNorm] = PartKind(
    "norm", "x / rms(x) · γ", "The norm after the last block.", PARTS[nn.LayerNorm].points, nn.RMSNorm.forward
)


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the model in the order of computation, with its recorded values by name."""

    name: str
    kind: PartKind
    module: nn.Module
    side: str
    keys: str
    is_backward: bool = False  # a unit that reads from the end
    values: Mapping[str, NamedArray] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return title(self.name)

    @property
    def stack(self) -> str:
        """encoder or decoder."""
        return "encoder" if self.name.startswith(("encoder", "src_embedding")) or self.side == "src" else "decoder"

    @property
    def layer(self) -> int | None:
        return next((int(word) for word in self.name.split(".") if word.isdigit()), None)

    def point(self, name: str) -> Point:
        """The point of a value of this part."""
        return next(point for point in self.kind.points if self.full_name(point) == name)

    def full_name(self, point: Point) -> str:
        """The name of a value."""
        return f"{self.name}.{point.name}" if point.name else self.name

    def source(self) -> dict[str, Any]:
        """Where it is computed: the file in this package, the line, and the code."""
        lines, line = inspect.getsourcelines(self.kind.source)
        file = Path(inspect.getsourcefile(self.kind.source) or "")
        root = Path(transduce.__file__).parent
        inside = file.relative_to(root) if file.is_relative_to(root) else Path(*file.parts[-4:])
        return {"file": inside.as_posix(), "line": line, "code": inspect.cleandoc("\n" + "".join(lines)), "url": None}


def kind_of(module: nn.Module) -> PartKind | None:
    """The entry of a module's class or of the nearest class above it; None for what is not shown."""
    return next((PARTS[one] for one in type(module).__mro__ if one in PARTS), None)


def parts_of(model: nn.Module, found: Recording, side_of: Callable[[str], tuple[str, str]]) -> Iterator[Part]:
    """The parts of a model in the order of computation, with what was recorded of them.

    `side_of`: from a part's name, the sides that its positions and its keys belong to.
    """
    modules = dict(model.named_modules())
    shown: dict[str, PartKind] = {}
    for value in found:
        owner = value
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        kind = kind_of(modules[owner]) if owner else None
        nested = any(owner.startswith(f"{other}.") for other in _owners(owner, modules))
        if kind is not None and not nested:
            shown.setdefault(owner, kind)
    for name, kind in sorted(shown.items(), key=lambda item: _last_place(item[0], found)):
        side, keys = side_of(name)
        part = Part(name, kind, modules[name], side, keys, _is_backward(name, modules))
        yield replace(part, values=dict(_values(part, found)))


def _is_backward(name: str, modules: Mapping[str, nn.Module]) -> bool:
    encoder = modules.get(name.partition(".layers.")[0])
    return isinstance(encoder, RecurrentEncoder) and encoder.reverse[int(name.rpartition(".")[2])]


def _owners(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The parts that contain a module: a norm inside a residual connection is not a part of its own."""
    while name := name.rpartition(".")[0]:
        if kind_of(modules[name]) is not None:
            yield name


def _last_place(name: str, found: Recording) -> int:
    order = list(found)
    return max((i for i, value in enumerate(order) if value == name or value.startswith(f"{name}.")), default=0)


def _values(part: Part, found: Recording) -> Iterator[tuple[str, NamedArray]]:
    for point in part.kind.points:
        name = part.full_name(point)
        if point.name == "heads":
            if f"{part.name}.output.input" not in found:
                continue
            merged = found.value(f"{part.name}.output.input")
            value = merged.unflatten(-1, (-1, part.module.d_head)).transpose(1, 2)
        elif name in found:
            # The memory is the same at each step of a decoder.
            value = found[name][0] if point.of_keys else found.value(name)
        else:
            continue
        if point.name == "key" or point.name == "value":
            groups = getattr(part.module, "n_heads", 1) // value.shape[1]
            value = value.repeat_interleave(groups, 1)
        array = to_numpy(value)
        array = array[0] if array.shape[0] == 1 else array
        array = array[::-1] if part.is_backward else array
        while array.ndim > len(point.axes):
            array = array[0]
        if array.ndim < len(point.axes):
            continue
        if point.name == "bias":  # shared by heads and, where it only hides padding, by queries
            array = np.broadcast_to(array, found.value(f"{part.name}.weights").shape[1:])
        rows = part.keys if point.of_keys else part.side
        yield name, NamedArray(array, point.axes, point.title, rows, part.keys if point.keys else None)


def cell(part: Part, name: str, index: tuple[int, ...]) -> dict[str, Any] | None:
    """The dot product behind one cell of a value: its terms, scale and bias.

    None for a cell that is not only a product: where queries and keys are rotated, where relations add to the values,
    and where heads share one projection.

    Raises:
        SettingsError: There is no such cell.
    """
    shape = part.values[name].shape
    if len(index) != len(shape) or not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
        raise SettingsError(f"{list(index)}: {name} has no such cell; its shape is {list(shape)}")
    product = part.point(name).product
    if product is None:
        return None
    left = part.values[f"{part.name}.{product.left}"].array
    *head, row, column = index
    bias = None
    if product.weight is not None:
        rows = product.weight(part.module)
        if rows is None:
            return None
        weight, biases = rows
        width = shape[-1]
        groups = shape[0] * width // len(weight) if head else 1  # heads that share keys
        place = (head[0] // groups) * width + column if head else column
        a, b = left[row], weight[place].detach().float().cpu().numpy()
        bias = None if biases is None else float(biases[place])
    else:
        right = part.values[f"{part.name}.{product.right}"].array
        left, right = (x[head[0]] if x.ndim == 3 else x for x in (left, right))
        a, b = left[row], right[column] if product.transposed else right[:, column]
    scale = product.scale(part.module)
    result = float(scale * (a.astype("f8") @ b.astype("f8")) + (bias or 0.0))
    shown = float(part.values[name].array[index])
    if abs(result - shown) > 1e-4 * (1 + abs(shown)):
        return None
    terms = [[float(x), float(y)] for x, y in zip(a, b, strict=True)]
    text = f"{product.left} · {product.right or 'weights'}"
    return {"terms": terms, "scale": scale, "bias": bias, "result": result, "text": text}
