"""T5 1.0 and 1.1, mT5 and MADLAD-400 in transformers' format: config.json, weights, vocabulary, import, export.

T5 does not scale attention scores by 1 / sqrt(d_key), and our layers do, so weights of queries are imported times
sqrt(d_key). The decoder starts with pad, which becomes our BOS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import TransformerSettings
from transduce.convert import format_limits, hub_folder, seq2seq, weight_map
from transduce.convert.folder import Imported, Outgoing, read_object, read_weights
from transduce.convert.format_limits import ACTIVATIONS, ConfigFormat, model_from
from transduce.convert.seq2seq import compared, translator_settings
from transduce.convert.seq2seq_vocabulary import ExportedVocabulary, piece_tokenizer, read_pieces
from transduce.convert.weight_map import TIES, Entry, Layer, Rows, block_layers
from transduce.errors import UserError
from transduce.nn.positions import MAX_DISTANCE, N_BUCKETS
from transduce.text.hub import HubTokenizer
from transduce.text.special import BOS, Framing, Vocabulary
from transduce.text.tokenizer import PieceTokenizer, Tokenizers, parse_model

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
_NETWORKS = {"t5": "relu", "mt5": "gated-gelu"}  # default of feed_forward_proj by model_type

_SETTINGS = {
    "residual": "pre",
    "norm": "rms",
    "bias": False,
    "positions": "t5",
    "scale_embeddings": False,
    "embedding_norm": False,
    "one_end": False,
    "source_end": True,
}
"""Values of our settings that have no key in config.json."""

_QUERIES = ("self_attention.query_key_value.weight", "cross_attention.query.weight")
"""Suffixes of names of our packed weights whose first rows project queries."""
SPM = "spiece.model"
_EXTRA_IDS = 100  # pieces <extra_id_99> to <extra_id_0>, after the pieces of the SentencePiece model
_LANGUAGE = re.compile(r"<2(\w+)>")  # MADLAD-400's token of a language

_SPECIAL = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}  # in the order of our ids

_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _block(*, gated: bool, cross: bool) -> tuple[Layer, ...]:
    """Return the layers of a block, with or without cross-attention."""
    q, k, v, o = (f"layer.0.SelfAttention.{part}" for part in "qkvo")
    sublayers: dict[str, tuple[str, ...]] = {"self_attention": (f"{q} {k} {v}", o, "layer.0.layer_norm")}
    if cross:
        q, k, v, o = (f"layer.1.EncDecAttention.{part}" for part in "qkvo")
        sublayers["cross_attention"] = (q, f"{k} {v}", o, "layer.1.layer_norm")
    last = f"layer.{len(sublayers)}"
    network = f"{last}.DenseReluDense"
    expand = f"{network}.wi_0 {network}.wi_1" if gated else f"{network}.wi"
    return block_layers(**sublayers, feed_forward=(expand, f"{network}.wo", f"{last}.layer_norm"))


# -- config.json and weights


def model_settings(config: Mapping[str, Any], *, origin: Path) -> TransformerSettings:
    """Convert a complete config.json to our settings. Raises `UserError` with everything that is not supported."""
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
    values = {
        **FORMAT.read(config),
        **_SETTINGS,
        "d_value": config["d_kv"],
        "attention_dropout": config["dropout_rate"],
        "activation_dropout": config["dropout_rate"],
        "feed_forward": "gated" if gate else "plain",
        "output_bias": "fixed",
    }
    return model_from(TransformerSettings, values, origin=origin)


def entries(s: TransformerSettings, *, rows: Rows) -> list[Entry]:
    """Return the weight map for these settings, without a bias on the logits, which transformers' T5 lacks."""
    tensors = list(weight_map.translator_embedding_entries(s, (_SHARED, *_TABLES, _HEAD), src=rows, tgt=rows))
    for side, embedding in weight_map.SIDES.items():
        buckets = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors.append(Entry(f"{embedding}.positions.bias.weight", (buckets,), (N_BUCKETS, s.n_heads)))
    gated = s.feed_forward == "gated"
    layers = _block(gated=gated, cross=False), _block(gated=gated, cross=True)
    norms = "", "final_layer_norm"
    for entry in weight_map.stack_entries(s, "{}.", "block.{}.", layers, norms=norms, bias=False):
        tensors.append(replace(entry, factor=s.key_width**0.5 if entry.ours.endswith(_QUERIES) else 1.0))
    return tensors


