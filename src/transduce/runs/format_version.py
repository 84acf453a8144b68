"""Versions of the run folder's format, and upgrades of the settings in older folders.

Every manifest contains `FORMAT`. Raise it when an earlier version of transduce could not read, or would misread, what
this one writes, and add a function to `UPGRADES` that turns settings of the previous format into those of the new one.
A new setting with a default needs neither; a renamed or removed one needs both. Add a folder of the previous version to
tests/kept, where it must keep loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transduce
from transduce.config.model import MODEL_SETTINGS, kinds_for
from transduce.errors import RunFolderError


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


FORMAT = 2
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: dict[int, Upgrade] = {1: _one_section_per_architecture}
"""By the format that each starts from: nested settings to those of the next format."""


def check_format(found: Any, path: Path) -> int:
    """The format in the manifest at `path`, if this version can read it; otherwise a `RunFolderError`."""
    oldest = min(UPGRADES, default=FORMAT)
    if isinstance(found, bool) or not isinstance(found, int) or found < oldest:
        raise RunFolderError(
            f"{path} has format {found!r}, and transduce {transduce.__version__} reads formats {oldest} to {FORMAT}; "
            "use the version that made it"
        )
    if found > FORMAT:
        raise RunFolderError(
            f"{path} was made by a newer version of transduce: it has format {found}, and this version, "
            f"{transduce.__version__}, reads formats up to {FORMAT}; install a newer transduce to use it"
        )
    return found


def upgraded(values: Mapping[str, Any], found: int) -> Mapping[str, Any]:
    """Nested settings of format `found`, upgraded to the current format."""
    result = values  # may be malformed: reading the settings reports what is wrong
    for number in range(found, FORMAT):
        result = UPGRADES[number](dict(result))
    return result
