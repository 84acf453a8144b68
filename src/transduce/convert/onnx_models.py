"""The models of `transduce.models` as ONNX graphs: an encoder, a decoder that takes its cache and gives it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from transduce.config import BertSettings, EncoderSettings, ModelSettings, OutputSettings, PoolingSettings
from transduce.convert.onnx_graph import Axes, Graph
from transduce.convert.onnx_layers import POOLINGS, Layers


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A graph, and how it is used: `state` are the inputs that carry over from step to step, with their first shapes.

    The outputs behind the first are the next step's state, in the same order.
    """

    graph: Graph
    state: dict[str, Axes]


def source_encoder(s: ModelSettings, tensors: Mapping[str, Tensor]) -> Drawn:
    """Of a translator: ids and mask [B, S] to the keys and values of each block's attention to the memory."""
    graph = Graph(tensors)
    layers = Layers(graph, s)
    ids, mask = _text(graph, "source")
    memory = _encoder(layers, ids, mask, layers.embed(ids, "src_embedding", layers.places(ids)))
    for number in range(s.depth[-1]):
        at = f"decoder.blocks.{number}.cross_attention.key_value"
        key, value = layers.heads(memory, at, layers.n_kv_heads, layers.n_kv_heads)
        for name, values in (("keys", key), ("values", value)):
            graph.output(f"cross_{name}.{number}", values, _kept(layers, "source"))
    return Drawn(graph, {})


def decoder(s: ModelSettings, tensors: Mapping[str, Tensor]) -> Drawn:
    """Of a translator or a language model: the next ids [B, T] and the state to logits [B, T, V] and the next state.

    A translator's takes the source's mask, and what its encoder gave, too.
    """
    graph = Graph(tensors)
    layers = Layers(graph, s)
    ids = graph.input("ids", "int64", ("batch", "new"))
    cross = s.kind == "transformer"
    memory = layers.unsqueeze(layers.hidden(graph.input("mask", "bool", ("batch", "source"))), 1, 2) if cross else None
    steps = _Steps(layers, ids)
    table = "tgt_embedding" if cross else "embedding"
    x = layers.embed(ids, table, steps.places)
    for number in range(s.depth[-1]):
        x = _decoder_block(layers, x, number, steps, memory)
    hidden = layers.last_norm(x, "decoder")
    assert isinstance(s, OutputSettings)
    output = "output_embedding.weight" if s.tie == "none" else f"{table}.table.weight"
    graph.output("logits", layers.logits(hidden, output), ("batch", "new", "vocabulary"))
    for name in steps.first:
        graph.output(name.removeprefix("past_"), *steps.next[name])
    return Drawn(graph, steps.first)


def text_encoder(s: ModelSettings, tensors: Mapping[str, Tensor]) -> Drawn:
    """Of an encoder alone: ids, mask and segments [B, S] to what its heads give."""
    graph = Graph(tensors)
    layers = Layers(graph, s)
    ids, mask = _text(graph, "length")
    more = None
    assert isinstance(s, EncoderSettings)
    if s.n_segments:
        segments = graph.input("segments", "int64", ("batch", "length"))
        more = graph.op("Gather", graph.weight("segment_embedding.weight"), segments)
    x = _encoder(layers, ids, mask, layers.embed(ids, "embedding", layers.places(ids), more=more))
    HEADS[s.kind](layers, x, mask)
    return Drawn(graph, {})


GRAPHS: dict[str, dict[str, Callable[[ModelSettings, Mapping[str, Tensor]], Drawn]]] = {
    "encoder-decoder": {"encoder": source_encoder, "decoder": decoder},
    "decoder": {"decoder": decoder},
    "encoder": {"encoder": text_encoder},
}
"""The graphs of each shape of model, by name."""


def _masked_head(layers: Layers, x: str, mask: str) -> None:
    s, graph = layers.s, layers.graph
    assert isinstance(s, BertSettings)
    asked = layers.norm(layers.activate(layers.linear(x, "head.dense")), "head.norm")
    output = "output_embedding.weight" if s.tie == "none" else "embedding.table.weight"
    graph.output("logits", layers.logits(asked, output), ("batch", "length", "vocabulary"))
    if s.next_sentence:
        told = layers.linear(_pooled(layers, x, mask, "first"), "next_sentence")
        graph.output("next_sentence", told, ("batch", "vector"))


def _no_head(layers: Layers, x: str, mask: str) -> None:
    layers.graph.output("hidden", x, ("batch", "length", layers.s.d_model))
    assert isinstance(layers.s, PoolingSettings)
    layers.graph.output("pooled", _pooled(layers, x, mask, layers.s.pooling), ("batch", "vector"))


def _labels_head(layers: Layers, x: str, mask: str) -> None:
    assert isinstance(layers.s, PoolingSettings)
    told = layers.linear(_pooled(layers, x, mask, layers.s.pooling), "labels")
    layers.graph.output("logits", told, ("batch", "vector"))


HEADS: dict[str, Callable[[Layers, str, str], None]] = {
    "bert": _masked_head,
    "bert-encoder": _no_head,
    "bert-classifier": _labels_head,
}
"""What an encoder alone gives of its last hidden states [B, S, D] and the mask."""


def _pooled(layers: Layers, x: str, mask: str, pooling: str) -> str:
    """The whole as one vector."""
    vector = POOLINGS[pooling](layers, x, layers.unsqueeze(mask, 2))
    return layers.graph.op("Tanh", layers.linear(vector, "pooler.dense"))


