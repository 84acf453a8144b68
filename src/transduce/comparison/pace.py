"""From a time limit to numbers of updates, by the speed of each recipe.

A machine that several people use may be twice as fast in one hour as in the next. So the speeds of all recipes are
measured in turns, before the first training, and each training gets a number of updates.
"""

from __future__ import annotations

import gc
import hashlib
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transduce.comparison.text import QUIET, SharedText
from transduce.config import Settings, resolved, to_toml
from transduce.doctor.trial import Rehearsal
from transduce.evaluation.speed import in_turns
from transduce.logging import Log
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared
from transduce.training.feed import Position

RECORD = "pace.json"
WARM, TIMED = 3, 12  # updates in a round


def with_updates(recipes: Mapping[str, Settings], run: Path, text: SharedText, log: Log) -> dict[str, Settings]:
    """The recipes with a number of updates in place of a time limit; without one, as they are.

    The speeds are stored in the folder of the comparison. Those of recipes that are added later are measured together
    with the first recipe, and multiplied by the change of its speed.
    """
    first = next(iter(recipes))
    minutes = recipes[first].training.max_minutes
    if minutes is None:
        return dict(recipes)
    digests = {name: hashlib.sha256(to_toml(settings).encode()).hexdigest() for name, settings in recipes.items()}
    known: dict[str, Any] = read_json(run / RECORD) if (run / RECORD).exists() else {}
    missing = [name for name, digest in digests.items() if digest not in known]
    if missing:
        measured = _seconds(recipes, {first, *missing}, text, log)
        change = known[digests[first]]["seconds"] / measured[first] if first not in missing else 1.0
        known |= {digests[name]: {"recipe": name, "seconds": change * measured[name]} for name in missing}
        write_json(run / RECORD, known)
    found = {}
    for name, settings in recipes.items():
        with expecting(run / RECORD):
            seconds = float(known[digests[name]]["seconds"])
        n = max(1, int(60 * minutes / seconds))
        most = settings.training.max_updates
        found[name] = settings.with_values(
            "training", max_minutes=None, max_updates=n if most is None else min(n, most)
        )
        log.say(f"{name}: {minutes:g} minutes are {n:,} updates of {seconds:.3g} s, validations included")
    return found


def _seconds(recipes: Mapping[str, Settings], names: Collection[str], text: SharedText, log: Log) -> dict[str, float]:
    """Seconds per update of each recipe, with its share of a validation."""
    with tempfile.TemporaryDirectory(prefix="transduce-pace-") as temporary, ExitStack() as stack:
        folders = {
            name: stack.enter_context(RunFolder.create(Path(temporary) / name, text.resolved(settings), ""))
            for name, settings in recipes.items()
            if name in names
        }
        first = next(iter(folders.values()))
        prepared = text.task.encode(first, text.texts, text.tokenizers, first.settings, QUIET)
        return in_turns({name: partial(_measured, folder, prepared) for name, folder in folders.items()}, log)


def _measured(folder: RunFolder, prepared: Prepared[Any]) -> float:
    gc.collect()  # the model before
    rehearsal, settings = Rehearsal(folder, prepared=prepared), folder.settings
    feeds = rehearsal.feeder(settings).feeds(Position())
    took = [rehearsal.update(next(feeds)) for _ in range(WARM + TIMED)][WARM:]
    *_, (loss, judge) = rehearsal.validation(math.inf)
    return statistics.fmean(took) + (loss + judge) / resolved(settings.training.valid_updates, "training.valid_updates")
