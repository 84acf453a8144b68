"""The parts of `transduce.nn` as nodes of an ONNX graph. `at`: where a part's weights stand in the model's names."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from transduce.config import GPTSettings, ModelSettings
from transduce.convert.onnx_graph import Graph
from transduce.convert.requirements import Needed
from transduce.nn.block import norm_eps
from transduce.nn.masks import HIDDEN
from transduce.nn.positions import halves
from transduce.text.special import BOS, EOS

Around = Callable[[str, int], str]
"""Of the first or second convolution (0, 1): x [B, T, D] with what lies beyond its ends, [B, T + kernel - 1, D]."""


class Layers:
    """The parts, as these settings ask for them, written into a graph. Shapes stand in `transduce.nn`."""

    def __init__(self, graph: Graph, settings: ModelSettings) -> None:
        self.graph, self.s = graph, settings
        self.n_kv_heads = settings.n_kv_heads or settings.n_heads
        self.d_head = settings.d_model // settings.n_heads
        self.norm_eps = norm_eps(settings.norm, settings.norm_eps)

    # -- small parts

    def number(self, value: float) -> str:
        """A float."""
        return self.graph.constant(value, np.float32)

    def size(self, x: str, axis: int) -> str:
        """How long an axis is, as a vector of one number."""
        return self.graph.op("Shape", x, start=axis, end=axis + 1)

    def reshape(self, x: str, *axes: int) -> str:
        """0: as it is; -1: what is left."""
        return self.graph.op("Reshape", x, self.graph.constant(axes))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Axes of size 1."""
        return self.graph.op("Unsqueeze", x, self.graph.constant(axes))

    def linear(self, x: str, at: str) -> str:
        """x W^T + b."""
        y = self.graph.op("MatMul", x, self.graph.weight(f"{at}.weight", transposed=True))
        return self._plus(y, f"{at}.bias")

    def norm(self, x: str, at: str) -> str:
        """Over the last axis."""
        return NORMS[self.s.norm](self, x, at)

    def activate(self, x: str) -> str:
        """As the settings say."""
        return ACTIVATIONS[self.s.activation](self.graph, x)

    def logits(self, hidden: str, table: str) -> str:
        """Before the softmax; `table`: the matrix. That of the embeddings is stored once, and turned in the graph."""
        own = table == "output_embedding.weight"
        if own:
            matrix = self.graph.weight(table, transposed=True)
        else:
            matrix = self.graph.op("Transpose", self.graph.weight(table), perm=[1, 0])
        y = self.graph.op("MatMul", hidden, matrix)
        return self._plus(y, "output_bias")

    def _plus(self, x: str, name: str) -> str:
        return self.graph.op("Add", x, self.graph.weight(name)) if self.graph.has(name) else x

    # -- positions

    def places(self, ids: str, past: str | None = None) -> str:
        """The positions of ids [B, T] that stand behind `past` others (a vector of one number), int64 [T]."""
        scalar = self.graph.constant([0])
        start = self.graph.constant([0]) if past is None else past
        end = self.graph.op("Add", start, self.size(ids, 1))
        start, end = (self.graph.op("Squeeze", value, scalar) for value in (start, end))
        return self.graph.op("Range", start, end, self.graph.constant(1))

    def embed(self, ids: str, at: str, places: str, *, more: str | None = None) -> str:
        """E[ids] * scale + more + positions, and a norm where there is one."""
        if isinstance(self.s, GPTSettings) and self.s.one_end:
            begin = self.graph.op("Equal", ids, self.graph.constant(BOS))
            ids = self.graph.op("Where", begin, self.graph.constant(EOS), ids)
        x = self.graph.op("Gather", self.graph.weight(f"{at}.table.weight"), ids)
        if self.s.scale_embeddings:
            x = self.graph.op("Mul", x, self.number(math.sqrt(self.s.d_model)))
        if more is not None:
            x = self.graph.op("Add", x, more)
        if add := POSITIONS.get(self.s.positions):
            x = self.graph.op("Add", x, add(self, at, places))
        return self.norm(x, f"{at}.norm") if self.s.embedding_norm else x

    def turn(self, places: str) -> Callable[[str], str]:
        """What rotates queries and keys [B, H, T, K] of these places; nothing where positions are of another kind."""
        if self.s.positions != "rotary":
            return lambda x: x
        plane = np.arange(0, self.d_head, 2, dtype=np.float32)
        rate = self.graph.constant(np.exp(plane * np.float32(-math.log(10000.0) / self.d_head)), np.float32)
        place = self.unsqueeze(self.graph.op("Cast", places, to=1), 1)
        angle = self.graph.op("Mul", place, rate)  # [T, K/2]
        cos, sin = self.graph.op("Cos", angle), self.graph.op("Sin", angle)

        def rotated(x: str) -> str:
            mul = lambda a, b: self.graph.op("Mul", a, b)  # noqa: E731
            first, second = self.graph.split("Split", x, n=2, axis=-1, num_outputs=2)
            left = self.graph.op("Sub", mul(first, cos), mul(second, sin))
            right = self.graph.op("Add", mul(second, cos), mul(first, sin))
            return self.graph.op("Concat", left, right, axis=-1)

        return rotated

    # -- attention

    def hidden(self, seen: str) -> str:
        """The bias of a mask: 0 where it is true."""
        return self.graph.op("Where", seen, self.number(0.0), self.number(HIDDEN))

    def heads(self, x: str, at: str, *counts: int) -> list[str]:
        """Projections of one input, [B, H, T, K] for each count of heads."""
        return PROJECTIONS[self.s.projection](self, x, at, counts)

    def attend(self, query: str, key: str, value: str, *, bias: str, at: str) -> str:
        """softmax(Q K^T / sqrt(d_k) + bias) V, merged and projected; bias [B or 1, 1, T or 1, S]."""
        groups = self.s.n_heads // self.n_kv_heads
        if groups > 1:  # query heads in groups: [B, H_kv, groups, T, K]
            query = self.reshape(query, 0, self.n_kv_heads, groups, -1, self.d_head)
            key, value, bias = (self.unsqueeze(x, 2) for x in (key, value, bias))
        n = 5 if groups > 1 else 4
        flipped = self.graph.op("Transpose", key, perm=[*range(n - 2), n - 1, n - 2])
        scores = self.graph.op("MatMul", query, flipped)
        scores = self.graph.op("Mul", scores, self.number(1 / math.sqrt(self.d_head)))
        weights = self.graph.op("Softmax", self.graph.op("Add", scores, bias), axis=-1)
        found = self.graph.op("MatMul", weights, value)
        if groups > 1:
            found = self.reshape(found, 0, self.s.n_heads, -1, self.d_head)
        merged = self.reshape(self.graph.op("Transpose", found, perm=[0, 2, 1, 3]), 0, 0, self.s.d_model)
        return self.linear(merged, f"{at}.output")

    # -- sub-layers

    def residual(self, x: str, at: str, sublayer: Callable[[str], str]) -> str:
        """x after a sub-layer."""
        return RESIDUALS[self.s.residual](self, x, at, sublayer)

    def last_norm(self, x: str, at: str) -> str:
        """Behind the last block, where the residual connection needs it."""
        return self.norm(x, f"{at}.norm") if self.s.residual == "pre" else x

    def feed_forward(self, x: str, at: str, around: Around) -> str:
        """Position by position; a convolution sees what `around` puts beside."""
        return FEED_FORWARDS[self.s.feed_forward](self, x, at, around)


