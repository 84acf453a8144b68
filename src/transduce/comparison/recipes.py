"""The recipes of a comparison, and the conditions that all of them share."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from transduce.config import Settings, TrainingSettings, apply_overrides, read_recipe
from transduce.errors import SettingsError, nearest

SHARED = "shared"  # the folder for what all recipes have in common
SECTIONS = ("data", "tokenizer", "decoding", "evaluation")
LIMITS = ("max_updates", "max_epochs", "max_minutes")
TRAINING = ("seed", "batch_tokens", "precision", "device", "valid_updates", "valid_bleu_sentences", *LIMITS)
"""Settings of `training` that all recipes share."""
_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What each training may use: at most one of `minutes`, `updates` and `tokens`. Without any, the recipes' limits.

    `tokens`: of the training text on the longer side, padding included, as `training.batch_tokens` counts them.
    `params`: the approximate number of parameters of each model; see `sizes.scale`.
    """

    minutes: float | None = None
    updates: int | None = None
    tokens: int | None = None
    params: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("minutes", "updates", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise SettingsError(f"--budget {' and '.join(given)}: a training has one limit; give one of them")
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise SettingsError(f"--budget {name}={value}: must be above 0")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Budget:
        """Read `minutes=10`, `updates=2000`, `tokens=20M`, `params=2.6M`, or several of them with commas."""
        found: dict[str, Any] = {}
        for text in (part for given in texts for part in given.split(",")):
            name, _, number = (side.strip() for side in text.partition("="))
            if name not in cls.__slots__:
                hint = nearest(name, cls.__slots__)
                raise SettingsError(
                    f"--budget '{text}'{hint}; allowed: minutes=10, updates=2000, tokens=20M, params=2.6M"
                )
            factor = _UNITS.get(number[-1:], 1)
            digits = number[:-1] if factor > 1 else number
            if not re.fullmatch(r"\d+(\.\d*)?(e\d{1,2})?", digits):
                raise SettingsError(f"--budget {text}: '{number}' is not a number such as 10, 2000 or 2.6M")
            if name in found:
                raise SettingsError(f"--budget {text}: {name} is given twice")
            value = Decimal(digits) * factor
            if name != "minutes" and value != value.to_integral_value():
                raise SettingsError(f"--budget {text}: {name} must be a whole number")
            found[name] = float(value) if name == "minutes" else int(value)
        return cls(**found)

    def limits(self, batch_tokens: int | None) -> dict[str, Any]:
        """The limits of `training` that the budget sets; none if it sets none."""
        if self.tokens is not None:
            if batch_tokens is None:
                raise SettingsError("--budget tokens: training.batch_tokens is unset in the first recipe; set it")
            return {"max_updates": math.ceil(self.tokens / batch_tokens)}
        limits = {"max_updates": self.updates, "max_minutes": self.minutes}
        return {key: value for key, value in limits.items() if value is not None}

    def describe(self, training: TrainingSettings) -> str:
        """For people; `training`: the settings that all trainings share, with their limits."""
        limits = (
            {"tokens": self.tokens}
            if self.tokens is not None
            else {name.removeprefix("max_"): getattr(training, name) for name in LIMITS}
        )
        limit = " or ".join(f"{value:,.12g} {unit}" for unit, value in limits.items() if value is not None)
        return limit if self.params is None else f"{limit}, about {self.params:,} parameters (widths scaled)"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe as given: nested values, and the folder that its paths are relative to."""

    name: str
    values: dict[str, Any]
    folder: Path = Path()


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
    first = recipes[0]
    base = _settings(first)
    if limits := budget.limits(base.training.batch_tokens):
        recipes = [_with_limits(recipe, limits) for recipe in recipes]
        first, base = recipes[0], _settings(recipes[0])
    shared = base.model_dump(mode="json", exclude_unset=True)
    shared = {section: shared.get(section, {}) for section in SECTIONS} | {
        "training": {key: value for key, value in shared.get("training", {}).items() if key in TRAINING}
    }
    found = {}
    for recipe in recipes:
        own = {section: _section(recipe, section) for section in (*SECTIONS, "training")}
        merged = {section: {**shared[section], **own[section]} for section in own}
        values = {"task": base.task, "name": recipe.name, **recipe.values, **merged}
        mixed = _settings(replace(recipe, values=values))
        _check_shared(recipe.name, mixed, first.name, base)
        if mixed.training.start is not None:
            raise SettingsError(f"{recipe.name}: training.start is set; a comparison trains from scratch: leave it out")
        found[recipe.name] = mixed
    return found


def _settings(recipe: Recipe) -> Settings:
    return Settings.from_mapping(recipe.values, origin=recipe.name).resolve_paths(recipe.folder)


@contextmanager
def naming(recipe: str) -> Iterator[None]:
    """Begin the message of a `SettingsError` with the name of the recipe."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{recipe}: {error}") from None


def _section(recipe: Recipe, name: str) -> Mapping[str, Any]:
    content = recipe.values.get(name, {})
    if not isinstance(content, Mapping):
        raise SettingsError(f"{recipe.name}: '{name}' must be a section, [{name}]")
    return content


def _check_shared(name: str, settings: Settings, first: str, base: Settings) -> None:
    """Raise for a shared setting in which a recipe differs from the first one."""
    pairs = [("task", settings.task, base.task)]
    for section in (*SECTIONS, "training"):
        ours, theirs = getattr(settings, section), getattr(base, section)
        keys = TRAINING if section == "training" else type(ours).model_fields
        pairs += [
            (f"{section}.{key}", getattr(ours, key), getattr(theirs, key))
            for key in keys
            if (section, key) != ("data", "root")
        ]
    for key, ours, theirs in pairs:
        if ours != theirs:
            hint = " (or give --budget, which replaces it)" if key.removeprefix("training.") in LIMITS else ""
            raise SettingsError(
                f"{name}: {key} is {_shown(ours)}, and {_shown(theirs)} in {first}; all recipes of a comparison share "
                f"it: leave it out{hint}"
            )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return "unset" if value is None else str(value)


def _with_limits(recipe: Recipe, limits: Mapping[str, Any]) -> Recipe:
    own = {key: value for key, value in _section(recipe, "training").items() if key not in LIMITS}
    return replace(recipe, values={**recipe.values, "training": {**own, **limits}})
