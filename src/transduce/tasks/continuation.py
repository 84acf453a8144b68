"""Continue a finished training, and change settings of a training that resumes.

A continuation starts from the last checkpoint, which has the weights, the optimizer's state, the averages and the
position in the data; random numbers follow from the number of the update. So the result equals a run that had the
higher limit from the start, if the learning rate does not depend on the limit. The encoded text was deleted at the end
and is prepared again; it must not have changed.

Changes are stored in the manifest of the run before the training continues. `training.session` applies them when it
restores the last checkpoint. So no change is lost if the process is killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from transduce.config.recipe import read_recipe
from transduce.config.section import resolved
from transduce.config.settings import Settings
from transduce.data.workers import Workplace
from transduce.errors import DataError, RunFolderError, SettingsError
from transduce.logging import Log
from transduce.runs.atomic import advising, expecting
from transduce.runs.folder import RunFolder
from transduce.runs.manifest import Manifest, check_sealed, replace_settings
from transduce.tasks.base import AnyTask, fingerprint
from transduce.tasks.resolve import check
from transduce.text.tokenizer import load_tokenizers
from transduce.training.schedule import FALLING
from transduce.training.session import TrainingState

LEAST_FACTOR = 0.01
"""Smallest factor of the peak learning rate at which a falling schedule may be continued; less would teach nothing."""

Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class More:
    """The length and the learning rate of the continuation of a finished training.

    Args:
        updates: Number of updates to add. Give exactly one of `updates`, `epochs` and `minutes`.
        epochs: Number of epochs to add.
        minutes: Number of minutes to add.
        lr: The peak learning rate, with which the continuation begins (default: the rate at which the training ended).
    """

    updates: int | None = None
    epochs: float | None = None
    minutes: float | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        given = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}
        if len(given.keys() - {"lr"}) != 1:
            raise SettingsError("give one of more updates, more epochs and more minutes", "more")
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise SettingsError(f"more {name} = {value}: must be above 0", "more")

    @property
    def length(self) -> str:
        """The name of the given field: updates, epochs or minutes."""
        return next(name for name in ("updates", "epochs", "minutes") if getattr(self, name) is not None)

    def limits(self, state: TrainingState) -> dict[str, Any]:
        """Return the limits of the continued run, by the names of their settings; None for no limit."""
        return {
            "training.max_updates": self.updates and state.update + self.updates,
            "training.max_epochs": self.epochs and state.epochs + self.epochs,
            "training.max_minutes": self.minutes and state.seconds / 60 + self.minutes,
        }

    def describe(self, state: TrainingState) -> str:
        if self.updates is not None:
            return f"to update {state.update + self.updates:,}"
        if self.epochs is not None:
            return f"to epoch {state.epochs + self.epochs:.2f}"
        return f"for {self.minutes:g} minutes"


def stored_settings(run: Path, changes: Settings | None = None) -> Settings:
    """Return the settings of the last start of the run in a folder, replaced by the settings that `changes` has."""
    values = read_recipe(run / "recipe.toml")
    for name, value in (changes or Settings()).model_dump(mode="json", exclude_unset=True).items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return Settings.from_mapping(values, origin=str(run)).resolve_paths(run)


def change_settings(folder: RunFolder, *, is_finished: bool) -> None:
    """Record changes of settings that a command requests for a resumed run; `RunFolderError` if it is finished."""
    if is_finished:
        name, (before, after) = next(iter(folder.requested.items()))
        raise RunFolderError(
            f"{folder.path} is finished with {name} = {before}, and {after} is asked for; --more-updates continues the "
            "training with changed settings; or name another run folder",
            *(name, "run"),
        )
    changes = _with_matrix_lr(folder.requested, folder.settings)
    check(_changed(folder.settings, changes))
    folder.change(changes)


def continue_run(task: AnyTask, folder: RunFolder, more: More, end: Mapping[str, Any], log: Log) -> None:
    """Prepare the text of a finished run again and let its training continue.

    Until the text is prepared, nothing in the run changes. `folder`: locked, with the changes that the command
    requests. `end`: the event of the log that ended the training. Raises `RunFolderError` or `DataError` if the last
    checkpoint or the text is missing, damaged or changed, and `SettingsError` if the learning rate has fallen to zero
    and no other one is given, or if the run trained adapters.
    """
    path, settings = folder.path, folder.settings
    advice = f"train --from {path} starts a new run with the weights of this one, on this or other text"
    if settings.training.lora is not None:
        raise SettingsError(
            f"{path}: training.lora: the frozen weights were deleted at the end of the training; {advice}"
        )
    with advising(advice):
        checkpoint = folder.checkpoints.load(int(end["update"]))
    with expecting(checkpoint.path):
        state = TypeAdapter(TrainingState).validate_python(checkpoint.state["training"])
    for name in more.limits(state).keys() & folder.requested.keys():
        raise SettingsError(f"{name}: more {more.length} set the limit of the continuation; leave it out", "more")
    lr = resolved(settings.training.lr, "training.lr")
    rates: Changes = {} if more.lr is None else {"training.lr": (lr, more.lr)}
    rates |= {name: change for name, change in folder.requested.items() if name == "training.lr"}
    rate, reason = (rates["training.lr"][1], "as given") if rates else (state.factor * lr, "where it ended")
    schedule = _changed(settings, folder.requested).training.schedule
    if not rates and (schedule in FALLING or "training.schedule" in folder.requested):  # others go on from there
        if state.factor < LEAST_FACTOR:
            raise SettingsError(
                f"{path}: its learning rate has fallen to {rate:.2g}, by training.schedule = "
                f"'{settings.training.schedule}'; give the rate to begin with: --set training.lr=RATE (its peak was "
                f"{lr:g})"
            )
        rates = {"training.lr": (lr, rate)}
    limits = {
        name: (before, after)
        for name, after in more.limits(state).items()
        if (before := getattr(settings.training, name.removeprefix("training."))) != after
    }
    changes = _with_matrix_lr({**folder.requested, **rates, **limits}, settings)
    check(_changed(settings, changes))
    log.say(
        f"continuing {path} after update {state.update:,}, epoch {state.epochs:.2f}, {more.describe(state)}; the "
        f"learning rate begins at {rate:.4g}, {reason} ({schedule})"
    )
    if (path / "tokens").exists():  # left by a killed process
        check_sealed(path / "tokens")
    else:
        _prepare_again(task, folder, advice, log)
    folder.change(changes, continues=True)


def _with_matrix_lr(changes: Changes, settings: Settings) -> Changes:
    """Add a change of `training.matrix_lr`, if it is set, in proportion to a change of `training.lr`."""
    matrix_lr = settings.training.matrix_lr
    if "training.lr" not in changes or "training.matrix_lr" in changes or matrix_lr is None:
        return changes
    before, after = changes["training.lr"]
    return {**changes, "training.matrix_lr": (matrix_lr, matrix_lr * after / before)}


def _changed(settings: Settings, changes: Changes) -> Settings:
    return replace_settings(settings, {name: after for name, (_, after) in changes.items()})


def _prepare_again(task: AnyTask, folder: RunFolder, advice: str, log: Log) -> None:
    """Encode the text of the run again into its folder `tokens`; raise an error if the text has changed or is gone."""
    settings, tokenizers = folder.settings, load_tokenizers(folder)
    try:
        sources = task.form.sources(settings)
        mark = fingerprint(settings, tokenizers, [source.mark() for source in sources.train])
        if mark != folder.read_record("data.json").get("fingerprint"):
            raise RunFolderError(f"the training text of {folder.path} has changed since; restore it, or {advice}")
        # In a separate folder, because the vocabulary and data.json of the finished run must not be replaced. If the
        # process is killed, the next start removes the folder by its name.
        with TemporaryDirectory(dir=folder.path, prefix=".continued.", suffix=".aside") as name:
            aside = RunFolder(Path(name), settings, Manifest(Path(name), folder.manifest.asked))
            texts = task.form.read_texts(settings, log, sources, workplace=Workplace(aside.path))
            task.prepare(aside, texts, tokenizers, log)
            os.rename(aside.path / "tokens", folder.path / "tokens")
    except DataError as error:
        raise DataError(f"{error}; to continue a training, its text is read again; or {advice}") from error
