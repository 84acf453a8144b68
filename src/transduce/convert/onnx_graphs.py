"""ONNX graphs of our models, traced by PyTorch's exporter: an encoder, and a decoder that takes and returns its cache.

A graph is a small module around the model with plain tensors as inputs and outputs. The layers are the model's own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config.model import AttentionSettings
from transduce.convert.parity import head_outputs
from transduce.models.causal_lm import CausalLM
from transduce.models.masked_lm import TextEncoder
from transduce.models.transformer import Transformer
from transduce.nn.bias import Bias, step_bias
from transduce.nn.cache import DecoderState, LayerCache
from transduce.nn.masks import attention_bias
from transduce.nn.patterns import FullPattern
from transduce.nn.positions import Positions
from transduce.text.special import PAD

OPSET = 20
"""Version of the standard operators; onnxruntime supports it since 1.17."""

MAX_INLINE_BYTES = 1 << 30
"""Weights of this size or more go into a second file, as protobuf is limited to 2 GB."""

Shape = Sequence[int | str]
"""Sizes of a tensor: numbers, and names of sizes that are known only when the graph runs."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A module to trace, with the shapes of its inputs and the names of its outputs.

    `inputs`: the shape of each input, by name. ids and segments are int64, mask is bool, the others are float32.
    `state`: of the inputs that carry over from step to step, the shape at the first step. The outputs after the first
    are the next step's values, in the same order.
    """

    module: nn.Module
    inputs: Mapping[str, Shape]
    outputs: Sequence[str]
    state: Mapping[str, Shape] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Trace the module and write the graph to `path`; large weights go to `path` + .data."""
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        sizes = {"batch": 2, "source": 5, "length": 5, "new": 3, "past": 4}  # other than 0 and 1, which are constants
        examples = []
        for name, shape in self.inputs.items():
            example = torch.ones([sizes[n] if isinstance(n, str) else n for n in shape])
            examples.append(example.to({"ids": torch.long, "segments": torch.long, "mask": torch.bool}.get(name)))
        dynamic = tuple({i: n for i, n in enumerate(shape) if isinstance(n, str)} for shape in self.inputs.values())
        # with gradients: without them, a linear layer may use an operator of oneDNN
        with quiet("torch.onnx"), torch.enable_grad():
            program = torch.onnx.export(
                self.module,
                tuple(examples),
                dynamo=True,
                dynamic_shapes=(dynamic,),
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                opset_version=OPSET,
                verbose=False,
            )
        assert program is not None
        ClearMetadataAndDocStringPass()(program.model)  # stack traces with the paths of this machine
        n_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters())
        program.save(path, external_data=n_bytes >= MAX_INLINE_BYTES)


def graphs_of(model: nn.Module, s: AttentionSettings) -> dict[str, Graph]:
    """The graphs of a model, by name: "encoder", "decoder" or both."""
    if isinstance(model, CausalLM):
        return {"decoder": _decoder(model, s)}
    if isinstance(model, Transformer):
        inputs: dict[str, Shape] = {"ids": ("batch", "source"), "mask": ("batch", "source")}
        encoder = Graph(_Traced(model, _encode_source), inputs, list(_cross_inputs(s)))
        return {"encoder": encoder, "decoder": _decoder(model, s)}
    assert isinstance(model, TextEncoder)
    names = ("ids", "mask") if model.segment_embedding is None else ("ids", "mask", "segments")
    with torch.no_grad():
        outputs = list(head_outputs(model, torch.ones(1, 1, dtype=torch.long), None))
    return {"encoder": Graph(_Traced(model, _encode_text), dict.fromkeys(names, ("batch", "length")), outputs)}


class _Traced(nn.Module):
    """A function of a model and of tensors, as the module that the exporter needs."""

    def __init__(self, model: Any, compute: Callable[..., list[Tensor]]) -> None:
        super().__init__()
        self.model, self.compute = model, compute

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return self.compute(self.model, *inputs)


