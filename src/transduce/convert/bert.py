"""BERT (Devlin et al. 2019) in the format of transformers: config.json, weight map, import and export.

The weights decide which heads a model has, not the name of the architecture: a file may contain more or fewer heads
than the name implies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config.architectures import BertClassifierSettings, BertEncoderSettings, BertSettings, EncoderSettings
from transduce.convert import format_limits, hub_folder, parity, weight_map
from transduce.convert.folder import Imported, Outgoing, read_object, read_weights
from transduce.convert.format_limits import EXPRESSIBLE_IN_TRANSFORMERS, ConfigFormat, Expressible
from transduce.convert.weight_map import Entry, Layer, Rows, block_layers
from transduce.errors import UserError
from transduce.text.special import BOS, EOS, MASK, PAD, UNK

ARCHITECTURES = {
    "bert": (
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForSequenceClassification",
    )
}

FORMAT = ConfigFormat(
    sizes={
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_encoder_layers",
        "vocab_size": None,
        "max_position_embeddings": "max_positions",
        "type_vocab_size": "n_segments",
    },
    values={
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "layer_norm_eps": "norm_eps",
    },
    activation="hidden_act",
    defaults={  # BertConfig's defaults
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
    },
    only={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        # with other values, probabilities are not a softmax
        "problem_type": ("single_label_classification", None),
    },
)
EXPRESSIBLE: Expressible = {
    **EXPRESSIBLE_IN_TRANSFORMERS,
    "residual": ("post",),
    "embedding_norm": (True,),
    "pooling": ("first",),
}

BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
"""Ends of tensor names in older files that hold no weights."""

_MASKED, _NEXT, _LABELS = "cls.predictions.transform.dense.weight", "cls.seq_relationship.weight", "classifier.weight"

BLOCK = block_layers(
    self_attention=(
        "attention.self.query attention.self.key attention.self.value",
        "attention.output.dense",
        "attention.output.LayerNorm",
    ),
    feed_forward=("intermediate.dense", "output.dense", "output.LayerNorm"),
)
HEAD = (
    Layer("head.dense", "cls.predictions.transform.dense", "stream stream"),
    Layer("head.norm", "cls.predictions.transform.LayerNorm", "stream"),
)

_IMPORTED_SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_EXPORTED_SPECIAL = {"pad_token": PAD, "unk_token": UNK, "cls_token": BOS, "sep_token": EOS}


# -- config.json and weights


def _has_pooler(names: Collection[str]) -> bool:
    return any(name.endswith("pooler.dense.weight") for name in names)


def model_settings(config: Mapping[str, Any], *, names: Collection[str], origin: Path) -> EncoderSettings:
    """Convert a config.json and tensor names to our settings; `UserError` lists everything that is not supported."""
    config = {**FORMAT.defaults, **config}
    FORMAT.check(config, origin=origin)
    values = FORMAT.read(config) | {"positions": "learned", "embedding_norm": True, "scale_embeddings": False}
    if _LABELS in names:
        values |= {"kind": "bert-classifier", "n_labels": len(labels_of(config))}
    elif _MASKED in names:
        tie = "three_way" if config["tie_word_embeddings"] else "none"
        values |= {"kind": "bert", "next_sentence": _NEXT in names, "output_bias": True, "tie": tie}
    else:
        values["kind"] = "bert-encoder"
    return format_limits.model_from(EncoderSettings, values, origin=origin)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels in the order of their ids; LABEL_0 and LABEL_1 if config.json names no labels."""
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(len(named) or 2))


