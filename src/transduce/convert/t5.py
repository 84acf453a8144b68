"""T5 1.0 and 1.1, mT5 and MADLAD-400 as transformers stores them: config.json, weight map, vocabulary and import.

Their attention does not scale its scores, and ours does: queries are imported larger by sqrt(d_key). The decoder starts
with pad, which becomes our beginning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.convert import hub_folder, parity, weight_map
from transduce.convert.folder import Imported, read_object, read_weights
from transduce.convert.format_limits import ConfigFormat, model_from
from transduce.convert.seq2seq import compared, translator_settings
from transduce.convert.seq2seq_vocabulary import piece_tokenizer, read_pieces
from transduce.convert.weight_map import Entry, Layer, Rows
from transduce.errors import UserError
from transduce.nn.positions import MAX_DISTANCE, N_BUCKETS
from transduce.text.hub import HubTokenizer
from transduce.text.special import Framing, Vocabulary
from transduce.text.tokenizer import Tokenizers

ARCHITECTURES = {
    "t5": ("T5ForConditionalGeneration",),
    "mt5": ("MT5ForConditionalGeneration",),
}

FORMAT = ConfigFormat(
    sizes={
        "d_model": "d_model",
        "d_kv": "d_key",
        "d_ff": "d_ff",
        "num_heads": "n_heads",
        "num_layers": "n_encoder_layers",
        "num_decoder_layers": "n_decoder_layers",
        "vocab_size": None,
    },
    values={"dropout_rate": "dropout", "layer_norm_epsilon": "norm_eps"},
    activation="activation",
    defaults={
        "d_kv": 64,
        "dropout_rate": 0.1,
        "layer_norm_epsilon": 1e-6,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    only={
        "is_encoder_decoder": (True,),
        "relative_attention_num_buckets": (N_BUCKETS,),
        "relative_attention_max_distance": (MAX_DISTANCE,),
    },
)
_NETWORKS = {"t5": "relu", "mt5": "gated-gelu"}  # defaults of feed_forward_proj

QUERIES = ("self_attention.query_key_value.weight", "cross_attention.query.weight")
"""Ends of the names of our weights that begin with those of queries."""
SPM = "spiece.model"
_EXTRA_IDS = 100  # pieces <extra_id_99> to <extra_id_0> behind those of the SentencePiece model
_LANGUAGE = re.compile(r"<2(\w+)>")  # MADLAD-400's token of a language

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

_SELF_ATTENTION = (
    Layer(
        "self_attention.query_key_value",
        "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v",
        "heads stream",
    ),
    Layer("self_attention.output", "layer.0.SelfAttention.o", "stream heads"),
    Layer("self_attention_residual.norm", "layer.0.layer_norm", "stream"),
)
_CROSS_ATTENTION = (
    Layer("cross_attention.query", "layer.1.EncDecAttention.q", "heads stream"),
    Layer("cross_attention.key_value", "layer.1.EncDecAttention.k layer.1.EncDecAttention.v", "heads stream"),
    Layer("cross_attention.output", "layer.1.EncDecAttention.o", "stream heads"),
    Layer("cross_attention_residual.norm", "layer.1.layer_norm", "stream"),
)


def _feed_forward(layer: str, *, gated: bool) -> tuple[Layer, ...]:
    network = f"{layer}.DenseReluDense"
    expand = f"{network}.wi_0 {network}.wi_1" if gated else f"{network}.wi"
    return (
        Layer("feed_forward.expand", expand, "inner stream"),
        Layer("feed_forward.contract", f"{network}.wo", "stream inner"),
        Layer("feed_forward_residual.norm", f"{layer}.layer_norm", "stream"),
    )


# -- config.json and weights


def model_settings(config: Mapping[str, Any], *, tied: bool, origin: Path) -> TransformerSettings:
    """Our settings for a model with this complete config.json. Raises `UserError` with everything not supported.

    `tied`: the output matrix is the embedding.
    """
    problems = []
    gate, _, activation = str(config["feed_forward_proj"]).rpartition("-")
    if gate not in ("", "gated"):
        problems.append(f"feed_forward_proj = {config['feed_forward_proj']!r}; supported: gated-ACTIVATION, ACTIVATION")
    if gate and activation == "gelu":
        activation = "gelu_new"
    pad, start, eos = (config[f"{key}_token_id"] for key in ("pad", "decoder_start", "eos"))
    if type(pad) is not int or start != pad or type(eos) is not int or eos == pad:
        problems.append(f"decoder_start_token_id = {start}, pad_token_id = {pad}: the decoder must start with pad")
    config = {**config, "activation": activation}
    FORMAT.check(config, origin=origin, more=problems)
    values = FORMAT.read(config) | {
        "d_value": config["d_kv"],
        "attention_dropout": config["dropout_rate"],
        "activation_dropout": config["dropout_rate"],
        "residual": "pre",
        "norm": "rms",
        "bias": False,
        "positions": "t5",
        "scale_embeddings": False,
        "feed_forward": "gated" if gate else "plain",
        "tie": "three_way" if tied else "none",
        "output_bias": "fixed",
    }
    return model_from(TransformerSettings, values, origin=origin)


def entries(s: TransformerSettings, *, rows: Rows) -> list[Entry]:
    """The weight map of a model, without a bias on the logits, which T5 in transformers does not have."""
    names = (_SHARED, *_TABLES, _HEAD)
    tensors = list(weight_map.translator_embedding_entries(names, src=rows, tgt=rows, d_model=s.d_model, tie=s.tie))
    for side, embedding in weight_map.SIDES.items():
        buckets = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors.append(Entry(f"{embedding}.positions.bias.weight", (buckets,), (N_BUCKETS, s.n_heads)))
    gated = s.feed_forward == "gated"
    encoder_block = (*_SELF_ATTENTION, *_feed_forward("layer.1", gated=gated))
    decoder_block = (*_SELF_ATTENTION, *_CROSS_ATTENTION, *_feed_forward("layer.2", gated=gated))
    layers, norms = (encoder_block, decoder_block), ("", "final_layer_norm")
    return [*tensors, *weight_map.stack_entries(s, "{}.", "block.{}.", layers, norms=norms, bias=False)]


def _complete_output(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Complete the embeddings and the output matrix; return whether they are one tensor.

    T5 1.0 multiplies the last hidden states by d_model ** -0.5, which becomes part of a matrix of its own.
    """
    shared = tensors.get(_SHARED, tensors.get(_TABLES[0]))
    if shared is None:
        return True  # `check` reports it
    head = tensors.get(_HEAD, shared)
    # newer versions write this key; older versions infer it from tie_word_embeddings
    asked = config.get("scale_decoder_outputs")
    scales = config["model_type"] == "t5" and (config.get("tie_word_embeddings", True) if asked is None else asked)
    if not scales and torch.equal(head, shared):
        tensors.setdefault(_SHARED, shared)
        return True
    tensors.pop(_SHARED, None)
    for table in _TABLES:
        tensors.setdefault(table, shared)
    tensors[_HEAD] = head.float() * config["d_model"] ** -0.5 if scales else head
    return False


