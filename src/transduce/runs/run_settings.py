"""The settings of a run folder: versions of their format, upgrades, and what may differ when a run is resumed.

Every manifest contains `FORMAT`. Raise it when an earlier version of transduce could not read, or would misread, what
this one writes, and add a function to `UPGRADES` that turns settings of the previous format into those of the new one.
A new setting with a default needs neither; a renamed or removed one needs both. Add a folder of the previous version to
tests/kept, where it must keep loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transduce
from transduce.config import Settings
from transduce.config.model import MODEL_SETTINGS, kinds_for
from transduce.errors import RunFolderError

CHANGEABLE = (
    *("name", "data.root", "training.keep_checkpoints", "training.save_updates"),
    *("training.on_bad_loss", "training.max_rollbacks", "training.explosion"),
)
"""Settings that do not affect what is computed: a command with other values resumes the same run, with the new values.

`training.micro_batch_tokens` and `training.device` are not among them: another order of summation rounds differently.
"""


def _one_section_per_architecture(values: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had all settings of all architectures in one section, and "transformer" where no kind was asked for."""
    model = values.get("model")
    if not isinstance(model, dict):
        return values
    kinds = kinds_for(str(values.get("task")))
    kind = str(model.get("kind", "transformer"))
    if kinds and kind not in kinds:
        kind = kinds[0]
    known = {key for section in MODEL_SETTINGS.values() for key in section.model_fields}
    here = MODEL_SETTINGS[kind].model_fields.keys() if kind in MODEL_SETTINGS else known
    kept = {key: value for key, value in model.items() if key in here or key not in known}
    return {**values, "model": {**kept, "kind": kind}}


def _window_is_a_pattern(values: dict[str, Any]) -> dict[str, Any]:
    """Format 2 had no patterns: a window was that of the decoder."""
    model = values.get("model")
    if not isinstance(model, dict) or model.get("window") is None:
        return values
    return {**values, "model": {**model, "decoder_pattern": "local"}}


def _readouts_were_not_scaled(values: dict[str, Any]) -> dict[str, Any]:
    """Format 3 had no factor of recurrent readouts."""
    model = values.get("model")
    if not isinstance(model, dict) or model.get("kind") != "rnn" or model.get("attention") == "bahdanau":
        return values
    return {**values, "model": {**model, "readout_scale": 1.0}}


FORMAT = 4
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: dict[int, Upgrade] = {
    1: _one_section_per_architecture,
    2: _window_is_a_pattern,
    3: _readouts_were_not_scaled,
}
"""By the format that each starts from: nested settings to those of the next format."""


def check_format(found: Any, path: Path) -> int:
    """The format in the manifest at `path`, if this version can read it; otherwise a `RunFolderError`."""
    oldest = min(UPGRADES, default=FORMAT)
    if type(found) is int and oldest <= found <= FORMAT:
        return found
    is_newer = type(found) is int and found > FORMAT
    advice = "a newer version made it: install a newer transduce" if is_newer else "use the version that made it"
    version = transduce.__version__
    raise RunFolderError(
        f"{path} has format {found!r}, and transduce {version} reads formats {oldest} to {FORMAT}; {advice}"
    )


def upgraded(values: Mapping[str, Any], found: int) -> Mapping[str, Any]:
    """Nested settings of format `found`, upgraded to the current format."""
    for number in range(found, FORMAT):  # may be malformed: reading the settings reports what is wrong
        values = UPGRADES[number](dict(values))
    return values


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
    return {name: value for name, value in _leaves(settings.model_dump(mode="json")) if name not in CHANGEABLE}


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
