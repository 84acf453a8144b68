"""Recipes: read TOML, apply overrides, write settings as TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from transduce.errors import SettingsError

MAX_RECIPE = 1 << 20
"""Size limit of a recipe in bytes: 1 MiB."""
MAX_EXTENDS = 8
"""Recipes that a recipe may extend, directly and indirectly."""


def read_recipe(path: Path) -> dict[str, Any]:
    """The nested values of a TOML file, not validated; a `SettingsError` if it cannot be read.

    The top-level key `extends` names another recipe, relative to this one, whose values this one adds to or replaces.
    """
    found: dict[str, Any] = {}
    for depth in range(MAX_EXTENDS + 1):
        values = _read_toml(path)
        other = values.pop("extends", None)
        found = {
            **values,
            **{
                key: {**values[key], **own} if isinstance(own, dict) and isinstance(values.get(key), dict) else own
                for key, own in found.items()
            },
        }
        if other is None:
            return found
        if not isinstance(other, str) or depth == MAX_EXTENDS:
            limit = f"name a recipe file; at most {MAX_EXTENDS} can extend each other"
            raise SettingsError(f"recipe {path}: extends = {other!r}: {limit}")
        path = path.parent / other
    raise AssertionError("unreachable")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        if path.is_file() and path.stat().st_size > MAX_RECIPE:
            raise SettingsError(f"recipe {path} has {path.stat().st_size:,} bytes; the limit is {MAX_RECIPE:,}")
        if path.exists() and not path.is_file():
            raise SettingsError(f"recipe {path} is not a file; name a .toml file, such as recipe.toml in a run folder")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read recipe {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, nested too deeply, an impossible date
        raise SettingsError(f"recipe {path} is not valid TOML: {error}") from None


def apply_overrides(values: dict[str, Any], overrides: Iterable[str] | None) -> None:
    """Write each `a.b=value` into nested `values`; a value is TOML, or else a plain word. None: do nothing."""
    for override in overrides or ():
        _apply(values, override)


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise SettingsError(f"override {override!r}: expected key=value, as in training.lr=0.001")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        value = text.strip()
    *path, last = key.strip().split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise SettingsError(f"override {override!r}: '{part}' is not a section")
    values[last] = value


def to_toml(settings: BaseModel) -> str:
    lines: list[str] = []
    values = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    top = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines += [f"{key} = {_toml_value(value)}" for key, value in top.items()]
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
