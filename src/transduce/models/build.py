"""From settings to a model: the MODELS and PRESETS tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from transduce.config import ModelSettings
from transduce.errors import SettingsError, nearest
from transduce.models.transformer import Transformer
from transduce.nn.attention import PROJECTIONS
from transduce.nn.block import NORMS, RESIDUALS
from transduce.nn.feedforward import ACTIVATIONS, FEED_FORWARDS
from transduce.nn.positions import POSITIONS

MODELS: dict[str, Callable[..., nn.Module]] = {"transformer": Transformer}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"n_encoder_layers": 4, "n_decoder_layers": 4, "d_model": 128, "d_ff": 256, "n_heads": 4},
    "small": {"n_encoder_layers": 4, "n_decoder_layers": 4, "d_model": 256, "d_ff": 1024, "n_heads": 4},
    "base": {"n_encoder_layers": 6, "n_decoder_layers": 6, "d_model": 512, "d_ff": 2048, "n_heads": 8},
    "big": {"n_encoder_layers": 6, "n_decoder_layers": 6, "d_model": 1024, "d_ff": 4096, "n_heads": 16},
}

_TABLES: dict[str, dict[str, Any]] = {
    "kind": MODELS,
    "residual": RESIDUALS,
    "norm": NORMS,
    "positions": POSITIONS,
    "feed_forward": FEED_FORWARDS,
    "activation": ACTIVATIONS,
    "projection": PROJECTIONS,
}


def resolve_preset(settings: ModelSettings) -> ModelSettings:
    """Settings with the preset's sizes written in; a size that was given beside the preset wins."""
    if settings.preset is None:
        return settings
    if settings.preset not in PRESETS:
        raise SettingsError(
            f"model.preset = {settings.preset!r}{nearest(settings.preset, PRESETS)}; allowed: {', '.join(PRESETS)}"
        )
    given = {key: getattr(settings, key) for key in settings.model_fields_set if key != "preset"}
    return ModelSettings(**{**PRESETS[settings.preset], **given})


def check_model(settings: ModelSettings) -> None:
    """Refuse names that no table knows and sizes that contradict each other, in one line each."""
    for field, table in _TABLES.items():
        name = getattr(settings, field)
        if name not in table:
            raise SettingsError(f"model.{field} = {name!r}{nearest(name, table)}; allowed: {', '.join(table)}")
    s = settings
    kv = s.n_kv_heads or s.n_heads
    problems = {
        f"model.d_model = {s.d_model} is not divisible by model.n_heads = {s.n_heads}": s.d_model % s.n_heads,
        f"model.n_heads = {s.n_heads} is not divisible by model.n_kv_heads = {kv}": s.n_heads % kv,
        f"model.projection = 'shared' needs n_kv_heads = n_heads, not {kv}": s.projection == "shared"
        and kv != s.n_heads,
        f"rotary positions need an even head width, not {s.d_model // s.n_heads}": s.positions == "rotary"
        and (s.d_model // s.n_heads) % 2,
        f"model.kernel_size = {s.kernel_size} needs model.feed_forward = 'conv'": s.kernel_size > 1
        and s.feed_forward != "conv",
    }
    for problem, found in problems.items():
        if found:
            raise SettingsError(f"{problem}; choose other sizes")


def build_model(settings: ModelSettings, *, n_src: int, n_tgt: int) -> nn.Module:
    """A model with fresh weights (from torch's default generator) for vocabularies of n_src and n_tgt pieces."""
    settings = resolve_preset(settings)
    check_model(settings)
    if settings.tie == "three_way" and n_src != n_tgt:
        raise SettingsError(
            "model.tie = 'three_way' needs tokenizer.joint = true; use 'two_way' for separate vocabularies"
        )
    return MODELS[settings.kind](settings, n_src=n_src, n_tgt=n_tgt)


def count_parameters(model: nn.Module) -> int:
    """Weights that are trained, a shared one once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
