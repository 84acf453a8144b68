"""What all settings share: frozen sections, bounds on values, and one-line explanations of invalid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from transduce.errors import nearest

MAX_BEAM = 512
MAX_PENALTY = 10.0
MAX_TOKENS = 1_000_000
MAX_BATCH = 1 << 31
MAX_SEED = (1 << 63) - 1
MAX_STEPS = 1 << 40
MAX_VOCAB = 1 << 24


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def sections_at(root: type[Section], location: Sequence[str | int]) -> list[type[Section]]:
    """The section classes that settings at `location` may have: several where the section is a union, none for a value.

    Names of union members, which pydantic puts into a location, are skipped.
    """
    found = [root]
    for part in location:
        fields = [section.model_fields[part] for section in found if part in section.model_fields]
        if fields:
            found = [member for field in fields for member in _members(field.annotation)]
    return found


def explain(error: ValidationError, root: type[Section]) -> str:
    """The first problem of a validation of `root`, in one line."""
    first = error.errors()[0]
    location = _without_tags(root, first["loc"])
    name, given = ".".join(map(str, location)), first["input"]
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        return f"unknown key '{name}'{_suggestion(root, parents, str(key), given)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        known = ", ".join(_keys(sections_at(root, location)))
        return f"{name} = {given!r}: a section, not a value; its keys: {known}"
    if first["type"] == "union_tag_invalid":
        tags = [section.model_fields["kind"].default for section in sections_at(root, location)]
        return f"{name}.kind = {given['kind']!r}{nearest(str(given['kind']), tags)}; allowed: {', '.join(tags)}"
    message = first["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(given, dict) else f" = {given!r}"
    return f"{name}{shown}: {message[:1].lower()}{message[1:]}"


def _suggestion(root: type[Section], parents: Sequence[str | int], key: str, value: Any) -> str:
    """What may have been meant by an unknown key: the same key of another section, or the nearest key of this one."""
    sections = sections_at(root, parents)
    if others := [section.model_fields["kind"].default for section in sections if key in section.model_fields]:
        return f" for {parents[0]}.kind = '{parents[-1]}'; it applies to {', '.join(others)}"
    here = _keys(_tagged(root, parents) or sections)
    if isinstance(value, Mapping):  # meant as a section
        here = [name for name in here if sections_at(root, [name])] if not parents else here
    elif elsewhere := [f"{name}.{key}" for name in root.model_fields if key in _keys(sections_at(root, [name]))]:
        return "; did you mean " + " or ".join(f"'{name}'" for name in elsewhere) + "?"
    return nearest(key, here) or "; known: " + ", ".join(here)


def _members(annotation: Any) -> list[type[Section]]:
    """The section classes in an annotation such as `tuple[Corpus, ...]` or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [member for inner in get_args(annotation) for member in _members(inner)]


def _keys(sections: Sequence[type[Section]]) -> list[str]:
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))


def _tagged(root: type[Section], location: Sequence[str | int]) -> list[type[Section]]:
    """The member of a union that the last part of a location names, if it does."""
    sections = sections_at(root, location[:-1]) if location else []
    return [s for s in sections if len(sections) > 1 and s.model_fields["kind"].default == location[-1]]


def _without_tags(root: type[Section], location: Sequence[str | int]) -> list[str | int]:
    """A location without the names of union members, which no recipe contains."""
    return [part for i, part in enumerate(location) if not _tagged(root, location[: i + 1])]
