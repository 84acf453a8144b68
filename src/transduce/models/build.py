"""From settings to a model: the MODELS table, and which sizes go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from transduce.config import ModelSettings
from transduce.errors import RunFolderError, SettingsError, nearest
from transduce.models.causal_lm import CausalLM
from transduce.models.masked_lm import Classifier, MaskedLM, PooledEncoder
from transduce.models.presets import PRESETS, resolve_preset
from transduce.models.transformer import Transformer
from transduce.nn.attention import PROJECTIONS
from transduce.nn.block import NORMS, RESIDUALS
from transduce.nn.feedforward import ACTIVATIONS, FEED_FORWARDS
from transduce.nn.pooling import POOLINGS
from transduce.nn.positions import POSITIONS

__all__ = ["MODELS", "PRESETS", "build_from", "build_model", "check_model", "count_parameters", "resolve_preset"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "transformer": Transformer,
    "gpt": CausalLM,
    "bert": MaskedLM,
    "bert-encoder": PooledEncoder,
    "bert-classifier": Classifier,
}

_TABLES: dict[str, dict[str, Any]] = {
    "kind": MODELS,
    "residual": RESIDUALS,
    "norm": NORMS,
    "positions": POSITIONS,
    "feed_forward": FEED_FORWARDS,
    "activation": ACTIVATIONS,
    "projection": PROJECTIONS,
    "pooling": POOLINGS,
}


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


def build_from(
    settings: ModelSettings, tensors: Mapping[str, Tensor], *, n_src: int, n_tgt: int, origin: object
) -> nn.Module:
    """A model with these weights, which must be its own: every name and shape, else a `RunFolderError`.

    Sizes that the weights do not bear out are refused before any memory is taken for them.
    """
    with torch.device("meta"):
        expected = {
            name: tuple(t.shape) for name, t in build_model(settings, n_src=n_src, n_tgt=n_tgt).state_dict().items()
        }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in expected | found:
        if found.get(name) != expected.get(name):
            there, here = (str(list(s[name])) if name in s else "not there" for s in (found, expected))
            raise RunFolderError(f"{origin} is not of this model: {name} is {there}, and by the settings {here}")
        if not tensors[name].is_floating_point():
            raise RunFolderError(f"{origin} is not of this model: {name} is of type {tensors[name].dtype}")
    model = build_model(settings, n_src=n_src, n_tgt=n_tgt)
    model.load_state_dict(tensors)
    return model


def count_parameters(model: nn.Module) -> int:
    """Weights that are trained, a shared one once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
