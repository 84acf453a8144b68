"""Models small enough for the oracle, with every option of every table, and batches for them."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oracle.adapter import fitting, randomize
from transduce.config.model import ModelSettings
from transduce.models.registry import build_model
from transduce.nn.positions import POSITIONS

VOCAB = 13
# In float64 only the angles of positions are rounded: a table kept in float32, rotations computed in it.
FLOAT64 = dict.fromkeys(POSITIONS, 1e-11) | dict.fromkeys(
    ("sinusoidal", "sinusoidal_halves", "sinusoidal_fairseq", "sinusoidal_marian", "rotary"), 2e-6
)
SMALL: dict[str, Any] = {
    "d_model": 16,
    "d_ff": 24,
    "n_heads": 4,
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
    "dropout": 0.0,
    "max_positions": 12,
}

# One option away from the paper's model.
SINGLE: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre": {"residual": "pre"},
    "rms": {"norm": "rms"},
    "learned": {"positions": "learned"},
    "rotary": {"positions": "rotary"},
    "no positions": {"positions": "none"},
    "alibi": {"positions": "alibi"},
    "alibi, three heads": {"positions": "alibi", "d_model": 12, "n_heads": 3},
    "t5": {"positions": "t5"},
    "shaw": {"positions": "shaw"},
    "local": {"decoder_pattern": "local", "encoder_pattern": "local", "window": 2},
    "window of one": {"decoder_pattern": "local", "window": 1},
    "strided": {"decoder_pattern": "strided", "encoder_pattern": "strided", "window": 3},
    "fixed": {"decoder_pattern": "fixed", "encoder_pattern": "fixed", "window": 3, "summary_tokens": 2},
    "fixed layers": {"decoder_pattern": "fixed", "window": 3, "summary_tokens": 1, "factors": "layers"},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": "silu"},
    "gated": {"feed_forward": "gated"},
    "conv 1": {"feed_forward": "conv"},
    "conv 2": {"feed_forward": "conv", "kernel_size": 2},
    "conv 3": {"feed_forward": "conv", "kernel_size": 3},
    "shared projection": {"projection": "shared"},
    "two key heads": {"n_kv_heads": 2},
    "one key head": {"n_kv_heads": 1},
    "one head": {"n_heads": 1},
    "narrow keys": {"d_key": 2},
    "narrow rotary keys": {"d_key": 2, "positions": "rotary"},
    "one wide key head": {"d_key": 6, "n_kv_heads": 1},
    "narrow values": {"d_value": 2},
    "wide values": {"d_value": 6, "n_kv_heads": 1},
    "heads of other widths than d_model / n_heads": {"n_heads": 3, "d_key": 5, "d_value": 4},
    "tied two ways": {"tie": "two_way"},
    "tied inputs": {"tie": "inputs"},
    "untied": {"tie": "none"},
    "no bias": {"bias": False},
    "sines, then cosines": {"positions": "sinusoidal_halves"},
    "sines, then cosines, odd": {"positions": "sinusoidal_halves", "d_model": 9, "n_heads": 3},
    "fairseq's sinusoids": {"positions": "sinusoidal_fairseq", "one_end": True},
    "fairseq's sinusoids, odd": {"positions": "sinusoidal_fairseq", "d_model": 9, "n_heads": 3},
    "Marian's sinusoids": {"positions": "sinusoidal_marian", "decoder_self": "ssru"},
    "gelu by tanh": {"activation": "gelu_tanh"},
    "output bias": {"output_bias": True},
    "unscaled embeddings": {"scale_embeddings": False},
    "norm of embeddings": {"embedding_norm": True},
    "wide epsilon": {"norm_eps": 1e-2},
    "ssru": {"decoder_self": "ssru"},
    "ssru, pre": {"decoder_self": "ssru", "residual": "pre", "n_encoder_layers": 3, "n_decoder_layers": 1},
    "deep encoder": {"n_encoder_layers": 3, "n_decoder_layers": 1},
    "deep decoder": {"n_encoder_layers": 1, "n_decoder_layers": 3},
    "no encoder blocks": {"n_encoder_layers": 0},
    "modern": {"residual": "pre", "norm": "rms", "positions": "rotary", "feed_forward": "gated", "activation": "silu"},
}

CHOICES: dict[str, Sequence[Any]] = {
    "residual": ["post", "pre"],
    "norm": ["layer", "rms"],
    "positions": [
        "sinusoidal",
        "learned",
        "rotary",
        "none",
        "sinusoidal_halves",
        "sinusoidal_fairseq",
        "sinusoidal_marian",
        "alibi",
        "t5",
        "shaw",
    ],
    "activation": ["relu", "gelu", "silu", "gelu_tanh"],
    "feed_forward": ["plain", "gated", "conv"],
    "kernel_size": [1, 2, 3, 4],
    "projection": ["full", "shared"],
    "n_heads": [1, 2, 4],
    "n_kv_heads": [None, 1, 2],
    "tie": ["three_way", "two_way", "inputs", "none"],
    "bias": [True, False],
    "n_encoder_layers": [0, 1, 3],
    "n_decoder_layers": [1, 2],
    "d_model": [8, 16],
    "d_ff": [1, 24],
    "output_bias": [True, False],
    "scale_embeddings": [True, False],
    "embedding_norm": [True, False],
    "norm_eps": [None, 1e-3],
    "encoder_pattern": ["full", "local", "strided", "fixed"],
    "decoder_pattern": ["full", "local", "strided", "fixed"],
    "factors": ["heads", "layers"],
    "summary_tokens": [1, 2],
    "decoder_self": ["attention", "ssru"],
}


def combination(seed: int) -> dict[str, Any]:
    """A random valid choice of every option, the same for the same seed."""
    generator = random.Random(seed)
    chosen = {key: generator.choice(values) for key, values in CHOICES.items()}
    if chosen["feed_forward"] != "conv":
        chosen["kernel_size"] = 1
    if chosen["projection"] == "shared" or chosen["n_heads"] % (chosen["n_kv_heads"] or 1):
        chosen["n_kv_heads"] = None
    patterns = ("encoder_pattern", "decoder_pattern")
    if "full" in (chosen[pattern] for pattern in patterns):
        chosen |= dict.fromkeys(patterns, "full")
    else:
        chosen |= {"window": 3, "factors": "layers" if chosen["n_heads"] == 1 else chosen["factors"]}
    if chosen["decoder_pattern"] != "full" or chosen["positions"] in ("t5", "shaw"):
        chosen["decoder_self"] = "attention"
    return chosen


MIXED = {f"mix {seed}": combination(seed) for seed in range(24)}


def settings(**options: Any) -> ModelSettings:
    """Small settings with some options changed."""
    return fitting(**{**SMALL, **options})


def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[nn.Module, ModelSettings]:
    """A small model in evaluation mode with random weights, and its settings."""
    chosen = settings(**options)
    model = build_model(chosen, n_src=VOCAB, n_tgt=VOCAB).eval()
    randomize(model, seed=seed)
    return model.to(dtype), chosen


def sentences(lengths: Sequence[int], *, seed: int = 0) -> list[Tensor]:
    """Random token ids, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=generator) for n in lengths]


def pad(rows: Sequence[Tensor], *, left: bool = False, extra: int = 0) -> Tensor:
    """Pad all rows with zeros on the right or on the left, to `extra` more than the longest row."""
    width = max(len(row) for row in rows) + extra
    padded = torch.zeros(len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        place = slice(width - len(row), None) if left else slice(len(row))
        padded[n, place] = row
    return padded