def _scale_queries(state: dict[str, Tensor], s: TransformerSettings) -> None:
    """Multiply the weights of queries by sqrt(d_key), by which our attention divides scores."""
    n_queries = s.n_heads * s.key_width
    for name, weight in state.items():
        if name.endswith(QUERIES):
            weight[:n_queries] *= s.key_width**0.5


# -- vocabulary


def read_vocabulary(folder: Path, config: Mapping[str, Any], *, notes: list[str]) -> tuple[Rows, Tokenizers]:
    """Rows and tokenizers, from a SentencePiece model or from tokenizer.json."""
    n, content = config["vocab_size"], None
    if (folder / SPM).exists():
        ids = _piece_ids(folder / SPM, n)
    else:
        content = hub_folder.read_tokenizer(folder, ["<pad>", "</s>", "<unk>"])
        ids = hub_folder.ids_of(content, origin=folder)
    pad, eos, unknown = config["pad_token_id"], config["eos_token_id"], ids.get("<unk>")
    if unknown is None or len({pad, eos, unknown}) < 3 or not all(0 <= i < n for i in (pad, eos)):
        raise UserError(f"{folder}: the vocabulary needs <unk>, and pad and end need other ids within 0 .. {n - 1}")
    rows = weight_map.rows_of(ids, [-1, unknown, pad, eos], n=n, origin=folder)

    ours = {row: i for i, row in enumerate(rows.index.tolist())}
    codes = {match[1]: ours[i] for piece, i in ids.items() if (match := _LANGUAGE.fullmatch(piece))}
    if codes:
        notes.append(f"{len(codes)} languages: {', '.join(sorted(codes))}")
    framing = Framing(codes, ("tgt",)) if codes else Framing()
    vocabulary: Vocabulary
    if content is not None:
        vocabulary = HubTokenizer(content, rows.index.tolist()).with_framing(framing)
    else:
        vocabulary = piece_tokenizer(folder / SPM, ids, rows, notes, source=folder / SPM, framing=framing)
    return rows, Tokenizers(vocabulary, vocabulary)


def _piece_ids(spm: Path, n: int) -> dict[str, int]:
    """The ids of a SentencePiece model's pieces, and of the extra pieces for which the embedding has rows."""
    pieces = read_pieces(spm)
    extra = [f"<extra_id_{i}>" for i in reversed(range(_EXTRA_IDS))]
    if len(pieces) + _EXTRA_IDS <= n and not set(extra).intersection(pieces):
        pieces += extra
    return {piece: i for i, piece in enumerate(pieces)}


# -- import


def import_t5(folder: Path) -> Imported:
    """Read a folder with config.json, weights and a vocabulary. Raises `UserError` with everything not supported."""
    config = read_object(folder / "config.json")
    config = {**FORMAT.defaults, "feed_forward_proj": _NETWORKS[config["model_type"]], **config}
    if config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config.get("num_layers")
    tensors = read_weights(folder)
    architecture, notes = ARCHITECTURES[config["model_type"]][0], [weight_map.type_note(tensors)]
    origin = folder / "config.json"
    model_settings(config, tied=True, origin=origin)  # refuses sizes before they are used
    model = model_settings(config, tied=_complete_output(tensors, config), origin=origin)
    notes.insert(0, f"found: {architecture}, {model.summary}")
    weight_map.check(tensors, entries(model, rows=Rows.of_size(config["vocab_size"])), origin=folder)
    rows, tokenizers = read_vocabulary(folder, config, notes=notes)
    state = weight_map.read(tensors, entries(model, rows=rows), origin=folder)
    _scale_queries(state, model)
    weight_map.complete_output_bias(state, rows)
    settings = translator_settings(model, tokenizers, config, rows, folder=folder, languages={}, notes=notes)
    compare = partial(compared, folder, architecture, tokenizers, rows, rows, parity.MAX_TOKENS)
    return Imported(settings, tokenizers, state, tuple(notes), compare)
