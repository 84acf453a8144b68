"""BERT (Devlin et al. 2019) as transformers stores it: config.json and weight map.

The weights decide which heads a model has, not the name of the architecture: files contain more or fewer than it says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transduce.config import BertClassifierSettings, BertSettings, EncoderSettings
from transduce.convert.requirements import (
    ACTIVATIONS,
    ONE_HEAD_COUNT,
    ConfigFormat,
    Expressible,
    model_from,
)
from transduce.convert.weight_map import Entry, Rows, linear, norm
from transduce.nn.block import norm_eps

ARCHITECTURES = {
    "bert": (
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
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
    defaults={  # of BertConfig
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
        "problem_type": ("single_label_classification", None),  # for others, probabilities are not a softmax
    },
)
_HEAD, _NEXT, _CLASSIFIER = "cls.predictions.transform.dense.weight", "cls.seq_relationship.weight", "classifier.weight"
MAX_LABELS = 1 << 16
NEXT_LABELS = ("next", "random")
"""Labels of a file that has only the next-sentence head: a classifier of text pairs."""


def prefix_of(names: Collection[str]) -> str:
    """The prefix of the encoder's names: empty in a file without heads."""
    return "bert." if any(name.startswith("bert.") for name in names) else ""


def label_head(names: Collection[str]) -> str | None:
    """The classifier's matrix, which may be a next-sentence head alone; None without one."""
    if _CLASSIFIER in names:
        return "classifier"
    return "cls.seq_relationship" if _NEXT in names and _HEAD not in names else None


def has_pooler(names: Collection[str]) -> bool:
    """Whether the file contains a pooler: an encoder without heads may not."""
    return any(".pooler." in f".{name}" for name in names)


def model_settings(config: Mapping[str, Any], *, names: Collection[str], origin: Path) -> EncoderSettings:
    """Our settings for this config.json and these tensors; `UserError` lists everything that is not supported."""
    config = {**FORMAT.defaults, **config}
    FORMAT.check(config, origin=origin)
    values = FORMAT.read(config) | {"positions": "learned", "embedding_norm": True, "scale_embeddings": False}
    if label_head(names):
        values |= {"kind": "bert-classifier", "n_labels": len(labels_of(config, names=names))}
    elif _HEAD in names:
        tie = "three_way" if config["tie_word_embeddings"] else "none"
        values |= {"kind": "bert", "next_sentence": _NEXT in names, "output_bias": True, "tie": tie}
    else:
        values["kind"] = "bert-encoder"
    return model_from(EncoderSettings, values, origin=origin)


def labels_of(config: Mapping[str, Any], *, names: Collection[str]) -> tuple[str, ...]:
    """The labels in the order of their ids; LABEL_0 and LABEL_1 where the file names none."""
    if _CLASSIFIER not in names:
        return NEXT_LABELS
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    n = config.get("num_labels")
    n = max(len(named), n if type(n) is int and n <= MAX_LABELS else 0) or 2
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(n))


