"""Recipes: read TOML, apply overrides, write settings as TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from transduce.errors import SettingsError

MAX_EXTENDS = 8
"""Maximum number of recipes that a recipe may extend, directly and indirectly."""


def read_recipe(path: Path, *, depth: int = 0) -> dict[str, Any]:
    """Read the nested values of a TOML file, without validation. Raises `SettingsError` if it cannot be read.

    The top-level key `extends` names a base recipe, relative to this one; values of this recipe replace values of the
    base. `depth`: number of recipes that led here by `extends`.
    """
    try:
        if path.is_dir():
            raise SettingsError(f"recipe {path} is not a file; name a .toml file, such as recipe.toml in a run folder")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read recipe {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, nested too deeply, an impossible date
        raise SettingsError(f"recipe {path} is not valid TOML: {error}") from None
    other = values.pop("extends", None)
    if other is None:
        return values
    if not isinstance(other, str) or depth == MAX_EXTENDS:
        limit = f"name a recipe file; at most {MAX_EXTENDS} can extend each other"
        raise SettingsError(f"recipe {path}: extends = {other!r}: {limit}")
    merged = read_recipe(path.parent / other, depth=depth + 1)
    for key, own in values.items():
        base = merged.get(key)
        merged[key] = {**base, **own} if isinstance(base, dict) and isinstance(own, dict) else own
    return merged


def apply_overrides(values: dict[str, Any], overrides: Iterable[str] | None) -> None:
    """Write each override `a.b=value` into nested `values`. A value that is not TOML is a string."""
    for override in overrides or ():
        key, sign, text = override.partition("=")
        if not sign or not key.strip():
            raise SettingsError(f"override {override!r}: expected key=value, as in training.lr=0.001", "override")
        try:
            value = tomllib.loads(f"x = {text}")["x"]
        except (ValueError, RecursionError):
            value = text.strip()
        section, (*path, last) = values, key.strip().split(".")
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise SettingsError(f"override {override!r}: '{part}' is not a section", "override")
        section[last] = value


def to_toml(settings: BaseModel) -> str:
    values = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in top.items()]
    for section, content in values.items():
        if isinstance(content, dict) and content:
            lines += ["", f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in content.items())]
    return "\n".join(lines).strip() + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
