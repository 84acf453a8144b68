"""Marian's encoder-decoder (Junczys-Dowmunt et al. 2018) as transformers stores it: config.json, weight map, ids.

Post-norm, plain feed-forward, sinusoids as two halves, a bias on the logits; no norm of embeddings, no final norm.

Marian's vocabulary has eos 0, unk 1 and pad, which starts the decoder and is never generated. Ours has PAD, UNK, BOS,
EOS = 0 to 3. Our BOS is their pad. Our PAD, which is never an input, has a row there only in exports of our models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.config.model import NORM_EPSILONS
from transduce.convert.format_limits import (
    EXPRESSIBLE_IN_TRANSFORMERS,
    MAX_LAYERS,
    ConfigFormat,
    Expressible,
    model_from,
)
from transduce.convert.weight_map import NEVER, Entry, Rows, linear, norm
from transduce.errors import UserError
from transduce.nn.positions import halves
from transduce.text.special import BOS, EOS, PAD, UNK

ARCHITECTURES = {"marian": ("MarianMTModel",)}

BUFFERS = ("embed_positions.weight",)
"""Ends of the names of tensors in older files that are not weights: the sinusoids."""

FORMAT = ConfigFormat(
    sizes={
        "d_model": "d_model",
        "encoder_layers": "n_encoder_layers",
        "decoder_layers": "n_decoder_layers",
        **{f"{side}_attention_heads": "n_heads" for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": "d_ff" for side in ("encoder", "decoder")},
        "vocab_size": None,
        "max_position_embeddings": "max_positions",
    },
    values={
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "activation_dropout": "activation_dropout",
        "scale_embedding": "scale_embeddings",
    },
    activation="activation_function",
    defaults={  # of MarianConfig
        "activation_function": "gelu",
        "scale_embedding": False,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    },
    only={  # what transformers' implementation does, whatever the file says
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "add_final_layer_norm": (False,),
        "static_position_embeddings": (True,),
        "is_encoder_decoder": (True,),
    },
    equal=(("encoder_ffn_dim", "decoder_ffn_dim"), ("encoder_attention_heads", "decoder_attention_heads")),
)
# (share_encoder_decoder_embeddings, tie_word_embeddings) to ours
_TIES = {(True, True): "three_way", (False, True): "two_way", (False, False): "none"}


def model_settings(config: Mapping[str, Any], *, origin: Path) -> TransformerSettings:
    """Our settings for a model with this config.json; `UserError` lists everything that is not supported."""
    config = {**FORMAT.defaults, **config}
    problems = []
    tied = bool(config["share_encoder_decoder_embeddings"]), bool(config["tie_word_embeddings"])
    if tied not in _TIES:
        problems.append("share_encoder_decoder_embeddings = true with tie_word_embeddings = false is not supported")
    pad, start = config.get("pad_token_id"), config.get("decoder_start_token_id")
    if type(pad) is not int or start != pad:
        problems.append(f"decoder_start_token_id = {start}, pad_token_id = {pad}: the decoder must start with pad")
    FORMAT.check(config, origin=origin, optional_sizes=("decoder_vocab_size",), more=problems)
    own = {"positions": "sinusoidal_halves", "tie": _TIES[tied], "output_bias": True}
    return model_from(TransformerSettings, FORMAT.read(config) | own, origin=origin)


def config_of(s: TransformerSettings, *, n_src: int, n_tgt: int, pad: int) -> dict[str, Any]:
    """The config.json of a model of ours."""
    share, tie = next(key for key, ours in _TIES.items() if ours == s.tie)
    return FORMAT.write(s) | {
        "architectures": list(ARCHITECTURES["marian"]),
        "model_type": "marian",
        "vocab_size": n_src,
        "decoder_vocab_size": n_tgt,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "share_encoder_decoder_embeddings": share,
        "tie_word_embeddings": tie,
        **{key: values[0] for key, values in FORMAT.only.items()},
        "bos_token_id": None,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "pad_token_id": pad,
        "decoder_start_token_id": pad,
        "dtype": "float32",
    }


EXPRESSIBLE: Expressible = {
    **EXPRESSIBLE_IN_TRANSFORMERS,
    "residual": ("post",),
    "norm_eps": (None, NORM_EPSILONS["layer"]),
    "embedding_norm": (False,),
    "positions": ("sinusoidal", "sinusoidal_halves"),
    "bias": (True,),
    "n_encoder_layers": range(1, MAX_LAYERS + 1),
}

NULL = "<null>"
"""The name of our PAD in an exported vocabulary, which keeps its row where it is needed for an identical re-import."""


def entries(s: TransformerSettings, *, src: Rows, tgt: Rows) -> list[Entry]:
    """The weight map of a model."""
    encoder, decoder, head = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"
    table, output, shape = "tgt_embedding.table.weight", "output_embedding.weight", (tgt.n_theirs, s.d_model)
    src_embedding = Entry("src_embedding.table.weight", (encoder,), (src.n_theirs, s.d_model), rows=src.index, stream=1)
    if s.tie == "three_way":
        tied, names = (src_embedding.ours, output), (encoder, decoder, head)
        found = [Entry(table, ("model.shared.weight",), shape, names, tied, rows=tgt.index, stream=1)]
    elif s.tie == "two_way":
        found = [src_embedding, Entry(table, (decoder,), shape, (head,), (output,), rows=tgt.index, stream=1)]
    else:
        own = [
            Entry(ours, (name,), shape, rows=tgt.index, stream=1) for ours, name in ((table, decoder), (output, head))
        ]
        found = [src_embedding, *own]
    logits_bias, shape = ("final_logits_bias",), (1, tgt.n_theirs)
    found.append(Entry("output_bias", logits_bias, shape, rows=tgt.index, filler=NEVER, flat=True))
    for side, n_layers in (("encoder", s.n_encoder_layers), ("decoder", s.n_decoder_layers)):
        for layer in range(n_layers):
            found += _block(f"{side}.blocks.{layer}", f"model.{side}.layers.{layer}", s, decoder=side == "decoder")
    return found


def _block(ours: str, theirs: str, s: TransformerSettings, *, decoder: bool) -> list[Entry]:
    d, square = s.d_model, (s.d_model, s.d_model)
    query_key_value = tuple(f"{theirs}.self_attn.{x}_proj" for x in "qkv")
    found = [
        *linear(f"{ours}.self_attention.query_key_value", query_key_value, square, stream=1),
        *linear(f"{ours}.self_attention.output", (f"{theirs}.self_attn.out_proj",), square, stream=0),
        *norm(f"{ours}.self_attention_residual.norm", f"{theirs}.self_attn_layer_norm", d, stream=0),
        *linear(f"{ours}.feed_forward.expand", (f"{theirs}.fc1",), (s.d_ff, d), stream=1),
        *linear(f"{ours}.feed_forward.contract", (f"{theirs}.fc2",), (d, s.d_ff), stream=0),
        *norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm", d, stream=0),
    ]
    if decoder:
        own, cross = f"{ours}.cross_attention", f"{theirs}.encoder_attn"
        found += [
            *linear(f"{own}.query", (f"{cross}.q_proj",), square, stream=1),
            *linear(f"{own}.key_value", (f"{cross}.k_proj", f"{cross}.v_proj"), square, stream=1),
            *linear(f"{own}.output", (f"{cross}.out_proj",), square, stream=0),
            *norm(f"{own}_residual.norm", f"{cross}_layer_norm", d, stream=0),
        ]
    return found


def column_order(s: TransformerSettings) -> Tensor | None:
    """Our column for each of theirs: ours differ where the model has the paper's sinusoids."""
    return halves(s.d_model) if s.positions == "sinusoidal" else None


def ids_and_rows(pieces: Sequence[str], *, keep_null: bool, pad_last: bool) -> tuple[dict[str, int], Rows]:
    """Their vocab.json for our pieces: eos 0, unk 1, pad last or third, the others in our order."""
    pad, null = [("<pad>", BOS)], [(NULL, PAD)] if keep_null else []
    others = [(piece, i) for i, piece in enumerate(pieces) if i > EOS]
    head = [("</s>", EOS), ("<unk>", UNK)]
    order = [*head, *others, *null, *pad] if pad_last else [*head, *pad, *others, *null]
    ids = {piece: row for row, (piece, _) in enumerate(order)}
    if len(ids) < len(order):
        raise UserError(
            f"the vocabulary contains a piece twice, or one of {NULL}, <pad>, <unk>, </s> as an ordinary piece"
        )
    index = torch.full((len(pieces),), -1)
    index[torch.tensor([i for _, i in order])] = torch.arange(len(order))
    return ids, Rows(index, len(order))
