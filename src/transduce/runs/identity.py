"""Settings that decide whether two runs are the same. `RunFolder.model_digest` is that of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from transduce.config.settings import Settings

CHANGEABLE = (
    "name",
    "data.root",
    "data.workers",
    "training.keep_checkpoints",
    "training.save_updates",
    "training.timeout",
    "training.track",
)
"""Settings that do not affect what is computed: a command with other values resumes the same run, with the new values.

`training.micro_batch_tokens` and `training.device` are not among them: another order of summation rounds differently.
"""


def with_changeable(settings: Settings, other: Settings) -> Settings:
    """`settings` with the changeable ones of `other`."""
    values, source = settings.model_dump(mode="json"), other.model_dump(mode="json")
    for name in CHANGEABLE:
        section, _, key = name.rpartition(".")
        here, there = (nested[section] if section else nested for nested in (values, source))
        here[key] = there[key]
    return Settings.from_mapping(values)


def identity(settings: Settings) -> dict[str, Any]:
    """The settings that make two runs the same one, by dotted name."""
    return {
        name: value
        for name, value in settings_by_name(settings)
        if not any(name == one or name.startswith(f"{one}.") for one in CHANGEABLE)
    }


def settings_by_name(settings: Settings) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all settings."""
    return _leaves(settings.model_dump(mode="json"))


def difference(there: Settings, asked: Settings) -> str:
    """Name and both values of the first setting that makes `asked` another run; empty if it is the same run."""
    a, b = identity(there), identity(asked)
    for name in a | b:
        if a.get(name) != b.get(name):
            values = (json.dumps(leaves.get(name), ensure_ascii=False) for leaves in (a, b))
            was, now = ("unset" if value == "null" else value for value in values)
            return f"{name} is {was} in the folder and {now} here"
    return ""


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything in nested settings, in order."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if children is None:
        yield name, value
        return
    for key, child in children:
        yield from _leaves(child, f"{name}.{key}" if name else str(key))