def entries(s: EncoderSettings, *, rows: Rows, names: Collection[str] | None = None) -> list[Entry]:
    """Return the weight map for these settings. `names`: tensor names in the file to read; None to write a file."""
    if names is None:
        prefix, pooler = "" if isinstance(s, BertEncoderSettings) else "bert.", True
    else:
        # files without heads have names without a prefix
        prefix = "bert." if any(name.startswith("bert.") for name in names) else ""
        pooler = _has_pooler(names)
    d, at, decoder = s.d_model, f"{prefix}embeddings", "cls.predictions.decoder"
    masked, next_sentence = isinstance(s, BertSettings), isinstance(s, BertSettings) and s.next_sentence
    words, table = f"{at}.word_embeddings.weight", "embedding.table.weight"
    tensors = [
        Entry("embedding.positions.embedding.weight", (f"{at}.position_embeddings.weight",), (s.max_positions, d)),
        Entry("segment_embedding.weight", (f"{at}.token_type_embeddings.weight",), (s.n_segments, d)),
    ]
    layers = [Layer("embedding.norm", f"{at}.LayerNorm", "stream")]
    if isinstance(s, BertSettings):
        tied = s.tie != "none"
        tensors += weight_map.embedding_entries([table], [words], f"{decoder}.weight", rows=rows, d_model=d, tied=tied)
        biases = ("cls.predictions.bias", f"{decoder}.bias")  # if untied, only the second is used
        theirs, also = (biases[:1], biases[1:]) if tied else (biases[1:], ())
        tensors.append(Entry("output_bias", theirs, (rows.n_theirs,), also=also, rows=rows.index))
        layers += HEAD
    else:
        tensors.append(Entry(table, (words,), (rows.n_theirs, d), rows=rows.index))
    if next_sentence or (pooler and not masked) or isinstance(s, BertClassifierSettings):
        layers.append(Layer("pooler.dense", f"{prefix}pooler.dense", "stream stream"))
    if next_sentence:
        layers.append(Layer("next_sentence", "cls.seq_relationship", "2 stream"))
    if isinstance(s, BertClassifierSettings):
        layers.append(Layer("labels", "classifier", f"{s.n_labels} stream"))
    tensors += weight_map.layer_entries(layers, s)
    for number in range(s.n_encoder_layers):
        tensors += weight_map.layer_entries(BLOCK, s, f"encoder.blocks.{number}.", f"{prefix}encoder.layer.{number}.")
    return tensors


def architecture_of(s: EncoderSettings) -> str:
    """Return the name of the transformers class that has the same heads as our model."""
    if isinstance(s, BertSettings):
        return "BertForPreTraining" if s.next_sentence else "BertForMaskedLM"
    return "BertForSequenceClassification" if isinstance(s, BertClassifierSettings) else "BertModel"


def _unused(s: EncoderSettings) -> tuple[str, ...]:
    """Return name suffixes of the file's tensors that a model with these settings does not use."""
    if not isinstance(s, BertSettings):
        return ()
    pooler = () if s.next_sentence else ("pooler.dense.weight", "pooler.dense.bias")
    return pooler if s.tie != "none" else (*pooler, "cls.predictions.bias")


# -- import


def import_bert(folder: Path) -> Imported:
    """Read a folder with config.json, weights, and tokenizer.json or vocab.txt.

    `UserError` lists everything that is missing, damaged, contradictory or not supported.
    """
    config = read_object(folder / "config.json")
    tensors = read_weights(folder, without=BUFFERS)
    is_classifier, notes = _LABELS in tensors, [weight_map.type_note(tensors)]
    model = model_settings(config, names=tensors, origin=folder / "config.json")
    if unused := [name for name in tensors if name.endswith(_unused(model))]:
        notes.append(f"not used, and left out: {', '.join(unused)}")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in unused}
    entries_of = partial(entries, model, names=tensors)
    weight_map.check(tensors, entries_of(rows=Rows.of_size(config["vocab_size"])), origin=folder)
    names = hub_folder.special_names(folder, _IMPORTED_SPECIAL)
    content = hub_folder.read_tokenizer(folder, names)
    ids = hub_folder.ids_of(content, origin=folder)
    if not isinstance(model, BertSettings) and names[-1] not in ids:
        names = names[:-1]
    tokenizer, rows = hub_folder.make_vocabulary(content, ids, names, n=config["vocab_size"], origin=folder)
    pad = config.get("pad_token_id")
    if pad not in (None, int(rows.index[PAD])):
        problem = f"pad_token_id = {repr(pad)[:40]}, and {names[0]} of the vocabulary is {int(rows.index[PAD])}"
        raise UserError(f"{folder / 'config.json'}: {problem}")
    state = weight_map.read(tensors, entries_of(rows=rows), origin=folder)
    if not is_classifier and "id2label" in config:
        notes.append("labels in config.json are left out: there is no classifier")
    if isinstance(model, BertEncoderSettings) and not _has_pooler(tensors):
        weight = torch.randn(model.d_model, model.d_model, generator=torch.Generator().manual_seed(1)) * 0.02
        state |= {"pooler.dense.weight": weight, "pooler.dense.bias": torch.zeros(model.d_model)}
        notes.append("it had no pooler: a randomly initialized one was added, for training to start from")
    labels = labels_of(config) if is_classifier else None
    return hub_folder.make_imported(model, tokenizer, state, notes, labels=labels)


