"""The limits of formats: checks of another program's config.json, and of our settings before an export.

`normalize` replaces some settings by equivalent ones that a format supports.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from transduce.config.architectures import EncoderSettings
from transduce.config.model import AttentionSettings, OutputSettings
from transduce.config.settings import Settings
from transduce.errors import UserError
from transduce.nn.positions import POSITIONS

CTRANSLATE2_HINT = "export --to ctranslate2, and write a token such as <2de> before each source's tokens"
"""Advice for runs that were trained with tokens for languages."""

ACTIVATIONS = {  # transformers' names to ours; if several names have one meaning, exports write the first
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
}

MAX_LAYERS, _MAX_SIZE = 1 << 10, 1 << 24
"""Largest accepted numbers of layers and sizes: far beyond published models, but small enough to list the weights."""

_MAX_SIZE_OF = {"position": 1 << 16, "layer": MAX_LAYERS}  # largest size, by a word in the key of config.json

SettingsT = TypeVar("SettingsT", bound=AttentionSettings)

Expressible = Mapping[str, Collection[Any]]
"""For settings of ours, the values that a program supports."""

EXPRESSIBLE_ANYWHERE: Expressible = {
    "encoder_pattern": ("full",),
    "decoder_pattern": ("full",),
    "projection": ("full",),
    "n_kv_heads": (None,),  # as many key and value heads as query heads
    "d_key": (None,),
    "d_value": (None,),
}

EXPRESSIBLE_IN_TRANSFORMERS: Expressible = {
    "norm": ("layer",),
    # these schemes can be exported as a table of vectors
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
}


@dataclass(frozen=True, slots=True)
class ConfigFormat:
    """The keys of a config.json, or of Marian's settings, for import and export.

    `sizes` (positive whole numbers) and `values` (other types) map a key to our setting, or to None if we have no such
    setting. `defaults`: values of keys that a file may leave out. `only`: supported values of keys without a setting of
    ours; the first is assumed if a file lacks the key. `equal`: pairs of keys that must have equal values.
    `activation`: the key of the activation function.
    """

    sizes: Mapping[str, str | None]
    values: Mapping[str, str]
    activation: str
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    equal: tuple[tuple[str, str], ...] = ()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a complete, checked config.json to values of our settings."""
        values = {ours: config[key] for key, ours in (*self.sizes.items(), *self.values.items()) if ours is not None}
        return values | {"activation": ACTIVATIONS[config[self.activation]]}

    def write(self, s: AttentionSettings) -> dict[str, Any]:
        """Return the keys of a config.json that depend only on our settings."""
        config = {
            key: getattr(s, ours) for key, ours in (*self.sizes.items(), *self.values.items()) if ours is not None
        }
        config[self.activation] = next(name for name, known in ACTIVATIONS.items() if known == s.activation)
        return config

    def check(
        self, config: Mapping[str, Any], *, origin: Path, optional_sizes: Sequence[str] = (), more: Sequence[str] = ()
    ) -> None:
        """Raise `UserError` with all unsupported values of `config` (which includes defaults), and with `more`."""
        problems = list[str]()
        for key in (*self.sizes, *(key for key in optional_sizes if config.get(key) is not None)):
            if key not in config:
                problems.append(f"{key} is missing")
                continue
            value, least = config[key], 2 if "position" in key else 1
            most = next((most for part, most in _MAX_SIZE_OF.items() if part in key), _MAX_SIZE)
            if type(value) is not int or not least <= value <= most:
                problems.append(f"{key} = {repr(value)[:40]} is not a size from {least} to {most:,}")
        for a, b in self.equal:
            if config.get(a) != config.get(b):
                problems.append(f"{a} = {config.get(a)!r} and {b} = {config.get(b)!r} differ")
        for key, allowed in self.only.items():
            if config.get(key, allowed[0]) not in allowed:
                problems.append(f"{key} = {config[key]!r}; supported: {allowed[0]}")
        if str(config[self.activation]) not in ACTIVATIONS:
            problems.append(f"{self.activation} = {config[self.activation]!r}; supported: {', '.join(ACTIVATIONS)}")
        if problems or more:
            raise UserError(f"{origin}: {'; '.join([*problems, *more])}")


def model_from(section: type[SettingsT], values: Mapping[str, Any], *, origin: Path) -> SettingsT:
    """Make settings of the class `section` from the values in the file `origin`."""
    model = Settings.from_mapping({"model": dict(values)}, origin=str(origin)).model
    assert isinstance(model, section)
    return model


def check_expressible(s: AttentionSettings, expressible: Expressible, program: str) -> None:
    """Raise `UserError` with each setting that a program does not support, and the supported values."""
    refused, usual = [], {"n_kv_heads": s.n_heads, "d_key": s.d_head, "d_value": s.d_head}
    for key, allowed in {**expressible, **EXPRESSIBLE_ANYWHERE, **expressible}.items():
        if key not in type(s).model_fields:
            continue
        value = getattr(s, key)
        value = None if value == usual.get(key) else value
        if value not in allowed:
            if isinstance(allowed, range):
                choices = f"{allowed[0]} to {allowed[-1]}"
            else:
                choices = " or ".join(repr(choice) for choice in dict.fromkeys(allowed) if choice is not None)
            refused.append(f"model.{key} = {value!r}" + (f" (there: {choices})" if choices else ""))
    if refused:
        raise UserError(f"{program} cannot express {', '.join(refused)}; train with other settings")


def normalize(s: SettingsT, tensors: Mapping[str, Tensor]) -> tuple[SettingsT, dict[str, Tensor]]:
    """Return settings and tensors of an equivalent model with learned positions, unscaled embeddings and segments.

    The models are equal up to `max_positions`. Scaled embeddings are no longer tied to the output matrix. Tensors that
    need no change keep their bits.
    """
    changed, changes = dict(tensors), dict[str, Any]()
    if s.position_limit is None:
        changed["embedding.positions.embedding.weight"] = position_table(s)
        changes["positions"] = "learned"
    if s.scale_embeddings:
        table = changed["embedding.table.weight"]
        changed["embedding.table.weight"] = table * math.sqrt(s.d_model)
        changes |= {"scale_embeddings": False} | ({"tie": "none"} if isinstance(s, OutputSettings) else {})
    if isinstance(s, EncoderSettings) and not s.n_segments:
        changed["segment_embedding.weight"] = torch.zeros(2, s.d_model)
        changes["n_segments"] = 2
    return s.model_copy(update=changes), changed


def position_table(s: AttentionSettings) -> Tensor:
    """Compute the vectors [max_positions, D] that a positional scheme without weights adds to embeddings."""
    positions = POSITIONS[s.positions](d_model=s.d_model, d_head=s.key_width, max_positions=s.max_positions)
    return positions.add(torch.zeros(1, s.max_positions, s.d_model), 0)[0]
