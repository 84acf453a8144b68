"""The conditions that all recipes of a comparison share: text and vocabulary, number of parameters, minutes.

The vocabulary is learned, and unset settings are chosen, once: in the folder `shared` of the comparison, a run folder
that is not trained. Widths are scaled to the number of parameters. Minutes become numbers of updates: a machine that
several people use may be twice as fast in one hour as in the next, so the speeds of all recipes are measured in turns,
before the first training.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from transduce.comparison.recipes import SECTIONS, TRAINING, naming
from transduce.config.kinds import resolve_preset
from transduce.config.model import ModelSettings
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.doctor.trial import Rehearsal
from transduce.errors import SettingsError
from transduce.evaluation.speed import in_turns
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.models.registry import parameters_of
from transduce.runs.atomic import read_json, write_json
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import check_sealed
from transduce.tasks.base import Prepared
from transduce.tasks.registry import find_task
from transduce.tasks.resolve import check, resolve
from transduce.text.tokenizer import Tokenizers, load_tokenizers
from transduce.training.feed import DataPosition

TOLERANCE = 0.1  # of the number asked for
WIDEST = 1 << 16
RULE = (
    "all widths (settings that begin with d_) of a recipe are multiplied by one factor; depth, heads, kernels and "
    "vocabulary are unchanged"
)
FILE = "update_budget.json"  # in the folder of the comparison: seconds per update, by recipe
WARM_UPDATES, TIMED_UPDATES = 3, 12  # in a round
LONGEST = 30  # tokens of a translation in the measured validation


class Shared:
    """The prepared folder of the first recipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = RunFolder.open(path, model=False)
        self.settings = self.folder.settings
        self.task = find_task(self.settings.task)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The vocabulary."""
        return load_tokenizers(self.folder)

    @cached_property
    def prepared(self) -> Prepared[Any]:
        """The encoded text."""
        check_sealed(self.path / "tokens")
        return self.task.open_prepared(self.folder)

    @cached_property
    def texts(self) -> Any:
        """The text, read again: complete settings of other recipes need to know its size."""
        return self.task.read(self.settings, Log(quiet=True))

    def apply(self, settings: Settings) -> Settings:
        """A recipe with the shared settings, checked."""
        own, shared = settings.model_dump(exclude_unset=True), self.settings.model_dump()
        sections = {name: shared[name] for name in SECTIONS}
        training = own.get("training", {}) | {key: shared["training"][key] for key in TRAINING}
        mixed = with_vocabulary_of(Settings.from_mapping({**own, **sections, "training": training}), self.path)
        check(mixed)
        return mixed

    def resolved(self, settings: Settings) -> Settings:
        """Complete settings of a recipe."""
        machine = this_machine(settings.training.device)
        return resolve(self.task, settings, self.texts, machine, Log(quiet=True), known=self.tokenizers)[0]


def with_vocabulary_of(settings: Settings, run: Path) -> Settings:
    """The same settings with the vocabulary of a run, so that none is learned."""
    values = settings.model_dump(exclude_unset=True)
    return Settings.from_mapping(
        {**values, "tokenizer": {"sampling": settings.tokenizer.sampling, "start": run.absolute()}}
    )


def scale(model: ModelSettings, n_parameters: int, *, n_src: int, n_tgt: int) -> Any:
    """The same architecture with about `n_parameters`, by RULE.

    `d_model` is a multiple of `width_step`; other widths are even. Raises `SettingsError` if no such width is within
    TOLERANCE.
    """
    model = resolve_preset(model)
    given = {name: getattr(model, name) for name in model.model_fields_set}
    values = {name: getattr(model, name) for name in type(model).model_fields}
    widths = {name: value for name, value in values.items() if name.startswith("d_") and isinstance(value, int)}

    def sized(d_model: int) -> ModelSettings:
        others = {name: max(2, 2 * round(value * d_model / model.d_model / 2)) for name, value in widths.items()}
        return type(model)(**{**given, **others, "d_model": d_model})

    def count(d_model: int) -> Any:
        try:
            return parameters_of(sized(d_model), n_src=n_src, n_tgt=n_tgt)
        except ValidationError:  # wider than allowed
            return math.inf

    sizes = range(model.width_step, WIDEST + 1, model.width_step)
    place = bisect_left(sizes, n_parameters, key=count)
    best = min(sizes[max(0, place - 1) : place + 1], key=lambda d_model: abs(count(d_model) - n_parameters))
    if abs(count(best) - n_parameters) > TOLERANCE * n_parameters:
        raise SettingsError(
            f"budget params = {n_parameters}: the nearest size of this model has {count(best):,} parameters (d_model "
            f"{best}); give another number, fewer heads or a smaller vocabulary"
        )
    return sized(best)


def scaled(recipes: Mapping[str, Settings], n_parameters: int, shared: Shared, log: Log) -> dict[str, Settings]:
    """The recipes with models of about `n_parameters`, for the vocabulary that they share."""
    found, labels = {}, shared.settings.data.labels
    for name, settings in recipes.items():
        model: Any = settings.model
        if "n_labels" in type(model).model_fields:
            model = model.model_copy(update={"n_labels": len(labels) if labels else None})
        if not shared.settings.tokenizer.joint and "tie" not in model.model_fields_set:
            model = model.model_copy(update={"tie": "two_way"})
        with naming(name):
            sized = scale(model, n_parameters, n_src=shared.tokenizers.n_src, n_tgt=shared.tokenizers.n_tgt)
        widths = {key: value for key, value in sized.model_dump().items() if key.startswith("d_") and value is not None}
        found[name] = settings.with_values("model", **widths)
        log.say(f"{name}: {', '.join(f'{key} {value}' for key, value in widths.items())}")
    return found


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
    feeds = rehearsal.feeder(settings).feeds(DataPosition())
    took = [rehearsal.update(next(feeds)) for _ in range(WARM_UPDATES + TIMED_UPDATES)][WARM_UPDATES:]
    # an untrained model may never predict the end of a sentence
    short = settings.with_values("decoding", max_length=min(LONGEST, settings.decoding.max_length))
    validate = rehearsal.task.validator(rehearsal.model, prepared, short, rehearsal.device)
    began = time.perf_counter()
    validate()
    validation = time.perf_counter() - began
    return statistics.fmean(took) + validation / resolved(settings.training.valid_updates, "training.valid_updates")