def entries(
    s: EncoderSettings, *, rows: Rows, prefix: str, labels: str = "classifier", pooler: bool = True
) -> list[Entry]:
    """The weight map of a model. `labels`: see `label_head`. `pooler` false: an encoder that has none."""
    d, at, size = s.d_model, f"{prefix}embeddings", (rows.n_theirs, s.d_model)
    head, decoder, tied = "cls.predictions.transform", "cls.predictions.decoder", bool(tied_names(s))
    masked, next_sentence = isinstance(s, BertSettings), isinstance(s, BertSettings) and s.next_sentence
    also = (f"{decoder}.weight",) if tied else ()
    found = [
        Entry("embedding.table.weight", (f"{at}.word_embeddings.weight",), size, also=also, rows=rows.index),
        Entry("embedding.positions.embedding.weight", (f"{at}.position_embeddings.weight",), (s.max_positions, d)),
        Entry("segment_embedding.weight", (f"{at}.token_type_embeddings.weight",), (s.n_segments, d)),
        *norm("embedding.norm", f"{at}.LayerNorm", d),
    ]
    for layer in range(s.n_encoder_layers):
        found += _block(f"encoder.blocks.{layer}", f"{prefix}encoder.layer.{layer}", s)
    if next_sentence or (pooler and not masked) or isinstance(s, BertClassifierSettings):
        found += linear("pooler.dense", (f"{prefix}pooler.dense",), (d, d))
    if masked:
        found += linear("head.dense", (f"{head}.dense",), (d, d)) + norm("head.norm", f"{head}.LayerNorm", d)
        biases = ("cls.predictions.bias", f"{decoder}.bias")  # untied, only the second is used
        theirs, also = (biases[:1], biases[1:]) if tied else (biases[1:], ())
        found.append(Entry("output_bias", theirs, (rows.n_theirs,), also=also, rows=rows.index))
        if not tied:
            found.append(Entry("output_embedding.weight", (f"{decoder}.weight",), size, rows=rows.index))
    if next_sentence:
        found += linear("next_sentence", ("cls.seq_relationship",), (2, d))
    if isinstance(s, BertClassifierSettings):
        found += linear("labels", (labels,), (s.n_labels or 0, d))
    return found


def _block(ours: str, theirs: str, s: EncoderSettings) -> list[Entry]:
    d, attention = s.d_model, f"{theirs}.attention"
    query_key_value = tuple(f"{attention}.self.{name}" for name in ("query", "key", "value"))
    return [
        *linear(f"{ours}.self_attention.query_key_value", query_key_value, (d, d)),
        *linear(f"{ours}.self_attention.output", (f"{attention}.output.dense",), (d, d)),
        *norm(f"{ours}.self_attention_residual.norm", f"{attention}.output.LayerNorm", d),
        *linear(f"{ours}.feed_forward.expand", (f"{theirs}.intermediate.dense",), (s.d_ff, d)),
        *linear(f"{ours}.feed_forward.contract", (f"{theirs}.output.dense",), (d, s.d_ff)),
        *norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.output.LayerNorm", d),
    ]


def architecture_of(s: EncoderSettings) -> str:
    """The name of their class with the heads of ours."""
    if isinstance(s, BertSettings):
        return "BertForPreTraining" if s.next_sentence else "BertForMaskedLM"
    return "BertForSequenceClassification" if isinstance(s, BertClassifierSettings) else "BertModel"


def config_of(s: EncoderSettings, *, n: int, pad: int, labels: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of a model of ours. n: rows of its embedding."""
    named: dict[str, Any] = {}
    if labels is not None:
        named["id2label"] = {str(i): label for i, label in enumerate(labels)}
        named["label2id"] = {label: i for i, label in enumerate(labels)}
    return FORMAT.write(s) | {
        "architectures": [architecture_of(s)],
        "model_type": "bert",
        "vocab_size": n,
        "layer_norm_eps": norm_eps(s.norm, s.norm_eps),
        "pad_token_id": pad,
        "tie_word_embeddings": not isinstance(s, BertSettings) or s.tie != "none",
        "dtype": "float32",
        **named,
    }


EXPRESSIBLE: Expressible = {
    "residual": ("post",),
    "norm": ("layer",),
    "embedding_norm": (True,),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),  # each can become a table of vectors
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
    "pooling": ("first",),
}
"""Some settings are expressed through an equal model: see `normalize`."""


def tied_names(s: EncoderSettings) -> dict[str, str]:
    """Other names of the tensors in the weight map in our model."""
    tied = isinstance(s, BertSettings) and s.tie != "none"
    return {"output_embedding.weight": "embedding.table.weight"} if tied else {}


def unused(s: EncoderSettings, *, prefix: str) -> tuple[str, ...]:
    """Tensors that a file may contain and that a model with these settings does not use."""
    if not isinstance(s, BertSettings):
        return ()
    pooler = () if s.next_sentence else (f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias")
    return pooler if s.tie != "none" else (*pooler, "cls.predictions.bias")


def buffers(prefix: str) -> tuple[str, ...]:
    """Tensors in older files that are not weights."""
    return f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids"
