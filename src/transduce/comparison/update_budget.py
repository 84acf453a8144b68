"""From a time limit to numbers of updates, by the speed of each recipe.

A machine that several people use may be twice as fast in one hour as in the next. So the speeds of all recipes are
measured in turns, before the first training, and each training gets a number of updates.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transduce.comparison.shared import Shared
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.doctor.trial import Rehearsal
from transduce.evaluation.speed import in_turns
from transduce.logging import Log
from transduce.runs.atomic import read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared
from transduce.training.feed import Position

FILE = "update_budget.json"  # in the folder of the comparison: seconds per update, by recipe
WARM_UPDATES, TIMED_UPDATES = 3, 12  # in a round
LONGEST = 30  # tokens of a translation in the measured validation


def with_update_budgets(recipes: Mapping[str, Settings], shared: Shared, log: Log) -> dict[str, Settings]:
    """Replace the time limit of each recipe by a number of updates.

    The seconds per update are recorded, so that a resumed training has the same limit. Recipes that are added later are
    measured together with the first recipe, and their seconds are multiplied by the change of its speed.
    """
    minutes = resolved(shared.settings.training.max_minutes, "training.max_minutes")
    first = next(iter(recipes))
    run, path = shared.path.parent, shared.path.with_name(FILE)
    seconds: dict[str, float] = read_json(path) if path.exists() else {}
    new = [name for name in recipes if name not in seconds or not (run / name).exists()]
    if new:
        measured = _measure({name: recipes[name] for name in dict.fromkeys([first, *new])}, shared, log)
        change = 1.0 if first in new else seconds[first] / measured[first]
        seconds |= {name: change * measured[name] for name in new}
        write_json(path, seconds)
    found = {}
    for name, settings in recipes.items():
        fitting = int(60 * minutes / seconds[name])
        n = max(1, min(fitting, settings.training.max_updates or fitting))
        found[name] = settings.with_values("training", max_minutes=None, max_updates=n)
        log.say(f"{name}: {minutes:g} minutes are {n:,} updates of {seconds[name]:.3g} s, validations included")
    return found


def _measure(recipes: Mapping[str, Settings], shared: Shared, log: Log) -> dict[str, float]:
    """Seconds per update of each recipe, with its share of a validation."""
    with tempfile.TemporaryDirectory(prefix="transduce-speed-") as temporary, ExitStack() as stack:
        folders = {
            name: stack.enter_context(RunFolder.create(Path(temporary) / name, shared.resolved(settings), ""))
            for name, settings in recipes.items()
        }
        measures = {name: partial(_seconds_per_update, folder, shared.prepared) for name, folder in folders.items()}
        return in_turns(measures, log)


def _seconds_per_update(folder: RunFolder, prepared: Prepared[Any]) -> float:
    gc.collect()  # the previous model
    rehearsal, settings = Rehearsal(folder, prepared=prepared), folder.settings
    feeds = rehearsal.feeder(settings).feeds(Position())
    took = [rehearsal.update(next(feeds)) for _ in range(WARM_UPDATES + TIMED_UPDATES)][WARM_UPDATES:]
    # an untrained model may never predict the end of a sentence
    short = settings.with_values("decoding", max_length=min(LONGEST, settings.decoding.max_length))
    validate = rehearsal.task.validator(rehearsal.model, prepared, short, rehearsal.device)
    began = time.perf_counter()
    validate()
    validation = time.perf_counter() - began
    return statistics.fmean(took) + validation / resolved(settings.training.valid_updates, "training.valid_updates")
