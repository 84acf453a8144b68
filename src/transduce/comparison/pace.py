"""From a time limit to numbers of updates, by the speed of each recipe.

A machine that several people use may be twice as fast in one hour as in the next. So the speeds of all recipes are
measured in turns, before the first training, and each training gets a number of updates.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transduce.comparison.shared import Shared
from transduce.config import Settings, resolved
from transduce.doctor.trial import Rehearsal
from transduce.errors import RunFolderError
from transduce.evaluation.speed import in_turns
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.identity import identity
from transduce.tasks.base import Prepared
from transduce.training.feed import Position

PACE_FILE = "pace.json"
WARM_UPDATES, TIMED_UPDATES = 3, 12  # in a round


def with_updates(
    recipes: Mapping[str, Settings], run: Path, shared: Shared, log: Log
) -> tuple[dict[str, Settings], dict[str, float]]:
    """The recipes with a number of updates in place of a time limit, and the seconds per update of each.

    The speeds are stored in the folder of the comparison. Those of recipes that are added later are measured together
    with the first recipe, and multiplied by the change of its speed.
    """
    first, minutes = next(iter(recipes)), resolved(shared.settings.training.max_minutes, "training.max_minutes")
    digests = {name: _digest(settings) for name, settings in recipes.items()}
    try:
        with expecting(run / PACE_FILE):
            stored = read_json(run / PACE_FILE) if (run / PACE_FILE).exists() else {}
            known = {digest: (str(one["recipe"]), _positive(one["seconds"])) for digest, one in stored.items()}
    except RunFolderError as error:
        raise RunFolderError(f"{error}; restore it, or begin the comparison anew in another folder") from None
    if missing := [name for name, digest in digests.items() if digest not in known]:
        measured = _seconds(recipes, {first, *missing}, shared, log)
        change = known[digests[first]][1] / measured[first] if first not in missing else 1.0
        known |= {digests[name]: (name, change * measured[name]) for name in missing}
        write_json(run / PACE_FILE, {key: {"recipe": name, "seconds": value} for key, (name, value) in known.items()})
    found, pace = {}, {name: known[digest][1] for name, digest in digests.items()}
    for name, settings in recipes.items():
        seconds = pace[name]
        limits = (int(60 * minutes / seconds), settings.training.max_updates or math.inf)
        n = max(1, int(min(limits)))
        found[name] = settings.with_values("training", max_minutes=None, max_updates=n)
        log.say(f"{name}: {minutes:g} minutes are {n:,} updates of {seconds:.3g} s, validations included")
    return found, pace


def _positive(value: Any) -> float:
    """Raise a `ValueError` for what cannot be a time."""
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{value} seconds per update")
    return float(value)


def _digest(settings: Settings) -> str:
    """Of the model and its training: a recipe with other values is measured anew."""
    own = {name: value for name, value in identity(settings).items() if name.startswith(("model.", "training."))}
    return hashlib.sha256(json.dumps(own).encode()).hexdigest()


def _seconds(recipes: Mapping[str, Settings], names: Collection[str], shared: Shared, log: Log) -> dict[str, float]:
    """Seconds per update of each recipe, with its share of a validation."""
    with tempfile.TemporaryDirectory(prefix="transduce-pace-") as temporary, ExitStack() as stack:
        folders = {
            name: stack.enter_context(RunFolder.create(Path(temporary) / name, shared.resolved(settings), ""))
            for name, settings in recipes.items()
            if name in names
        }
        return in_turns({name: partial(_measured, folder, shared.prepared) for name, folder in folders.items()}, log)


def _measured(folder: RunFolder, prepared: Prepared[Any]) -> float:
    gc.collect()  # the model before
    rehearsal, settings = Rehearsal(folder, prepared=prepared), folder.settings
    feeds = rehearsal.feeder(settings).feeds(Position())
    took = [rehearsal.update(next(feeds)) for _ in range(WARM_UPDATES + TIMED_UPDATES)][WARM_UPDATES:]
    short = settings.with_values("decoding", max_length=min(30, settings.decoding.max_length))  # it may find no end yet
    validator = rehearsal.task.validator(rehearsal.model, rehearsal.prepared, short, rehearsal.device)
    began = time.perf_counter()
    validator()
    validation = time.perf_counter() - began
    return statistics.fmean(took) + validation / resolved(settings.training.valid_updates, "training.valid_updates")