def _complete_output(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> str:
    """Add a missing output matrix, or scale T5 1.0's; return the value of `model.tie`.

    T5 1.0 multiplies the last hidden states by d_model ** -0.5, which becomes part of a matrix of its own.
    """
    table = next((tensors[name] for name in (_SHARED, *_TABLES) if name in tensors), None)
    if table is None:
        return "three_way"  # `check` reports it
    head = tensors.setdefault(_HEAD, table)
    # newer versions write this key; older versions infer it from tie_word_embeddings
    asked = config.get("scale_decoder_outputs")
    if config["model_type"] == "t5" and (config.get("tie_word_embeddings", True) if asked is None else asked):
        tensors[_HEAD] = head.float() * config["d_model"] ** -0.5
        return "inputs"
    return TIES[True, torch.equal(head, table)]


# -- vocabulary


def read_vocabulary(folder: Path, config: Mapping[str, Any], *, notes: list[str]) -> tuple[Rows, Tokenizers]:
    """Read rows and tokenizers, from a SentencePiece model or from tokenizer.json."""
    n, content = config["vocab_size"], None
    if (folder / SPM).exists():
        ids = {piece: i for i, piece in enumerate(_with_extra_ids(read_pieces(folder / SPM), n))}
    else:
        content = hub_folder.read_tokenizer(folder, ["<pad>", "</s>", "<unk>"], instead_of=SPM)
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


def _with_extra_ids(pieces: list[str], n: int) -> list[str]:
    """Add T5's extra pieces <extra_id_99> to <extra_id_0> if an embedding of `n` rows has room for them."""
    extra = [f"<extra_id_{i}>" for i in reversed(range(_EXTRA_IDS))]
    return pieces + extra if len(pieces) + _EXTRA_IDS <= n and not set(extra).intersection(pieces) else pieces


def _exported_vocabulary(run: Outgoing) -> ExportedVocabulary:
    """Return the vocabulary of an imported model: its tokenizer.json, or a spiece.model with all pieces."""
    vocabulary, names = run.tokenizers.tgt, [*_SPECIAL.values()]
    files: dict[str, Any] = {"tokenizer_config.json": {**_SPECIAL, "tokenizer_class": "T5Tokenizer", "extra_ids": 0}}
    if isinstance(vocabulary, HubTokenizer):
        rows, files[hub_folder.TOKENIZER] = hub_folder.their_rows(run), vocabulary.model
    else:
        known = {piece: i for i, piece in enumerate(piece.piece for piece in parse_model(vocabulary.model).pieces)}
        if not isinstance(vocabulary, PieceTokenizer) or not set(names) <= known.keys():
            raise UserError("transformers' T5 needs a vocabulary that was imported from it, and this one was not")
        n, special = vocabulary.vocab_size - 1, [known[piece] for piece in names]  # our padding has no row
        rows = weight_map.rows_of({"": n - 1}, [-1, *special], n=n, origin="")
        pieces = [*vocabulary.pieces(range(n + 1)), *names]
        of_row = dict(zip([*rows.index.tolist(), *special], pieces, strict=True))
        files[SPM] = _model_of([of_row[row] for row in range(n)], vocabulary.model)
    return ExportedVocabulary(rows, rows, int(rows.index[BOS]), None, "T5Tokenizer", files)


def _model_of(pieces: Sequence[str], old: bytes) -> bytes:
    """Make a SentencePiece model with these pieces in this order. Pieces that `old` lacks are never split in a text."""
    proto, known = parse_model(old), {piece.piece: piece for piece in parse_model(old).pieces}
    del proto.pieces[:]
    for name in pieces:
        piece = proto.pieces.add(piece=name)
        piece.type = piece.UNUSED if name.startswith("<unnamed") else piece.USER_DEFINED
        if name in known:
            piece.CopyFrom(known[name])
    return bytes(proto.SerializeToString())


# -- import


def import_t5(folder: Path) -> Imported:
    """Read a folder with config.json, weights and a vocabulary. Raises `UserError` with everything not supported."""
    config = read_object(folder / "config.json")
    config = {**FORMAT.defaults, "feed_forward_proj": _NETWORKS[config["model_type"]], **config}
    if config.get("num_decoder_layers") is None:
        config["num_decoder_layers"] = config.get("num_layers")
    tensors = read_weights(folder)
    architecture, notes = ARCHITECTURES[config["model_type"]][0], [weight_map.type_note(tensors)]
    model = model_settings(config, origin=folder / "config.json")
    model = model.model_copy(update={"tie": _complete_output(tensors, config)})
    notes.insert(0, f"found: {architecture}, {model.summary}")
    weight_map.check(tensors, entries(model, rows=Rows.of_size(config["vocab_size"])), origin=folder)
    rows, tokenizers = read_vocabulary(folder, config, notes=notes)
    state = weight_map.read(tensors, entries(model, rows=rows), origin=folder)
    weight_map.complete_output_bias(state, rows)
    settings = translator_settings(model, tokenizers, config, rows, folder=folder, languages={}, notes=notes)
    compare = partial(compared, folder, architecture, tokenizers, rows, rows, model.max_positions - 1)
    return Imported(settings, tokenizers, state, tuple(notes), compare)


# -- export


def export_t5(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for T5ForConditionalGeneration, which computes mT5 and MADLAD-400 too, and compare it.

    Raises `UserError` if T5 does not support a setting, `TransduceError` if the outputs differ.
    """
    s, (architecture,) = run.settings.model, ARCHITECTURES["t5"]
    assert isinstance(s, TransformerSettings)
    gated = s.feed_forward == "gated"
    expressible = {
        **{key: (value,) for key, value in _SETTINGS.items()},
        "feed_forward": ("plain", "gated"),
        "activation": [name for name in ACTIVATIONS.values() if not gated or name != "gelu"],
        "tie": ("three_way", "inputs"),
        "d_key": (None, s.d_key),
        "d_value": (None if s.key_width == s.d_head else s.key_width,),
    }
    format_limits.check_expressible(s, expressible, name := f"transformers' {architecture}")
    vocabulary = _exported_vocabulary(run)
    ours = weight_map.without_bias(run.tensors, vocabulary.tgt, name)
    config = FORMAT.write(s)
    activation = config.pop("activation")
    config |= {
        "architectures": [architecture],
        "model_type": "t5",
        "d_kv": s.key_width,
        "layer_norm_epsilon": s.epsilon,
        "feed_forward_proj": f"gated-{activation.removesuffix('_new')}" if gated else activation,
        # whether the last hidden states are scaled: the keys of older and of newer versions
        "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
        **{key: values[0] for key, values in FORMAT.only.items()},
    }
    tensors = weight_map.write(ours, entries(s, rows=vocabulary.tgt))
    tensors.setdefault(_HEAD, tensors[_SHARED].clone())
    return seq2seq.write_translator(out, run, config, tensors, vocabulary)
