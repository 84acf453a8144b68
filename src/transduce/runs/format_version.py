"""Formats of a run folder: what earlier ones looked like, and how their settings are read today.

`FORMAT` is written into every manifest. It rises when an earlier version of transduce could not read what a later one
writes, or would read it wrongly; and with it `UPGRADES` gets a line: how settings of the format before become those of
the next. A setting that is new and has a default needs neither; one that is renamed or gone needs both, and the folder
of the version before comes into tests/kept, where it stays and must go on loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transduce
from transduce.errors import RunFolderError

FORMAT = 1
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
UPGRADES: dict[int, Upgrade] = {}
"""By the format that they start from: nested settings to those of the next format."""


def check_format(found: Any, path: Path) -> int:
    """The format of a manifest at `path`, if this version can read it; a `RunFolderError` says what to do otherwise."""
    oldest = min(UPGRADES, default=FORMAT)
    if isinstance(found, bool) or not isinstance(found, int) or found < oldest:
        raise RunFolderError(
            f"{path} is of format {found!r}, and this is transduce {transduce.__version__}, which reads {oldest} to "
            f"{FORMAT}; the version that made it reads it"
        )
    if found > FORMAT:
        raise RunFolderError(
            f"{path} was made by a newer version of transduce: it is of format {found}, and this one, "
            f"{transduce.__version__}, reads up to {FORMAT}; install a newer transduce to use it"
        )
    return found


def upgraded(values: Mapping[str, Any], found: int) -> Mapping[str, Any]:
    """Nested settings of format `found` as they are called today."""
    result = values  # of any form: whoever reads the settings says what is wrong
    for number in range(found, FORMAT):
        result = UPGRADES[number](dict(result))
    return result
