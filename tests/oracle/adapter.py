"""Convert a model of the project for the oracle: its settings to `Options`, its weights to the oracle's names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oracle.numpy_transformer import Array, Options
from transduce.config.architectures import MODEL_SETTINGS, TransformerSettings
from transduce.config.model import ModelSettings, OutputSettings
from transduce.text.special import BOS, EOS

# The embeddings of each side, and the stacks, of every kind of model.
SHAPES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "transformer": ({"src": "src_embedding", "tgt": "tgt_embedding"}, ("encoder", "decoder")),
    "gpt": ({"tgt": "embedding"}, ("decoder",)),
}
EPSILON = {"layer": 1e-5, "rms": 1e-6}


def fitting(*, kind: str = "transformer", **values: Any) -> Any:
    """Settings of an architecture from the values that it has a field for."""
    section = MODEL_SETTINGS[kind]
    return section(**{key: value for key, value in values.items() if key in section.model_fields})


def options_of(s: ModelSettings) -> Options:
    """The settings that the oracle needs."""
    return Options(
        n_heads=s.n_heads,
        n_kv_heads=s.n_kv_heads or s.n_heads,
        n_encoder_layers=s.depth[0],
        n_decoder_layers=s.depth[-1],
        residual=s.residual,
        norm=s.norm,
        norm_epsilon=s.norm_eps or EPSILON[s.norm],
        positions=s.positions,
        feed_forward=s.feed_forward,
        activation=s.activation,
        projection=s.projection,
        scale_embeddings=s.scale_embeddings,
        embedding_norm=s.embedding_norm,
        patterns={stack: getattr(s, f"{stack}_pattern") for stack in SHAPES.get(s.kind, ({}, ("encoder",)))[1]},
        window=s.window or 0,
        summary_tokens=s.summary_tokens,
        factors=s.factors,
        decoder_self=s.decoder_self if isinstance(s, TransformerSettings) else "attention",
    )


def randomize(model: nn.Module, *, seed: int = 0, scale: float = 0.3) -> None:
    """Randomize every weight: fresh biases are 0 and norms 1, which would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            if "norm" in name and name.endswith("weight"):
                weight.add_(1)


def numpy_weights(state: Mapping[str, Tensor], s: ModelSettings) -> dict[str, Array]:
    """A model's state dict under the oracle's names."""
    known = {name.replace(".blocks.", "."): tensor.detach().double().numpy() for name, tensor in state.items()}
    sides, stacks = SHAPES[s.kind]
    weights = {"output": known["output_embedding.weight"]}
    if isinstance(s, OutputSettings) and s.output_bias:
        weights["output_bias"] = known["output_bias"]
    for side, name in sides.items():
        weights[f"{side}_embedding"] = known[f"{name}.table.weight"]
        if side == "tgt" and getattr(s, "one_end", False):
            weights["tgt_embedding"] = weights["tgt_embedding"].copy()
            weights["tgt_embedding"][BOS] = weights["tgt_embedding"][EOS]
        if s.positions == "learned":
            weights[f"{side}_positions"] = known[f"{name}.positions.embedding.weight"]
        _copy(known, f"{name}.norm", weights, f"{side}_norm")
    for stack, name in zip(stacks, sides.values(), strict=True):
        if s.positions == "t5":
            weights[f"{stack}.distances"] = known[f"{name}.positions.bias.weight"]
        for part in ("key", "value") if s.positions == "shaw" else ():
            weights[f"{stack}.relations.{part}"] = known[f"{name}.positions.{part}_vectors.weight"]
    for stack, n_layers in zip(stacks, s.depth, strict=True):
        _copy(known, f"{stack}.norm", weights, f"{stack}.norm")
        for n in range(n_layers):
            _block(known, f"{stack}.{n}", weights, s)
    return weights