def _encode_source(model: Transformer, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Ids and mask [B, S] to the keys and values of each decoder block's cross-attention."""
    memory = model.encode(ids.masked_fill(~mask, PAD))
    return [values for block in model.decoder.blocks for values in block.cross_attention.key_value(memory)]


def _encode_text(model: TextEncoder, ids: Tensor, mask: Tensor, segments: Tensor | None = None) -> list[Tensor]:
    """Ids, mask and segments (if it has any) [B, S] to the outputs of the model's head."""
    return list(head_outputs(model, ids.masked_fill(~mask, PAD), segments).values())


def _decode(names: Sequence[str], model: Transformer | CausalLM, *inputs: Tensor) -> list[Tensor]:
    """The next ids [B, T], the mask and the encoder's outputs (of a translator) and the state to logits and new state.

    `names`: what each input is.
    """
    given = dict(zip(names, inputs, strict=True))
    ids, mask = given["ids"], given.get("mask")
    layers: list[LayerCache] = []
    for i in range(len(model.decoder.blocks)):
        history = [given[name] for place in (0, 1) if (name := f"past_window.{i}.{place}") in given]
        cross = (given.get(f"cross_keys.{i}"), given.get(f"cross_values.{i}"))
        layers.append(_GrowingCache(given[f"past_keys.{i}"], given[f"past_values.{i}"], *cross, list(history)))
    bias = torch.zeros(ids.shape[0], 1, 1, 0) if mask is None else attention_bias(mask[:, None])
    state = _TracedState(layers=layers, memory_bias=bias, length=given["past_keys.0"].shape[2])
    logits = model.logits(model.advance(ids, state))
    after: dict[str, Any] = {f"past_keys.{i}": layer.keys for i, layer in enumerate(layers)}
    after |= {f"past_values.{i}": layer.values for i, layer in enumerate(layers)}
    after |= {f"past_window.{i}.{j}": x for i, layer in enumerate(layers) for j, x in enumerate(layer.history)}
    return [logits, *(after[name] for name in names if name.startswith("past_"))]


def _decoder(model: Transformer | CausalLM, s: AttentionSettings) -> Graph:
    inputs: dict[str, Shape] = {"ids": ("batch", "new")}
    if isinstance(model, Transformer):
        inputs |= {"mask": ("batch", "source")} | _cross_inputs(s)
    state: dict[str, Shape] = {
        f"past_{part}.{i}": ("batch", s.n_kv_heads or s.n_heads, "past", width)
        for part, width in (("keys", s.key_width), ("values", s.d_head))
        for i in range(s.depth[-1])
    }
    if s.kernel_size > 1:
        for i in range(s.depth[-1]):
            for place, width in enumerate((s.d_model, s.d_ff)):
                state[f"past_window.{i}.{place}"] = ("batch", s.kernel_size - 1, width)
    inputs |= state
    first = {name: [0 if n == "past" else n for n in shape] for name, shape in state.items()}
    outputs = ["logits", *(name.removeprefix("past_") for name in state)]
    return Graph(_Traced(model, partial(_decode, list(inputs))), inputs, outputs, first)


def _cross_inputs(s: AttentionSettings) -> dict[str, Shape]:
    shape = ("batch", s.n_kv_heads or s.n_heads, "source")
    widths = {"keys": s.key_width, "values": s.d_head}
    return {f"cross_{part}.{i}": (*shape, width) for i in range(s.depth[-1]) for part, width in widths.items()}


# -- changes to the model for tracing, where sizes are symbols: a branch on them would become part of the graph


class _GrowingCache(LayerCache):
    """A cache that concatenates, as a graph cannot write into a buffer."""

    def append(self, keys: Tensor, values: Tensor, known: slice) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values


class _TracedState(DecoderState):
    """A decoder's state of one beam whose mask is the same computation for one new token and for many."""

    def place(self, n_steps: int) -> tuple[Tensor, Tensor]:
        return torch.arange(n_steps) + self.length, torch.arange(n_steps + self.length)

    def biases(
        self,
        patterns: Sequence[FullPattern],
        queries: Tensor,
        keys: Tensor,
        scheme: Positions,
        documents: Tensor | None = None,
    ) -> list[Bias]:
        return [step_bias(pattern, queries, keys, scheme, history=None, masked=True) for pattern in patterns]


@contextmanager
def quiet(logger: str | None) -> Iterator[None]:
    """Silence warnings of a library that do not concern our models; `logger`: the name of its logger."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
