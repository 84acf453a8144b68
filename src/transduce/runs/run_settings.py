"""The settings of a run folder: read, upgraded from older formats, and compared with those of a new command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from transduce.config import Settings
from transduce.errors import RunFolderError, SettingsError
from transduce.runs.atomic import MOST_SETTINGS, read_json
from transduce.runs.format_version import upgraded
from transduce.runs.manifest import Manifest

CHANGEABLE = (
    *("name", "data.root", "training.keep_checkpoints", "training.save_updates"),
    *("training.on_bad_loss", "training.max_rollbacks", "training.explosion"),
)
"""Settings that do not affect what is computed: a command with other values resumes the same run, with the new values.

`training.micro_batch_tokens` and `training.device` are not among them: another order of summation rounds differently.
"""


def asked_settings(manifest: Manifest) -> Settings:
    """The settings that the run was asked for with. Raises `RunFolderError`."""
    return _validated(manifest.asked, manifest)


def read_settings(manifest: Manifest) -> Settings:
    """The resolved settings of a run, checked; changeable ones as they were asked for last. Raises `RunFolderError`."""
    path = manifest.folder / "config.json"
    if path.name not in manifest.files:
        raise RunFolderError(f"{manifest.folder} has no {path.name} yet: its training has not got that far")
    manifest.check(path.name)
    found = upgraded(read_json(path, most=MOST_SETTINGS), manifest.config_format)
    return with_changeable(_validated(found, manifest), asked_settings(manifest))


def with_changeable(settings: Settings, other: Settings) -> Settings:
    """`settings` with the changeable ones of `other`."""
    values, source = settings.model_dump(mode="json"), other.model_dump(mode="json")
    for name in CHANGEABLE:
        *sections, key = name.split(".")
        here, there = values, source
        for section in sections:
            here, there = here[section], there[section]
        here[key] = there[key]
    return Settings.from_mapping(values)


def difference(there: Settings, asked: Settings) -> str:
    """Name and both values of the first setting that makes `asked` another run; empty if it is the same run."""
    a, b = (dict(_leaves(settings.model_dump(mode="json"))) for settings in (there, asked))
    for name in a | b:
        if name not in CHANGEABLE and a.get(name) != b.get(name):
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


def _validated(values: Mapping[str, Any], manifest: Manifest) -> Settings:
    try:
        return Settings.from_mapping(values, origin=str(manifest.folder))
    except SettingsError as error:
        raise RunFolderError(f"{error}; the run was made by another version of transduce") from error
