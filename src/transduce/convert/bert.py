"""BERT (Devlin et al. 2019) as transformers keeps it: settings and tensors.

Which heads there are is told by the weights, not by the architecture's name: files hold more or fewer than it says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transduce.config import BertClassifierSettings, BertSettings, EncoderSettings, Settings
from transduce.convert.limits import no_sizes
from transduce.convert.requirements import ONE_HEAD_COUNT, Needed
from transduce.convert.vocabulary import Rows
from transduce.convert.weight_map import ACTIVATIONS, Line
from transduce.errors import UserError
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

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
          "max_position_embeddings", "type_vocab_size")  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "problem_type": ("single_label_classification", None),  # with others, a label's probability is no softmax
}
_DEFAULTS: dict[str, Any] = {  # of BertConfig, for what a file may leave out
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "tie_word_embeddings": True,
}
_HEAD, _NEXT, _CLASSIFIER = "cls.predictions.transform.dense.weight", "cls.seq_relationship.weight", "classifier.weight"
MOST_LABELS = 1 << 16
NEXT_LABELS = ("next", "random")
"""What a file with the next-sentence head alone tells of a pair of texts: it is a classifier of two labels."""


def prefix_of(names: Collection[str]) -> str:
    """What stands before the trunk's names: nothing in a file of the trunk alone."""
    return "bert." if any(name.startswith("bert.") for name in names) else ""


def labels_head(names: Collection[str]) -> str | None:
    """The matrix that tells labels, a next-sentence head alone too; None where there is none."""
    if _CLASSIFIER in names:
        return "classifier"
    return "cls.seq_relationship" if _NEXT in names and _HEAD not in names else None


def has_pooler(names: Collection[str]) -> bool:
    """Whether any tensor of the pooler is there: a trunk alone may come without."""
    return any(".pooler." in f".{name}" for name in names)


def model_settings(config: Mapping[str, Any], *, names: Collection[str], origin: Path) -> EncoderSettings:
    """Our settings of a model with this config.json and these tensors; a `UserError` lists all that cannot be."""
    config = {**_DEFAULTS, **config}
    told = no_sizes(config, _SIZES)
    told += [
        f"{key} = {config[key]!r}; supported: {only[0]}"
        for key, only in _ONLY.items()
        if config.get(key, only[0]) not in only
    ]
    if str(config["hidden_act"]) not in ACTIVATIONS:
        told.append(f"hidden_act = {config['hidden_act']!r}; supported: {', '.join(ACTIVATIONS)}")
    if told:
        raise UserError(f"{origin / 'config.json'}: {'; '.join(told)}")
    values: dict[str, Any] = dict(
        d_model=config["hidden_size"],
        d_ff=config["intermediate_size"],
        n_heads=config["num_attention_heads"],
        n_encoder_layers=config["num_hidden_layers"],
        dropout=config["hidden_dropout_prob"],
        attention_dropout=config["attention_probs_dropout_prob"],
        norm_eps=config["layer_norm_eps"],
        activation=ACTIVATIONS[config["hidden_act"]],
        positions="learned",
        max_positions=config["max_position_embeddings"],
        n_segments=config["type_vocab_size"],
        embedding_norm=True,
        scale_embeddings=False,
    )
    if labels_head(names):
        values |= {"kind": "bert-classifier", "n_labels": len(labels_of(config, names=names))}
    elif _HEAD in names:
        tie = "three_way" if config["tie_word_embeddings"] else "none"
        values |= {"kind": "bert", "next_sentence": _NEXT in names, "output_bias": True, "tie": tie}
    else:
        values["kind"] = "bert-encoder"
    found = Settings.from_mapping({"model": values}, origin=str(origin / "config.json")).model
    assert isinstance(found, EncoderSettings)
    return found


def labels_of(config: Mapping[str, Any], *, names: Collection[str]) -> tuple[str, ...]:
    """The labels' names in the order of their numbers; LABEL_0 and LABEL_1 where the file names none."""
    if _CLASSIFIER not in names:
        return NEXT_LABELS
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    n = config.get("num_labels")
    n = max(len(named), n if type(n) is int and n <= MOST_LABELS else 0) or 2
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(n))


