"""GPT-2 (Radford et al. 2019) as transformers keeps it: settings and tensors. Its matrices are [in, out]."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transduce.config import GPTSettings, Settings
from transduce.convert.limits import no_sizes
from transduce.convert.requirements import ONE_HEAD_COUNT, Needed
from transduce.convert.vocabulary import NEVER, Rows
from transduce.convert.weight_map import ACTIVATIONS, Line
from transduce.errors import UserError
from transduce.nn.block import norm_eps

ARCHITECTURES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}

_SIZES = ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size")
_ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_DEFAULTS: dict[str, Any] = {  # of GPT2Config, for what a file may leave out
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "tie_word_embeddings": True,
}


def prefix_of(names: Collection[str]) -> str:
    """What stands before the names: nothing in the oldest files."""
    return "transformer." if any(name.startswith("transformer.") for name in names) else ""


def model_settings(config: Mapping[str, Any], *, origin: Path) -> GPTSettings:
    """Our settings of a model with this config.json; a `UserError` lists all that cannot be."""
    config = {**_DEFAULTS, **config}
    told = no_sizes(config, (*_SIZES, "n_inner") if config.get("n_inner") is not None else _SIZES)
    told += [
        f"{key} = {config[key]!r}; supported: {only}" for key, only in _ONLY.items() if config.get(key, only) != only
    ]
    if str(config["activation_function"]) not in ACTIVATIONS:
        told.append(f"activation_function = {config['activation_function']!r}; supported: {', '.join(ACTIVATIONS)}")
    if config["embd_pdrop"] != config["resid_pdrop"]:
        told.append(f"embd_pdrop = {config['embd_pdrop']} and resid_pdrop = {config['resid_pdrop']} differ")
    if told:
        raise UserError(f"{origin / 'config.json'}: {'; '.join(told)}")
    values = dict(
        kind="gpt",
        d_model=config["n_embd"],
        d_ff=config.get("n_inner") or 4 * config["n_embd"],
        n_heads=config["n_head"],
        n_decoder_layers=config["n_layer"],
        dropout=config["resid_pdrop"],
        attention_dropout=config["attn_pdrop"],
        norm_eps=config["layer_norm_epsilon"],
        activation=ACTIVATIONS[config["activation_function"]],
        residual="pre",
        positions="learned",
        max_positions=config["n_positions"],
        scale_embeddings=False,
        tie="three_way" if config["tie_word_embeddings"] else "none",
        output_bias=True,
    )
    found = Settings.from_mapping({"model": values}, origin=str(origin / "config.json")).model
    assert isinstance(found, GPTSettings)
    return found


def lines(s: GPTSettings, *, rows: Rows, prefix: str) -> list[Line]:
    """The table of a model with these settings, but for the bias on the logits, which theirs has not."""
    d, ff, size, head = s.d_model, s.d_ff, (rows.n_theirs, s.d_model), ("lm_head.weight",)
    tied = s.tie != "none"
    found = [
        Line("embedding.table.weight", (f"{prefix}wte.weight",), size, also=head if tied else (), rows=rows.index),
        Line("embedding.positions.embedding.weight", (f"{prefix}wpe.weight",), (s.max_positions, d)),
    ]
    if not tied:
        found.append(Line("output_embedding.weight", head, size, rows=rows.index))
    for layer in range(s.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"{prefix}h.{layer}"
        parts = (
            ("self_attention.query_key_value", "attn.c_attn", (d, 3 * d)),
            ("self_attention.output", "attn.c_proj", (d, d)),
            ("feed_forward.expand", "mlp.c_fc", (d, ff)),
            ("feed_forward.contract", "mlp.c_proj", (ff, d)),
        )
        for own, name, shape in parts:
            found.append(Line(f"{ours}.{own}.weight", (f"{theirs}.{name}.weight",), shape, transposed=True))
            found.append(Line(f"{ours}.{own}.bias", (f"{theirs}.{name}.bias",), shape[1:]))
        found += _norm(f"{ours}.self_attention_residual.norm", f"{theirs}.ln_1", d)
        found += _norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.ln_2", d)
    return found + _norm("decoder.norm", f"{prefix}ln_f", d)


def tied_names(s: GPTSettings) -> dict[str, str]:
    """Names under which our model holds a tensor of the table once more, and that tensor."""
    return {"output_embedding.weight": "embedding.table.weight"} if s.tie != "none" else {}


def config_of(s: GPTSettings, *, n: int, begin: int, end: int) -> dict[str, Any]:
    """The config.json of a model of ours that GPT-2's architecture can express; n: rows of its embedding."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": n,
        "n_positions": s.max_positions,
        "n_embd": s.d_model,
        "n_layer": s.n_decoder_layers,
        "n_head": s.n_heads,
        "n_inner": s.d_ff,
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == s.activation),
        "layer_norm_epsilon": norm_eps(s.norm, s.norm_eps),
        "resid_pdrop": s.dropout,
        "embd_pdrop": s.dropout,
        "attn_pdrop": s.attention_dropout,
        "bos_token_id": begin,
        "eos_token_id": end,
        "tie_word_embeddings": s.tie != "none",
        "dtype": "float32",
    }


NEEDED: Needed = {
    "residual": ("pre",),
    "norm": ("layer",),
    "embedding_norm": (False,),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),  # each can be a table of vectors
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
}
"""What its architecture can express of our settings, some by way of `plain_form`."""


def never(rows: Rows) -> list[float]:
    """Our bias on the logits: ids that they have not, and the second of two that are one there, are never written."""
    index = rows.index.tolist()
    return [NEVER if row < 0 or row in index[i + 1 :] else 0.0 for i, row in enumerate(index[:4])] + [0.0] * (
        len(index) - 4
    )


def buffers(s: GPTSettings, *, prefix: str) -> tuple[str, ...]:
    """Tensors of old files that are no weights: causal masks."""
    names = ("attn.bias", "attn.masked_bias")
    return tuple(f"{prefix}h.{layer}.{name}" for layer in range(s.n_decoder_layers) for name in names)


def _norm(ours: str, theirs: str, d: int) -> list[Line]:
    return [Line(f"{ours}.{part}", (f"{theirs}.{part}",), (d,)) for part in ("weight", "bias")]