class _Steps:
    """What a decoder carries from step to step, and where the new tokens stand."""

    def __init__(self, layers: Layers, ids: str) -> None:
        self.layers, self.ids = layers, ids
        self.first: dict[str, Axes] = {}
        self.next: dict[str, tuple[str, Axes]] = {}
        graph = layers.graph
        self._past = [self._input("keys", n) for n in range(layers.s.depth[-1])]
        self._values = [self._input("values", n) for n in range(layers.s.depth[-1])]
        past = layers.size(self._past[0], 2)
        self.places = layers.places(ids, past)
        self.turn = layers.turn(self.places)
        known = graph.op("Add", past, layers.size(ids, 1))
        zero, one = graph.constant(0), graph.constant(1)
        everything = graph.op("Range", zero, graph.op("Squeeze", known, graph.constant([0])), one)
        seen = graph.op("LessOrEqual", everything, layers.unsqueeze(self.places, 1))  # [T, P + T]
        self.bias = layers.unsqueeze(layers.hidden(seen), 0, 1)

    def append(self, key: str, value: str, number: int) -> tuple[str, str]:
        """Keys and values of a block with those from before in front."""
        found = []
        for name, past, new in (("keys", self._past[number], key), ("values", self._values[number], value)):
            both = self.layers.graph.op("Concat", past, new, axis=2)
            self.next[f"past_{name}.{number}"] = both, _kept(self.layers, "past + new")
            found.append(both)
        return found[0], found[1]

    def window(self, x: str, number: int, place: int) -> str:
        """x [B, T, D] with the inputs of the kernel's last steps in front, which are kept for the next."""
        s, graph = self.layers.s, self.layers.graph
        reach = s.kernel_size - 1
        if not reach:
            return x
        name = f"past_window.{number}.{place}"
        axes: Axes = ("batch", reach, s.d_ff if place else s.d_model)
        self.first[name] = axes
        both = graph.op("Concat", graph.input(name, "float", axes), x, axis=1)
        far = graph.constant([1 << 30])
        self.next[name] = graph.op("Slice", both, graph.constant([-reach]), far, graph.constant([1])), axes
        return both

    def _input(self, what: str, number: int) -> str:
        name = f"past_{what}.{number}"
        self.first[name] = _kept(self.layers, 0)
        return self.layers.graph.input(name, "float", _kept(self.layers, "past"))


def _kept(layers: Layers, length: int | str) -> Axes:
    """The shape of keys and values."""
    return "batch", layers.n_kv_heads, length, layers.d_head


def _text(graph: Graph, length: str) -> tuple[str, str]:
    axes = ("batch", length)
    return graph.input("ids", "int64", axes), graph.input("mask", "bool", axes)


def _encoder(layers: Layers, ids: str, mask: str, x: str) -> str:
    """The embedded text after all blocks."""
    s, graph = layers.s, layers.graph
    bias = layers.unsqueeze(layers.hidden(mask), 1, 2)  # [B, 1, 1, S]
    turn = layers.turn(layers.places(ids)) if s.depth[0] else None

    def around(y: str, place: int) -> str:
        reach = s.kernel_size - 1
        kept = graph.op("Mul", y, graph.op("Cast", layers.unsqueeze(mask, 2), to=1))
        return graph.op("Pad", kept, graph.constant([0, reach // 2, 0, 0, reach - reach // 2, 0]))

    for number in range(s.depth[0]):
        at = f"encoder.blocks.{number}"

        def attend(y: str, at: str = at) -> str:
            assert turn is not None
            counts = s.n_heads, layers.n_kv_heads, layers.n_kv_heads
            query, key, value = layers.heads(y, f"{at}.self_attention.query_key_value", *counts)
            return layers.attend(turn(query), turn(key), value, bias=bias, at=f"{at}.self_attention")

        def transform(y: str, at: str = at) -> str:
            return layers.feed_forward(y, f"{at}.feed_forward", around)

        x = layers.residual(x, f"{at}.self_attention_residual", attend)
        x = layers.residual(x, f"{at}.feed_forward_residual", transform)
    return layers.last_norm(x, "encoder")


def _decoder_block(layers: Layers, x: str, number: int, steps: _Steps, memory: str | None) -> str:
    s, at = layers.s, f"decoder.blocks.{number}"

    def attend_self(y: str) -> str:
        counts = s.n_heads, layers.n_kv_heads, layers.n_kv_heads
        query, key, value = layers.heads(y, f"{at}.self_attention.query_key_value", *counts)
        key, value = steps.append(steps.turn(key), value, number)
        return layers.attend(steps.turn(query), key, value, bias=steps.bias, at=f"{at}.self_attention")

    def attend_memory(y: str) -> str:
        assert memory is not None
        (query,) = layers.heads(y, f"{at}.cross_attention.query", s.n_heads)
        names = (f"cross_keys.{number}", f"cross_values.{number}")
        key, value = (layers.graph.input(name, "float", _kept(layers, "source")) for name in names)
        return layers.attend(query, key, value, bias=memory, at=f"{at}.cross_attention")

    def transform(y: str) -> str:
        return layers.feed_forward(y, f"{at}.feed_forward", lambda z, place: steps.window(z, number, place))

    x = layers.residual(x, f"{at}.self_attention_residual", attend_self)
    if memory is not None:
        x = layers.residual(x, f"{at}.cross_attention_residual", attend_memory)
    return layers.residual(x, f"{at}.feed_forward_residual", transform)
