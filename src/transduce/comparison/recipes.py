"""The recipes of a comparison, with the settings that all of them share: those of the first."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transduce.config.recipe import apply_overrides, read_recipe
from transduce.config.settings import Settings, TrainingSettings
from transduce.errors import SettingsError

SHARED = "shared"  # the folder for what all recipes have in common
SECTIONS = ("data", "tokenizer", "decoding", "evaluation")
LIMITS = ("max_updates", "max_epochs", "max_minutes")
TRAINING = ("seed", "batch_tokens", "precision", "device", "valid_updates", "valid_bleu_sentences", *LIMITS)
"""Settings of `training` that all recipes share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of each training: `minutes` or `updates`. Without any, the recipes' limits.

    `params`: the approximate number of parameters of each model; see `conditions.scale`.
    """

    minutes: float | None = None
    updates: int | None = None
    params: int | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and self.updates is not None:
            raise SettingsError("budget = minutes and updates: a training has one limit; give one of them")
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise SettingsError(f"budget {name} = {value}: must be above 0")

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of `training` that the budget sets; none if it sets none."""
        limits = {"max_updates": self.updates, "max_minutes": self.minutes}
        return {key: value for key, value in limits.items() if value is not None}

    def describe(self, training: TrainingSettings) -> str:
        """For people; `training`: the settings that all trainings share, with their limits."""
        limits: dict[str, Any] = {name.removeprefix("max_"): getattr(training, name) for name in LIMITS}
        limit = " or ".join(f"{value:,.12g} {unit}" for unit, value in limits.items() if value is not None)
        return limit if self.params is None else f"{limit}, about {self.params:,} parameters (widths scaled)"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as given: nested values, and the folder that its paths are relative to."""

    name: str
    values: dict[str, Any]
    folder: Path = Path()

    def settings(self) -> Settings:
        """The settings, with absolute paths."""
        return Settings.from_mapping(self.values, origin=self.name).resolve_paths(self.folder)

    def section(self, name: str) -> Mapping[str, Any]:
        """A section as given; empty if there is none."""
        content = self.values.get(name, {})
        if not isinstance(content, Mapping):
            raise SettingsError(f"{self.name}: '{name}' must be a section, [{name}]")
        return content

    def with_limits(self, limits: Mapping[str, Any]) -> Recipe:
        """The recipe, with its limits of the training replaced by these."""
        own = {key: value for key, value in self.section("training").items() if key not in LIMITS}
        return replace(self, values={**self.values, "training": {**own, **limits}})


def read_recipes(
    given: Sequence[str | Path] | Mapping[str, Mapping[str, Any]],
    *,
    data: Path | None = None,
    overrides: Sequence[str] = (),
) -> list[Recipe]:
    """Read recipe files, which are named like their files, or take nested values by name.

    `data` and `overrides` apply to all of them.
    """
    if isinstance(given, Mapping):
        recipes = [Recipe(name, copy.deepcopy(dict(values))) for name, values in given.items()]
    else:
        recipes = [Recipe(Path(path).stem, read_recipe(Path(path)), Path(path).parent) for path in given]
    for recipe in recipes:
        if recipe.name in ("", ".", "..", SHARED) or Path(recipe.name).name != recipe.name:
            raise SettingsError(f"recipe '{recipe.name}': its name becomes that of a folder; rename the recipe")
        if [one.name for one in recipes].count(recipe.name) > 1:
            raise SettingsError(f"several recipes are called '{recipe.name}'; rename all but one of the files")
        apply_overrides(recipe.values, overrides)
        section = recipe.values.setdefault("data", {})
        if data is not None and isinstance(section, dict):
            section["root"] = str(data.absolute())
    return recipes


def with_shared_conditions(recipes: Sequence[Recipe], budget: Budget) -> dict[str, Settings]:
    """The settings of each recipe by its name, with the shared settings of the first.

    Another recipe may leave the shared settings out or repeat them; a `SettingsError` names one that differs. A budget
    replaces the limits of all recipes.
    """
    if not recipes:
        raise SettingsError("no recipe to compare; name at least one")
    if budget.limits:
        recipes = [recipe.with_limits(budget.limits) for recipe in recipes]
    first, base = recipes[0], recipes[0].settings()
    shared = base.model_dump(mode="json", exclude_unset=True)
    shared["training"] = {key: value for key, value in shared.get("training", {}).items() if key in TRAINING}
    found = {}
    for recipe in recipes:
        merged = {name: {**shared.get(name, {}), **recipe.section(name)} for name in (*SECTIONS, "training")}
        values = {"task": base.task, "name": recipe.name, **recipe.values, **merged}
        settings = replace(recipe, values=values).settings()
        _check_shared(recipe.name, settings, first.name, base)
        if settings.training.start is not None:
            raise SettingsError(f"{recipe.name}: training.start is set; a comparison trains from scratch: leave it out")
        found[recipe.name] = settings
    return found


def _check_shared(name: str, settings: Settings, first: str, base: Settings) -> None:
    """Raise for a shared setting in which a recipe differs from the first one."""
    pairs = [("task", settings.task, base.task)]
    for section in (*SECTIONS, "training"):
        ours, theirs = getattr(settings, section), getattr(base, section)
        keys = TRAINING if section == "training" else type(ours).model_fields
        pairs += [(f"{section}.{key}", getattr(ours, key), getattr(theirs, key)) for key in keys if key != "root"]
    for key, ours, theirs in pairs:
        if ours != theirs:
            hint = " (or give a budget, which replaces it)" if key.removeprefix("training.") in LIMITS else ""
            raise SettingsError(
                f"{name}: {key} is {_format_value(ours)}, and {_format_value(theirs)} in {first}; all recipes of a "
                f"comparison share it: leave it out{hint}"
            )


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    return "unset" if value is None else str(value)


@contextmanager
def naming(recipe: str) -> Iterator[None]:
    """Begin the message of a `SettingsError` with the name of the recipe."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{recipe}: {error}") from None
