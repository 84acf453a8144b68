"""Sizes under a name. Without torch, as choosing among them needs none."""

from __future__ import annotations

from typing import Any

from transduce.config import ModelSettings
from transduce.errors import SettingsError, nearest
from transduce.models.kinds import KINDS

_GPT: dict[str, Any] = {"kind": "gpt", "n_encoder_layers": 0, "residual": "pre", "activation": "gelu"}

_BERT: dict[str, Any] = {
    "kind": "bert",
    "activation": "gelu",
    "attention_dropout": 0.1,
    "norm_eps": 1e-12,
    "embedding_norm": True,
    "scale_embeddings": False,
    "positions": "learned",
    "max_positions": 512,
    "output_bias": True,
    "n_segments": 2,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"n_encoder_layers": 4, "n_decoder_layers": 4, "d_model": 128, "d_ff": 256, "n_heads": 4},
    "small": {"n_encoder_layers": 4, "n_decoder_layers": 4, "d_model": 256, "d_ff": 1024, "n_heads": 4},
    "base": {"n_encoder_layers": 6, "n_decoder_layers": 6, "d_model": 512, "d_ff": 2048, "n_heads": 8},
    "big": {"n_encoder_layers": 6, "n_decoder_layers": 6, "d_model": 1024, "d_ff": 4096, "n_heads": 16},
    "gpt-tiny": {**_GPT, "n_decoder_layers": 4, "d_model": 128, "d_ff": 512, "n_heads": 4},
    "gpt-small": {**_GPT, "n_decoder_layers": 6, "d_model": 384, "d_ff": 1536, "n_heads": 6},
    "gpt2": {
        **_GPT,
        "n_decoder_layers": 12,
        "d_model": 768,
        "d_ff": 3072,
        "n_heads": 12,
        "positions": "learned",
        "max_positions": 1024,
    },
    **{
        f"bert-{name}": {**_BERT, "n_encoder_layers": n, "d_model": d, "d_ff": 4 * d, "n_heads": d // 64}
        for name, n, d in (("tiny", 2, 128), ("mini", 4, 256), ("small", 4, 512), ("base", 12, 768))
    },
}
"""Those of Vaswani et al. 2017 (base, big) and smaller ones; gpt2 is the smallest of Radford et al. 2019; bert-base is
that of Devlin et al. 2019, and the smaller ones beside it are those of Turc et al. 2019."""


def presets_of(family: str) -> list[str]:
    """The names of the presets of one family of kinds."""
    return [
        name for name, values in PRESETS.items() if KINDS[values.get("kind", ModelSettings().kind)].family == family
    ]


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
