"""GPT-2 (Radford et al. 2019) as transformers stores it: config.json and weight map. Its matrices are [in, out]."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transduce.config import GPTSettings
from transduce.convert.requirements import (
    ACTIVATIONS,
    ONE_HEAD_COUNT,
    ConfigFormat,
    Expressible,
    model_from,
)
from transduce.convert.weight_map import NEVER, Entry, Rows, norm
from transduce.nn.block import norm_eps
from transduce.text.special import EOS

ARCHITECTURES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}

FORMAT = ConfigFormat(
    sizes={
        "n_embd": "d_model",
        "n_head": "n_heads",
        "n_layer": "n_decoder_layers",
        "n_positions": "max_positions",
        "vocab_size": None,
    },
    values={
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "norm_eps",
    },
    activation="activation_function",
    defaults={  # of GPT2Config
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    equal=(("embd_pdrop", "resid_pdrop"),),
)


def prefix_of(names: Collection[str]) -> str:
    """The prefix of the names: empty in the oldest files."""
    return "transformer." if any(name.startswith("transformer.") for name in names) else ""


def model_settings(config: Mapping[str, Any], *, origin: Path) -> GPTSettings:
    """Our settings for a model with this config.json; `UserError` lists everything that is not supported."""
    config = {**FORMAT.defaults, **config}
    FORMAT.check(config, origin=origin, optional_sizes=("n_inner",))
    values = FORMAT.read(config) | {
        "kind": "gpt",
        "d_ff": config.get("n_inner") or 4 * config["n_embd"],
        "residual": "pre",
        "positions": "learned",
        "scale_embeddings": False,
        "tie": "three_way" if config["tie_word_embeddings"] else "none",
        "output_bias": True,
    }
    return model_from(GPTSettings, values, origin=origin)


def entries(s: GPTSettings, *, rows: Rows, prefix: str) -> list[Entry]:
    """The weight map of a model, without the bias on the logits, which theirs does not have."""
    d, ff, size, head = s.d_model, s.d_ff, (rows.n_theirs, s.d_model), ("lm_head.weight",)
    tied = s.tie != "none"
    found = [
        Entry("embedding.table.weight", (f"{prefix}wte.weight",), size, also=head if tied else (), rows=rows.index),
        Entry("embedding.positions.embedding.weight", (f"{prefix}wpe.weight",), (s.max_positions, d)),
    ]
    if not tied:
        found.append(Entry("output_embedding.weight", head, size, rows=rows.index))
    for layer in range(s.n_decoder_layers):
        ours, theirs = f"decoder.blocks.{layer}", f"{prefix}h.{layer}"
        parts = (
            ("self_attention.query_key_value", "attn.c_attn", (d, 3 * d)),
            ("self_attention.output", "attn.c_proj", (d, d)),
            ("feed_forward.expand", "mlp.c_fc", (d, ff)),
            ("feed_forward.contract", "mlp.c_proj", (ff, d)),
        )
        for own, name, shape in parts:
            found.append(Entry(f"{ours}.{own}.weight", (f"{theirs}.{name}.weight",), shape, transposed=True))
            found.append(Entry(f"{ours}.{own}.bias", (f"{theirs}.{name}.bias",), shape[1:]))
        found += norm(f"{ours}.self_attention_residual.norm", f"{theirs}.ln_1", d)
        found += norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.ln_2", d)
    return found + norm("decoder.norm", f"{prefix}ln_f", d)


def tied_names(s: GPTSettings) -> dict[str, str]:
    """Other names of the tensors in the weight map in our model."""
    return {"output_embedding.weight": "embedding.table.weight"} if s.tie != "none" else {}


def config_of(s: GPTSettings, *, n: int, begin: int, end: int) -> dict[str, Any]:
    """The config.json of a model of ours. n: rows of its embedding."""
    return FORMAT.write(s) | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": n,
        "n_inner": s.d_ff,
        "layer_norm_epsilon": norm_eps(s.norm, s.norm_eps),
        "bos_token_id": begin,
        "eos_token_id": end,
        "tie_word_embeddings": s.tie != "none",
        "dtype": "float32",
    }


EXPRESSIBLE: Expressible = {
    "residual": ("pre",),
    "norm": ("layer",),
    "embedding_norm": (False,),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),  # each can become a table of vectors
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
    "projection": ("full",),
    "n_kv_heads": ONE_HEAD_COUNT,
}
"""Some settings are expressed through an equal model: see `normalize`."""


def fixed_bias(rows: Rows) -> Tensor:
    """Our bias on the logits. It rules out ids without a row, and the first of two ids of ours that share a row."""
    index = rows.index.tolist()
    ruled_out = [row < 0 or row in index[i + 1 :] for i, row in enumerate(index[: EOS + 1])]
    return torch.tensor([NEVER if out else 0.0 for out in ruled_out] + [0.0] * (len(index) - len(ruled_out)))


def buffers(s: GPTSettings, *, prefix: str) -> tuple[str, ...]:
    """Tensors in older files that are not weights: causal masks."""
    names = ("attn.bias", "attn.masked_bias")
    return tuple(f"{prefix}h.{layer}.{name}" for layer in range(s.n_decoder_layers) for name in names)
