"""Scale models to the same number of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from transduce.comparison.recipes import naming
from transduce.comparison.shared import Shared
from transduce.config import ModelSettings, Settings, resolve_preset
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import parameters_of

TOLERANCE = 0.1  # of the number asked for
RULE = (
    "all widths (settings that begin with d_) of a recipe are multiplied by one factor; depth, heads, kernels and "
    "vocabulary are unchanged"
)
SettingsT = TypeVar("SettingsT", bound=ModelSettings)


def scale(model: SettingsT, n_parameters: int, *, n_src: int, n_tgt: int) -> SettingsT:
    """The same architecture with about `n_parameters`, by RULE.

    `d_model` is a multiple of `width_step`; other widths are even. Raises `SettingsError` if no such width is within
    TOLERANCE.
    """
    model = resolve_preset(model)
    step = model.width_step
    widths = {
        name: value
        for name in type(model).model_fields
        if name.startswith("d_") and isinstance(value := getattr(model, name), int)
    }

    def sized(number: int) -> SettingsT:
        d_model = number * step
        others = {name: max(2, 2 * round(value * d_model / model.d_model / 2)) for name, value in widths.items()}
        given = {name: getattr(model, name) for name in model.model_fields_set}
        return type(model)(**{**given, **others, "d_model": d_model})

    def count(number: int) -> float:
        try:
            return parameters_of(sized(number), n_src=n_src, n_tgt=n_tgt)
        except ValidationError:  # wider than allowed
            return math.inf

    low, high = 0, 1
    while count(high) < n_parameters:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < n_parameters else (low, middle)
    best = min((number for number in (low, high) if number), key=lambda number: abs(count(number) - n_parameters))
    if abs(count(best) - n_parameters) > TOLERANCE * n_parameters:
        raise SettingsError(
            f"--budget params={n_parameters}: the nearest size of this model has {count(best):,} parameters (d_model "
            f"{best * step}); give another number, fewer heads or a smaller vocabulary"
        )
    return sized(best)


def scaled(recipes: Mapping[str, Settings], n_parameters: int, shared: Shared, log: Log) -> dict[str, Settings]:
    """The recipes with models of about `n_parameters`, for the vocabulary that they share."""
    found, labels = {}, shared.settings.data.labels
    for name, settings in recipes.items():
        model: Any = settings.model
        if "n_labels" in type(model).model_fields:
            model = model.model_copy(update={"n_labels": len(labels) if labels else None})
        if not shared.settings.tokenizer.joint and "tie" not in model.model_fields_set:
            model = model.model_copy(update={"tie": "two_way"})
        with naming(name):
            sized = scale(model, n_parameters, n_src=shared.tokenizers.n_src, n_tgt=shared.tokenizers.n_tgt)
        widths = {key: value for key, value in sized.model_dump().items() if key.startswith("d_") and value is not None}
        found[name] = settings.with_values("model", **widths)
        log.say(f"{name}: {', '.join(f'{key} {value}' for key, value in widths.items())}")
    return found
