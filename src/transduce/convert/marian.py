"""Marian's encoder-decoder (Junczys-Dowmunt et al. 2018) as transformers' MarianMTModel has it: settings and tensors.

Post-norm, plain feed-forward, sinusoids as two halves, a bias on the logits; no norm of embeddings, no final norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import Settings, TransformerSettings
from transduce.convert.limits import MOST_LAYERS, no_sizes
from transduce.convert.requirements import ONE_HEAD_COUNT, Needed
from transduce.convert.vocabulary import NEVER, Rows
from transduce.convert.weight_map import ACTIVATIONS, Line
from transduce.errors import UserError
from transduce.nn.block import norm_eps
from transduce.nn.positions import halves, sinusoids

ARCHITECTURES = {"marian": ("MarianMTModel",)}

POSITION_TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")

_SIZES = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
          "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size")  # fmt: skip
_EQUAL = (("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads"))
_ONLY = {  # what transformers' implementation does, whatever the file says
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "is_encoder_decoder": True,
}
_DEFAULTS: dict[str, Any] = {  # of MarianConfig, for what a file may leave out
    "activation_function": "gelu",
    "scale_embedding": False,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
# (share_encoder_decoder_embeddings, tie_word_embeddings) to ours
_TIES = {(True, True): "three_way", (False, True): "two_way", (False, False): "none"}


def model_settings(config: Mapping[str, Any], *, origin: Path) -> TransformerSettings:
    """Our settings of a model with this config.json; a `UserError` lists all that cannot be."""
    config = {**_DEFAULTS, **config}
    pad, start = config.get("pad_token_id"), config.get("decoder_start_token_id")
    own_tgt = ("decoder_vocab_size",) if config.get("decoder_vocab_size") is not None else ()
    told = no_sizes(config, (*_SIZES, *own_tgt, "max_position_embeddings"))
    told += [f"{a} and {b} differ" for a, b in _EQUAL if config.get(a) != config.get(b)]
    told += [
        f"{key} = {config[key]!r}; supported: {only}" for key, only in _ONLY.items() if config.get(key, only) != only
    ]
    if str(config["activation_function"]) not in ACTIVATIONS:
        told.append(f"activation_function = {config['activation_function']!r}; supported: {', '.join(ACTIVATIONS)}")
    shared = bool(config["share_encoder_decoder_embeddings"]), bool(config["tie_word_embeddings"])
    if shared not in _TIES:
        told.append("share_encoder_decoder_embeddings = true with tie_word_embeddings = false is not supported")
    if type(pad) is not int or start != pad:
        told.append(
            f"decoder_start_token_id = {start}, pad_token_id = {pad}: supported is only a decoder that pad starts"
        )
    if told:
        raise UserError(f"{origin / 'config.json'}: {'; '.join(told)}")
    values = dict(
        d_model=config["d_model"],
        d_ff=config["encoder_ffn_dim"],
        n_heads=config["encoder_attention_heads"],
        n_encoder_layers=config["encoder_layers"],
        n_decoder_layers=config["decoder_layers"],
        dropout=config["dropout"],
        attention_dropout=config["attention_dropout"],
        activation_dropout=config["activation_dropout"],
        positions="sinusoidal_halves",
        activation=ACTIVATIONS[config["activation_function"]],
        scale_embeddings=bool(config["scale_embedding"]),
        tie=_TIES[shared],
        output_bias=True,
        max_positions=config["max_position_embeddings"],
    )
    found = Settings.from_mapping({"model": values}, origin=str(origin / "config.json")).model
    assert isinstance(found, TransformerSettings)
    return found


def config_of(s: TransformerSettings, *, n_src: int, n_tgt: int, pad: int) -> dict[str, Any]:
    """The config.json of a model of ours that Marian's architecture can express."""
    share, tie = next(key for key, ours in _TIES.items() if ours == s.tie)
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == s.activation)
    sides = {
        f"{side}_{key}": value
        for side, layers in (("encoder", s.n_encoder_layers), ("decoder", s.n_decoder_layers))
        for key, value in (("layers", layers), ("attention_heads", s.n_heads), ("ffn_dim", s.d_ff), ("layerdrop", 0.0))
    }
    return {
        "architectures": list(ARCHITECTURES["marian"]),
        "model_type": "marian",
        "vocab_size": n_src,
        "decoder_vocab_size": n_tgt,
        "d_model": s.d_model,
        **sides,
        "activation_function": activation,
        "dropout": s.dropout,
        "attention_dropout": s.attention_dropout,
        "activation_dropout": s.activation_dropout,
        "max_position_embeddings": s.max_positions,
        "scale_embedding": s.scale_embeddings,
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        **_ONLY,
        "bos_token_id": None,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "dtype": "float32",
    }


NEEDED: Needed = {
    "residual": ("post",),
    "norm": ("layer",),
    "norm_eps": (None, norm_eps("layer")),
    "embedding_norm": (False,),
    "positions": ("sinusoidal", "sinusoidal_halves"),
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
    "bias": (True,),
    "n_encoder_layers": range(1, MOST_LAYERS + 1),
}
"""What its architecture can express of our settings."""