# -- export


def export_bert(out: Path, run: Outgoing) -> list[str]:
    """Write a folder for transformers' BERT with the run's heads, and compare it if transformers is installed.

    Raises `UserError` if BERT does not support a setting, `TransduceError` if the outputs differ.
    """
    s, data = run.settings.model, run.settings.data
    assert isinstance(s, EncoderSettings)
    format_limits.check_expressible(s, EXPRESSIBLE, "transformers' BERT")
    rows = hub_folder.their_rows(run)
    model, tensors = format_limits.normalize(s, run.tensors)
    theirs = weight_map.write(tensors, entries(model, rows=rows))
    if isinstance(model, BertSettings) and model.tie == "none":  # transformers then stores two biases and uses only one
        theirs["cls.predictions.bias"] = theirs["cls.predictions.decoder.bias"].clone()
    config = FORMAT.write(model) | {
        "architectures": [architecture_of(s)],
        "model_type": "bert",
        "vocab_size": rows.n_theirs,
        "layer_norm_eps": s.epsilon,
        "pad_token_id": int(rows.index[PAD]),
        "tie_word_embeddings": not isinstance(model, BertSettings) or model.tie != "none",
        "dtype": "float32",
    }
    if data.labels is not None:
        config["id2label"] = {str(i): label for i, label in enumerate(data.labels)}
        config["label2id"] = {label: i for i, label in enumerate(data.labels)}
    special = _EXPORTED_SPECIAL | ({"mask_token": MASK} if run.settings.task == "masked" else {})
    frame = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B:1 </s>:1"}
    longest = s.max_positions
    if run.settings.task == "classification":  # texts of a classifier are truncated as in training
        longest = min(data.max_length, longest)
    hub_folder.write_folder(out, run, config, theirs, special=special, frame=frame, longest=longest)
    vocabularies = {"text": (run.tokenizers.tgt, rows)}
    outputs = partial(_outputs, run, rows, s)
    return [parity.compare_with_transformers(out, architecture_of(s), vocabularies, outputs)]


def _outputs(run: Outgoing, rows: Rows, s: EncoderSettings, theirs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of outputs (transformers' model, our model) for each head."""
    ids, segments = parity.text_examples(s, run.tokenizers.n_tgt)
    mask = ids != PAD
    outputs = theirs(input_ids=rows.index[ids], attention_mask=mask.long(), token_type_ids=segments)
    logits = "prediction_logits" if isinstance(s, BertSettings) and s.next_sentence else "logits"
    their_names = {"next_sentence": "seq_relationship_logits", "hidden": "last_hidden_state", "pooled": "pooler_output"}
    for name, ours in parity.head_outputs(run.model, ids, segments).items():
        real = mask if ours.dim() == 3 else slice(None)
        their_output = outputs[their_names.get(name, logits)][real]
        per_piece = isinstance(s, BertSettings) and name == "logits"
        yield their_output[..., rows.index] if per_piece else their_output, ours[real]
