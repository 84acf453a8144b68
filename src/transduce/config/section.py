"""Base of all settings: frozen sections, bounds on values, and one-line explanations of invalid ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from transduce.errors import SettingsError, nearest

MAX_BEAM = 512
MAX_PENALTY = 10.0
MAX_TOKENS = 1_000_000
MAX_BATCH = 1 << 31
MAX_SEED = (1 << 63) - 1
MAX_STEPS = 1 << 40
MAX_VOCAB = 1 << 24

ValueT = TypeVar("ValueT")


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def resolved(value: ValueT | None, name: str) -> ValueT:
    """The value of the setting `name` after `transduce.tasks.resolve`. Raises `SettingsError` if it is unset."""
    if value is None:
        raise SettingsError(f"{name} is unset: these are not the settings of a trained run; set it")
    return value


def explain(error: ValidationError, root: type[Section]) -> str:
    """The first problem of a validation of `root`, in one line."""
    first = error.errors()[0]
    sections, location = _locate(root, first["loc"])
    name, given = ".".join(map(str, location)), first["input"]
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        return f"unknown key '{name}'{_suggestion(root, parents, str(key), given)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{name} = {given!r}: a section, not a value; its keys: {', '.join(_keys(sections))}"
    if first["type"] == "union_tag_invalid":
        kinds = list(map(_kind, sections))
        return f"{name}.kind = {given['kind']!r}{nearest(str(given['kind']), kinds)}; allowed: {', '.join(kinds)}"
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    shown = "" if isinstance(given, dict) else f" = {given!r}"
    names = re.findall("'(.*?)'", first["msg"]) if first["type"] == "literal_error" else ()
    return f"{name}{shown}: {message[:1].lower()}{message[1:]}{nearest(str(given), names)}"


def _locate(root: type[Section], location: Sequence[str | int]) -> tuple[list[type[Section]], list[str | int]]:
    """The section classes that settings at pydantic's `location` may have, and the location as a recipe has it.

    There are several classes where the section is a union, and none for a value. The name of a union member selects it;
    no recipe contains that name.
    """
    found, names = [root], []
    for part in location:
        if len(found) > 1 and part in [_kind(section) for section in found]:
            found = [section for section in found if _kind(section) == part]
            continue
        names.append(part)
        if fields := [section.model_fields[part] for section in found if part in section.model_fields]:
            found = [member for field in fields for member in _members(field.annotation)]
    return found, names


def _suggestion(root: type[Section], parents: Sequence[str | int], key: str, value: Any) -> str:
    """A suggestion for an unknown key: the same key of another section, or the nearest key of this one."""
    siblings = _locate(root, parents[:-1])[0]
    if len(siblings) > 1 and (others := [_kind(section) for section in siblings if key in section.model_fields]):
        return f" for {parents[0]}.kind = '{parents[-1]}'; it applies to {', '.join(others)}"
    here = _keys(_locate(root, parents)[0])
    if isinstance(value, Mapping):  # meant as a section
        here = [name for name in here if _locate(root, [name])[0]] if not parents else here
    elif not any(isinstance(part, int) for part in parents) and (  # keys of a list's items are in no other section
        elsewhere := [f"{name}.{key}" for name in root.model_fields if key in _keys(_locate(root, [name])[0])]
    ):
        return "; did you mean " + " or ".join(f"'{name}'" for name in elsewhere) + "?"
    return nearest(key, here) or "; known: " + ", ".join(here)


def _kind(section: type[Section]) -> str:
    """The name of a member of a union."""
    return str(section.model_fields["kind"].default)


def _members(annotation: Any) -> list[type[Section]]:
    """The section classes in an annotation such as `tuple[Corpus, ...]` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [member for inner in get_args(annotation) for member in _members(inner)]


def _keys(sections: Sequence[type[Section]]) -> list[str]:
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))