def lines(s: TransformerSettings, *, src: Rows, tgt: Rows, output_bias: bool = True) -> list[Line]:
    """The table of a model with these settings. `output_bias` false: theirs is all zeros, and ours has none."""
    found = _embeddings(s, src, tgt)
    bias = Line("output_bias", ("final_logits_bias",), (1, tgt.n_theirs), rows=tgt.index, filler=NEVER, flat=True)
    found += [bias] if output_bias else []
    for side, n_layers in (("encoder", s.n_encoder_layers), ("decoder", s.n_decoder_layers)):
        for layer in range(n_layers):
            found += _block(f"{side}.blocks.{layer}", f"model.{side}.layers.{layer}", s, decoder=side == "decoder")
    return found


def column_order(d_model: int) -> Tensor:
    """Our column of each of theirs, for a model of ours with the paper's sinusoids."""
    return halves(d_model)


def check_positions(tensors: Mapping[str, Tensor], s: TransformerSettings, *, origin: Path) -> None:
    """Old files hold the sinusoids; a `UserError` where they are not what we compute."""
    shape = (s.max_positions, s.d_model)
    for table, name in ((tensors[name], name) for name in POSITION_TABLES if name in tensors):
        if table.shape != shape or not _are_sinusoids(table):
            raise UserError(f"{origin}: {name} {list(table.shape)} does not hold sinusoids {list(shape)}")


def _embeddings(s: TransformerSettings, src: Rows, tgt: Rows) -> list[Line]:
    encoder, decoder = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    head = "lm_head.weight"
    shape = (tgt.n_theirs, s.d_model)
    if s.tie == "three_way":
        names = ("model.shared.weight",), (encoder, decoder, head)
        return [Line("tgt_embedding.table.weight", names[0], shape, also=names[1], rows=tgt.index, stream=1)]
    found = [
        Line("src_embedding.table.weight", (encoder,), (src.n_theirs, s.d_model), rows=src.index, stream=1),
        Line(
            "tgt_embedding.table.weight",
            (decoder,),
            shape,
            also=(head,) if s.tie == "two_way" else (),
            rows=tgt.index,
            stream=1,
        ),
    ]
    if s.tie == "none":
        found.append(Line("output_embedding.weight", (head,), shape, rows=tgt.index, stream=1))
    return found


def tied_names(s: TransformerSettings) -> dict[str, str]:
    """Names under which our model holds a tensor of the table once more, and that tensor."""
    table = "tgt_embedding.table.weight"
    return {
        "three_way": {"src_embedding.table.weight": table, "output_embedding.weight": table},
        "two_way": {"output_embedding.weight": table},
        "none": {},
    }[s.tie]


def _block(ours: str, theirs: str, s: TransformerSettings, *, decoder: bool) -> list[Line]:
    """One block; (ours, theirs, shape of one weight, the weight's axis on the residual stream)."""
    square, wide, tall = (s.d_model, s.d_model), (s.d_ff, s.d_model), (s.d_model, s.d_ff)
    parts: list[tuple[str, Sequence[str], tuple[int, ...], int]] = [
        ("self_attention.query_key_value", [f"self_attn.{x}_proj" for x in "qkv"], square, 1),
        ("self_attention.output", ["self_attn.out_proj"], square, 0),
        ("self_attention_residual.norm", ["self_attn_layer_norm"], (s.d_model,), 0),
        ("feed_forward.expand", ["fc1"], wide, 1),
        ("feed_forward.contract", ["fc2"], tall, 0),
        ("feed_forward_residual.norm", ["final_layer_norm"], (s.d_model,), 0),
    ]
    if decoder:
        parts += [
            ("cross_attention.query", ["encoder_attn.q_proj"], square, 1),
            ("cross_attention.key_value", [f"encoder_attn.{x}_proj" for x in "kv"], square, 1),
            ("cross_attention.output", ["encoder_attn.out_proj"], square, 0),
            ("cross_attention_residual.norm", ["encoder_attn_layer_norm"], (s.d_model,), 0),
        ]
    found = []
    for own, names, shape, stream in parts:
        found.append(Line(f"{ours}.{own}.weight", tuple(f"{theirs}.{n}.weight" for n in names), shape, stream=stream))
        on_stream = None if stream else 0  # a bias lies where the weight's rows do
        found.append(
            Line(f"{ours}.{own}.bias", tuple(f"{theirs}.{n}.bias" for n in names), shape[:1], stream=on_stream)
        )
    return found


def _are_sinusoids(table: Tensor) -> bool:
    n, d_model = table.shape
    difference = (table.float() - sinusoids(n, d_model)[:, halves(d_model)]).abs().max()
    return bool(difference <= 1e-3)


def is_zero(bias: Tensor | None) -> bool:
    """Whether a bias does nothing."""
    return bias is None or not bool(torch.count_nonzero(bias))