def _layer_norm(layers: Layers, x: str, at: str) -> str:
    bias = [layers.graph.weight(f"{at}.bias")] if layers.graph.has(f"{at}.bias") else []
    weight = layers.graph.weight(f"{at}.weight")
    return layers.graph.op("LayerNormalization", x, weight, *bias, axis=-1, epsilon=layers.norm_eps)


def _rms_norm(layers: Layers, x: str, at: str) -> str:
    op = layers.graph.op
    mean = op("ReduceMean", op("Mul", x, x), layers.graph.constant([-1]), keepdims=1)
    size = op("Sqrt", op("Add", mean, layers.number(layers.norm_eps)))
    return op("Mul", op("Div", x, size), layers.graph.weight(f"{at}.weight"))


def _post(layers: Layers, x: str, at: str, sublayer: Callable[[str], str]) -> str:
    return layers.norm(layers.graph.op("Add", x, sublayer(x)), f"{at}.norm")


def _pre(layers: Layers, x: str, at: str, sublayer: Callable[[str], str]) -> str:
    return layers.graph.op("Add", x, sublayer(layers.norm(x, f"{at}.norm")))


def _plain(layers: Layers, x: str, at: str, around: Around) -> str:
    return layers.linear(layers.activate(layers.linear(x, f"{at}.expand")), f"{at}.contract")


def _gated(layers: Layers, x: str, at: str, around: Around) -> str:
    gate, value = layers.graph.split("Split", layers.linear(x, f"{at}.expand"), n=2, axis=-1, num_outputs=2)
    return layers.linear(layers.graph.op("Mul", layers.activate(gate), value), f"{at}.contract")


