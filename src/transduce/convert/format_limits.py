"""The limits of a format: checks of another program's config.json, and of our settings before an export.

Some settings are expressed through an equal model: see `normalize`.
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

ACTIVATIONS = {  # theirs to ours; of several names for one of ours, the first is written
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
}

MAX_LAYERS, _MAX_SIZE = 1 << 10, 1 << 24
"""Largest sizes accepted: far beyond any published model, and small enough to build a list of weights for."""

_MAX_SIZE_OF = {"position": 1 << 16, "layer": MAX_LAYERS}  # by a part of the key

SettingsT = TypeVar("SettingsT", bound=AttentionSettings)

Expressible = Mapping[str, Collection[Any]]
"""The values of our settings that a program supports."""

EXPRESSIBLE_ANYWHERE: Expressible = {
    "encoder_pattern": ("full",),
    "decoder_pattern": ("full",),
    "projection": ("full",),
    "n_kv_heads": (None,),  # only as many key and value heads as query heads
    "d_key": (None,),
}

EXPRESSIBLE_IN_TRANSFORMERS: Expressible = {
    "norm": ("layer",),
    "positions": ("learned", "sinusoidal", "sinusoidal_halves", "none"),  # each can become a table of vectors
    "feed_forward": ("plain",),
    "activation": tuple(ACTIVATIONS.values()),
}


@dataclass(frozen=True, slots=True)
class ConfigFormat:
    """The keys of a config.json, for both directions.

    `sizes` and `values`: our setting for each key, or None; sizes are positive whole numbers. `defaults`: for keys that
    a file may leave out. `only`: supported values of other keys, the assumed one first. `equal`: pairs of keys that
    must agree. `activation`: the key of the activation.
    """

    sizes: Mapping[str, str | None]
    values: Mapping[str, str]
    activation: str
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    equal: tuple[tuple[str, str], ...] = ()

    def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Values of our settings from a complete config.json that was checked."""
        found = {ours: config[key] for key, ours in (*self.sizes.items(), *self.values.items()) if ours is not None}
        return found | {"activation": ACTIVATIONS[config[self.activation]]}

    def write(self, s: AttentionSettings) -> dict[str, Any]:
        """The part of a config.json that follows from our settings alone."""
        found = {key: getattr(s, ours) for key, ours in (*self.sizes.items(), *self.values.items()) if ours is not None}
        found[self.activation] = next(name for name, known in ACTIVATIONS.items() if known == s.activation)
        return found

    def check(
        self, config: Mapping[str, Any], *, origin: Path, optional_sizes: Sequence[str] = (), more: Sequence[str] = ()
    ) -> None:
        """`UserError` with everything in `config`, completed by the defaults, that is not supported, and `more`."""
        found = list[str]()
        for key in (*self.sizes, *(key for key in optional_sizes if config.get(key) is not None)):
            if key not in config:
                found.append(f"{key} is missing")
                continue
            value, least = config[key], 2 if "position" in key else 1
            most = next((most for part, most in _MAX_SIZE_OF.items() if part in key), _MAX_SIZE)
            if type(value) is not int or not least <= value <= most:
                found.append(f"{key} = {repr(value)[:40]} is not a size from {least} to {most:,}")
        for a, b in self.equal:
            if config.get(a) != config.get(b):
                found.append(f"{a} = {config.get(a)!r} and {b} = {config.get(b)!r} differ")
        for key, allowed in self.only.items():
            if config.get(key, allowed[0]) not in allowed:
                found.append(f"{key} = {config[key]!r}; supported: {allowed[0]}")
        if str(config[self.activation]) not in ACTIVATIONS:
            found.append(f"{self.activation} = {config[self.activation]!r}; supported: {', '.join(ACTIVATIONS)}")
        if found or more:
            raise UserError(f"{origin / 'config.json'}: {'; '.join([*found, *more])}")


def model_from(section: type[SettingsT], values: Mapping[str, Any], *, origin: Path) -> SettingsT:
    """Our settings with these values, which come from the config.json in `origin`."""
    found = Settings.from_mapping({"model": dict(values)}, origin=str(origin / "config.json")).model
    assert isinstance(found, section)
    return found


def check_expressible(s: AttentionSettings, expressible: Expressible, program: str) -> None:
    """`UserError` with the settings that a program does not support, each with what it would have to be."""
    found, usual = [], {"n_kv_heads": s.n_heads, "d_key": s.d_head}
    for key, allowed in {**expressible, **EXPRESSIBLE_ANYWHERE}.items():
        if key not in type(s).model_fields:
            continue
        value = getattr(s, key)
        value = None if value == usual.get(key) else value
        if value not in allowed:
            if isinstance(allowed, range):
                choices = f"{allowed[0]} to {allowed[-1]}"
            else:
                choices = " or ".join(repr(one) for one in dict.fromkeys(allowed) if one is not None)
            found.append(f"model.{key} = {value!r}" + (f" (there: {choices})" if choices else ""))
    if found:
        raise UserError(f"{program} cannot express {', '.join(found)}; export it as ONNX, or train with other settings")


def normalize(s: SettingsT, tensors: Mapping[str, Tensor]) -> tuple[SettingsT, dict[str, Tensor]]:
    """Settings and tensors of an equal model with learned positions, unscaled embeddings and segments.

    The models are equal up to `max_positions`. Scaled embeddings are no longer tied to the output matrix. Tensors that
    need no change keep their bits.
    """
    found, changes = dict(tensors), dict[str, Any]()
    if s.position_limit is None:
        found["embedding.positions.embedding.weight"] = position_table(s)
        changes["positions"] = "learned"
    if s.scale_embeddings:
        table = found["embedding.table.weight"]
        found["embedding.table.weight"] = table * math.sqrt(s.d_model)
        changes |= {"scale_embeddings": False} | ({"tie": "none"} if isinstance(s, OutputSettings) else {})
    if isinstance(s, EncoderSettings) and not s.n_segments:
        found["segment_embedding.weight"] = torch.zeros(2, s.d_model)
        changes["n_segments"] = 2
    return s.model_copy(update=changes), found


def position_table(s: AttentionSettings) -> Tensor:
    """The vectors [max_positions, D] that computed positions add to embeddings."""
    positions = POSITIONS[s.positions](d_model=s.d_model, d_head=s.key_width, max_positions=s.max_positions)
    return positions.add(torch.zeros(1, s.max_positions, s.d_model), 0)[0]