def encoder_weights(state: Mapping[str, Tensor], s: ModelSettings, segments: NDArray[np.int64]) -> dict[str, Array]:
    """The weights that `numpy_transformer.encode` needs for one sentence; `segments[t]`: the segment of token t.

    Segments become part of the positions.
    """
    known = {name.replace(".blocks.", "."): tensor.detach().double().numpy() for name, tensor in state.items()}
    weights: dict[str, Array] = {"src_embedding": known["embedding.table.weight"]}
    if s.positions == "learned":
        weights["src_positions"] = known["embedding.positions.embedding.weight"][: len(segments)]
        if s.n_segments:
            weights["src_positions"] = weights["src_positions"] + known["segment_embedding.weight"][segments]
    elif getattr(s, "n_segments", 0):
        raise NotImplementedError("segments without learned positions")
    _copy(known, "embedding.norm", weights, "src_norm")
    _copy(known, "encoder.norm", weights, "encoder.norm")
    for n in range(s.n_encoder_layers):
        _block(known, f"encoder.{n}", weights, s)
    return weights


def _block(known: Mapping[str, Array], at: str, weights: dict[str, Array], s: ModelSettings) -> None:
    """All weights of one block."""
    n_kv_heads = s.n_kv_heads or s.n_heads
    groups = {"query": s.n_heads, "key": n_kv_heads, "value": n_kv_heads}
    if f"{at}.self_attention.gate_value.weight" in known:
        for kind in _kinds(known, f"{at}.self_attention.gate_value"):
            parts = np.split(known[f"{at}.self_attention.gate_value.{kind}"], 2)
            weights[f"{at}.self.gate.{kind}"], weights[f"{at}.self.value.{kind}"] = parts
    else:
        _projections(known, f"{at}.self_attention.query_key_value", weights, f"{at}.self", groups, s)
    _copy(known, f"{at}.self_attention.output", weights, f"{at}.self.output")
    if any(name.startswith(f"{at}.cross_attention.") for name in known):
        _projections(known, f"{at}.cross_attention.query", weights, f"{at}.cross", {"query": s.n_heads}, s)
        pair = {"key": n_kv_heads, "value": n_kv_heads}
        _projections(known, f"{at}.cross_attention.key_value", weights, f"{at}.cross", pair, s)
        _copy(known, f"{at}.cross_attention.output", weights, f"{at}.cross.output")
    for ours, theirs in (("self", "self_attention"), ("cross", "cross_attention"), ("feed_forward", "feed_forward")):
        _copy(known, f"{at}.{theirs}_residual.norm", weights, f"{at}.{ours}_norm")
    inner = {kind: known[f"{at}.feed_forward.expand.{kind}"] for kind in _kinds(known, f"{at}.feed_forward.expand")}
    for kind, value in inner.items():
        if s.feed_forward == "gated":  # the gate's rows first
            weights[f"{at}.feed_forward.gate.{kind}"], value = np.split(value, 2)
        weights[f"{at}.feed_forward.inner.{kind}"] = value
    _copy(known, f"{at}.feed_forward.contract", weights, f"{at}.feed_forward.outer")


def _projections(
    known: Mapping[str, Array],
    source: str,
    weights: dict[str, Array],
    target: str,
    heads: Mapping[str, int],
    s: ModelSettings,
) -> None:
    """Split a packed projection into its parts, and make rotary column pairs adjacent."""
    widths = {name: s.d_head if name == "value" else s.key_width for name in heads}
    columns = np.arange(s.key_width)
    turned = columns.reshape(2, -1).T.ravel() if s.positions == "rotary" else columns
    for place, name in enumerate(heads):
        at = f"{source}.parts.{place}" if s.projection == "shared" else source
        for kind in _kinds(known, at):
            value = known[f"{at}.{kind}"]
            if s.projection == "full":
                value = np.split(value, np.cumsum([n * widths[part] for part, n in heads.items()])[:-1])[place]
            if name != "value" and target.endswith("self"):
                value = value.reshape(-1, s.key_width, *value.shape[1:])[:, turned].reshape(value.shape)
            weights[f"{target}.{name}.{kind}"] = value


def _kinds(known: Mapping[str, Array], at: str) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"{at}.{kind}" in known]


def _copy(known: Mapping[str, Array], source: str, weights: dict[str, Array], target: str) -> None:
    for kind in _kinds(known, source):
        weights[f"{target}.{kind}"] = known[f"{source}.{kind}"]
