"""Scale models to the same number of parameters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from transduce.comparison.recipes import naming
from transduce.comparison.shared import Shared
from transduce.config.kinds import resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.settings import Settings
from transduce.errors import SettingsError
from transduce.logging import Log
from transduce.models.registry import parameters_of

TOLERANCE = 0.1  # of the number asked for
WIDEST = 1 << 16
RULE = (
    "all widths (settings that begin with d_) of a recipe are multiplied by one factor; depth, heads, kernels and "
    "vocabulary are unchanged"
)


def scale(model: ModelSettings, n_parameters: int, *, n_src: int, n_tgt: int) -> Any:
    """The same architecture with about `n_parameters`, by RULE.

    `d_model` is a multiple of `width_step`; other widths are even. Raises `SettingsError` if no such width is within
    TOLERANCE.
    """
    model = resolve_preset(model)
    given = {name: getattr(model, name) for name in model.model_fields_set}
    values = {name: getattr(model, name) for name in type(model).model_fields}
    widths = {name: value for name, value in values.items() if name.startswith("d_") and isinstance(value, int)}

    def sized(d_model: int) -> ModelSettings:
        others = {name: max(2, 2 * round(value * d_model / model.d_model / 2)) for name, value in widths.items()}
        return type(model)(**{**given, **others, "d_model": d_model})

    def count(d_model: int) -> Any:
        try:
            return parameters_of(sized(d_model), n_src=n_src, n_tgt=n_tgt)
        except ValidationError:  # wider than allowed
            return math.inf

    sizes = range(model.width_step, WIDEST + 1, model.width_step)
    place = bisect_left(sizes, n_parameters, key=count)
    best = min(sizes[max(0, place - 1) : place + 1], key=lambda d_model: abs(count(d_model) - n_parameters))
    if abs(count(best) - n_parameters) > TOLERANCE * n_parameters:
        raise SettingsError(
            f"budget params = {n_parameters}: the nearest size of this model has {count(best):,} parameters (d_model "
            f"{best}); give another number, fewer heads or a smaller vocabulary"
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