def _conv(layers: Layers, x: str, at: str, around: Around) -> str:
    hidden = _convolve(layers, around(x, 0), f"{at}.expand")
    return _convolve(layers, around(layers.activate(hidden), 1), f"{at}.contract")


def _convolve(layers: Layers, x: str, at: str) -> str:
    op, graph = layers.graph.op, layers.graph
    bias = [graph.weight(f"{at}.bias")] if graph.has(f"{at}.bias") else []
    y = op("Conv", op("Transpose", x, perm=[0, 2, 1]), graph.weight(f"{at}.weight"), *bias)
    return op("Transpose", y, perm=[0, 2, 1])


def _full(layers: Layers, x: str, at: str, counts: tuple[int, ...]) -> list[str]:
    y, d_head = layers.linear(x, at), layers.d_head
    parts = [y]
    if len(counts) > 1:
        sizes = layers.graph.constant([n * d_head for n in counts])
        parts = layers.graph.split("Split", y, sizes, n=len(counts), axis=-1)
    return [
        layers.graph.op("Transpose", layers.reshape(part, 0, 0, n, d_head), perm=[0, 2, 1, 3])
        for part, n in zip(parts, counts, strict=True)
    ]


def _shared(layers: Layers, x: str, at: str, counts: tuple[int, ...]) -> list[str]:
    slices = layers.reshape(x, 0, 0, layers.s.n_heads, layers.d_head)
    slices = layers.graph.op("Transpose", slices, perm=[0, 2, 1, 3])
    return [layers.linear(slices, f"{at}.parts.{i}") for i in range(len(counts))]


def _sinusoids(layers: Layers, at: str, places: str) -> str:
    """sin(place * rate + phase), in float64 as in `nn.positions`; a cosine is a sine a quarter turn on. Any length."""
    d = layers.s.d_model
    columns = np.arange(d)
    rate = np.exp((columns - columns % 2) * (-math.log(10000.0) / d))
    phase = columns % 2 * (math.pi / 2)
    if layers.s.positions == "sinusoidal_halves":
        order = halves(d).numpy()
        rate, phase = rate[order], phase[order]
    op, graph = layers.graph.op, layers.graph
    place = layers.unsqueeze(op("Cast", places, to=11), 1)  # float64
    angle = op("Add", op("Mul", place, graph.constant(rate, np.float64)), graph.constant(phase, np.float64))
    return op("Cast", op("Sin", angle), to=1)


def _learned(layers: Layers, at: str, places: str) -> str:
    return layers.graph.op("Gather", layers.graph.weight(f"{at}.positions.embedding.weight"), places)


def _first(layers: Layers, x: str, seen: str) -> str:
    return layers.graph.op("Gather", x, layers.graph.constant(0), axis=1)


def _mean(layers: Layers, x: str, seen: str) -> str:
    op, axis = layers.graph.op, layers.graph.constant([1])
    counted = op("Cast", seen, to=1)  # [B, S, 1]
    total = op("ReduceSum", op("Mul", x, counted), axis, keepdims=0)
    return op("Div", total, op("ReduceSum", counted, axis, keepdims=0))


def _max(layers: Layers, x: str, seen: str) -> str:
    left = layers.graph.op("Where", seen, x, layers.number(-math.inf))
    return layers.graph.op("ReduceMax", left, layers.graph.constant([1]), keepdims=0)


NORMS = {"layer": _layer_norm, "rms": _rms_norm}
RESIDUALS = {"post": _post, "pre": _pre}
FEED_FORWARDS = {"plain": _plain, "gated": _gated, "conv": _conv}
PROJECTIONS = {"full": _full, "shared": _shared}
POSITIONS: dict[str, Callable[[Layers, str, str], str] | None] = {
    "sinusoidal": _sinusoids,
    "sinusoidal_halves": _sinusoids,
    "learned": _learned,
    "none": None,
    "rotary": None,
}
POOLINGS = {"first": _first, "mean": _mean, "max": _max}
ACTIVATIONS: dict[str, Callable[[Graph, str], str]] = {
    "relu": lambda graph, x: graph.op("Relu", x),
    "gelu": lambda graph, x: graph.op("Gelu", x),
    "gelu_tanh": lambda graph, x: graph.op("Gelu", x, approximate="tanh"),
    "silu": lambda graph, x: graph.op("Mul", x, graph.op("Sigmoid", x)),
}
NEEDED: Needed = {
    "positions": POSITIONS,
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "feed_forward": FEED_FORWARDS,
    "projection": PROJECTIONS,
    "residual": RESIDUALS,
    "pooling": POOLINGS,
}
"""The settings that choose parts, and the parts that have nodes here."""