def lines(
    s: EncoderSettings, *, rows: Rows, prefix: str, labels: str = "classifier", pooler: bool = True
) -> list[Line]:
    """The table of a model with these settings. `labels`: `labels_head`; `pooler` false: a trunk that has none."""
    d = s.d_model
    at = f"{prefix}embeddings"
    table, positions = f"{at}.word_embeddings.weight", f"{at}.position_embeddings.weight"
    masked = s if isinstance(s, BertSettings) else None
    tied, next_sentence = bool(masked and masked.tie != "none"), bool(masked and masked.next_sentence)
    decoder = "cls.predictions.decoder"
    found = [
        Line(
            "embedding.table.weight",
            (table,),
            (rows.n_theirs, d),
            also=(f"{decoder}.weight",) if tied else (),
            rows=rows.index,
        ),
        Line("embedding.positions.embedding.weight", (positions,), (s.max_positions, d)),
        Line("segment_embedding.weight", (f"{at}.token_type_embeddings.weight",), (s.n_segments, d)),
        *_norm("embedding.norm", f"{at}.LayerNorm", d),
    ]
    for layer in range(s.n_encoder_layers):
        found += _block(f"encoder.blocks.{layer}", f"{prefix}encoder.layer.{layer}", s)
    if next_sentence or (pooler and not masked) or isinstance(s, BertClassifierSettings):
        found += _linear("pooler.dense", (f"{prefix}pooler.dense",), (d, d))
    if masked:
        head = "cls.predictions.transform"
        found += _linear("head.dense", (f"{head}.dense",), (d, d)) + _norm("head.norm", f"{head}.LayerNorm", d)
        biases = ("cls.predictions.bias",), (f"{decoder}.bias",)
        theirs, also = biases if tied else (biases[1], ())  # untied, the second is the one that counts
        bias = Line("output_bias", theirs, (rows.n_theirs,), also=also, rows=rows.index)
        found.append(bias)
        if not tied:
            found.append(Line("output_embedding.weight", (f"{decoder}.weight",), (rows.n_theirs, d), rows=rows.index))
    if next_sentence:
        found += _linear("next_sentence", ("cls.seq_relationship",), (2, d))
    if isinstance(s, BertClassifierSettings):
        found += _linear("labels", (labels,), (s.n_labels or 0, d))
    return found


def architecture_of(s: EncoderSettings) -> str:
    """The name of the model that has the heads of ours."""
    if isinstance(s, BertSettings):
        return "BertForPreTraining" if s.next_sentence else "BertForMaskedLM"
    return "BertForSequenceClassification" if isinstance(s, BertClassifierSettings) else "BertModel"


def config_of(s: EncoderSettings, *, n: int, pad: int, labels: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of a model of ours that BERT's architecture can express; n: rows of its embedding."""
    named = {} if labels is None else {
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }  # fmt: skip
    return {
        "architectures": [architecture_of(s)],
        "model_type": "bert",
        "vocab_size": n,
        "hidden_size": s.d_model,
        "num_hidden_layers": s.n_encoder_layers,
        "num_attention_heads": s.n_heads,
        "intermediate_size": s.d_ff,
        "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == s.activation),
        "hidden_dropout_prob": s.dropout,
        "attention_probs_dropout_prob": s.attention_dropout,
        "max_position_embeddings": s.max_positions,
        "type_vocab_size": s.n_segments,
        "layer_norm_eps": norm_eps(s.norm, s.norm_eps),
        "pad_token_id": pad,
        "tie_word_embeddings": not isinstance(s, BertSettings) or s.tie != "none",
        "dtype": "float32",
        **named,
    }


NEEDED: Needed = {
    "residual": ("post",),
    "norm": ("layer",),
    "embedding_norm": (True,),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),  # each can be a table of vectors
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
    "pooling": ("first",),
}
"""What its architecture can express of our settings, some by way of `plain_form`."""


def tied_names(s: EncoderSettings) -> dict[str, str]:
    """Names under which our model holds a tensor of the table once more, and that tensor."""
    tied = isinstance(s, BertSettings) and s.tie != "none"
    return {"output_embedding.weight": "embedding.table.weight"} if tied else {}


def unused(s: EncoderSettings, *, prefix: str) -> tuple[str, ...]:
    """Tensors that a file may hold and that do nothing in a model with these settings."""
    if not isinstance(s, BertSettings):
        return ()
    pooler = () if s.next_sentence else (f"{prefix}pooler.dense.weight", f"{prefix}pooler.dense.bias")
    return pooler if s.tie != "none" else (*pooler, "cls.predictions.bias")


def buffers(prefix: str) -> tuple[str, ...]:
    """Tensors of old files that are no weights."""
    return f"{prefix}embeddings.position_ids", f"{prefix}embeddings.token_type_ids"


def _block(ours: str, theirs: str, s: EncoderSettings) -> list[Line]:
    own = f"{theirs}.attention"
    square = (s.d_model, s.d_model)
    return [
        *_linear(
            f"{ours}.self_attention.query_key_value",
            tuple(f"{own}.self.{name}" for name in ("query", "key", "value")),
            square,
        ),
        *_linear(f"{ours}.self_attention.output", (f"{own}.output.dense",), square),
        *_norm(f"{ours}.self_attention_residual.norm", f"{own}.output.LayerNorm", s.d_model),
        *_linear(f"{ours}.feed_forward.expand", (f"{theirs}.intermediate.dense",), (s.d_ff, s.d_model)),
        *_linear(f"{ours}.feed_forward.contract", (f"{theirs}.output.dense",), (s.d_model, s.d_ff)),
        *_norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.output.LayerNorm", s.d_model),
    ]


def _linear(ours: str, theirs: tuple[str, ...], shape: tuple[int, int]) -> list[Line]:
    return [
        Line(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), shape),
        Line(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), shape[:1]),
    ]


def _norm(ours: str, theirs: str, d: int) -> list[Line]:
    """A norm; files that came from TensorFlow call its weights gamma and beta."""
    pairs = (("weight", "gamma"), ("bias", "beta"))
    return [Line(f"{ours}.{new}", (f"{theirs}.{new}",), (d,), also=(f"{theirs}.{old}",)) for new, old in pairs]
