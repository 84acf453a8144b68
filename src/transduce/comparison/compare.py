"""`compare`: from recipes to a table, in one resumable call."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transduce.comparison.measures import (
    SCORES_FILE,
    Speeds,
    measure_speeds,
    read_measures,
    store_measures,
)
from transduce.comparison.pace import with_updates
from transduce.comparison.page import comparison_html
from transduce.comparison.recipes import (
    SHARED,
    Budget,
    naming,
    read_recipes,
    with_shared_conditions,
)
from transduce.comparison.result import RecipeComparison, system_of
from transduce.comparison.shared import DIGESTS, require_same_text, shared_by, with_vocabulary_of
from transduce.comparison.sizes import RULE, scaled
from transduce.config import Settings, TrainingSettings, to_toml
from transduce.data.corpus import text_files
from transduce.errors import DataError, FolderInUse, RunFolderError, SettingsError, TrainingError
from transduce.logging import Log
from transduce.pipeline import is_finished, train
from transduce.process import release_memory
from transduce.runs.atomic import read_json, write_json, write_text
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.lock import WAIT_SECONDS, is_locked, locked_folder
from transduce.runs.manifest import Manifest
from transduce.runs.tensor_file import load_metadata
from transduce.tasks.resolve import check
from transduce.training.meter import reset_peak_memory

_DEFAULT = Budget()
TABLE, PAGE = "compare.json", "compare.html"


def compare(
    recipes: Sequence[str | Path] | Mapping[str, Mapping[str, Any]],
    run: str | Path,
    *,
    seeds: int = 1,
    budget: Budget = _DEFAULT,
    data: Path | None = None,
    overrides: Sequence[str] = (),
    log: Log | None = None,
) -> RecipeComparison:
    """Train every recipe with every seed under the same conditions, score the models and compare them with the first.

    The first recipe's text, vocabulary, batches, limits, search and scoring are those of all. The same call resumes
    after a kill; finished trainings are not repeated. More recipes or seeds can be added later. Several processes may
    make the same call: each trains what no other one does. Writes `compare.json` and `compare.html`.

    Args:
        recipes: Recipe files, or nested settings by name, whose paths are relative to the working directory.
        run: Folder of the comparison; the run folders are RUN/NAME/seed1 and so on.
        seeds: Number of trainings of each recipe, with `training.seed` and the following numbers.
        budget: What each training may use (default: the limits of the first recipe).
        data: Folder that data paths are relative to.
        overrides: `section.key=value` for all recipes.
        log: For progress (default: to stderr).

    Raises:
        UserError: A recipe cannot be used, or has other conditions than the first, before anything is trained.
        Interrupted: SIGINT, SIGTERM or SIGHUP during a training, when everything is saved.
    """
    log, run = log or Log(), Path(run)
    settings = with_shared_conditions(read_recipes(recipes, data=data, overrides=overrides), budget)
    locked = partial(locked_folder, run, use="comparing", option="--run", warn=log.warn, wait=True)
    with locked():
        plan = _plan(settings, run, seeds=seeds, budget=budget, log=log)
    failed = _train_all(plan.runs, log)
    with locked():
        return _finish(run, plan, failed, log)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The trainings of a comparison.

    `runs`: settings by run folder, in order: all recipes with the first seed, and so on. `conditions`: what all share,
    for people. `pace`: seconds per update of each recipe, if they were measured.
    """

    runs: dict[Path, Settings]
    conditions: list[str]
    pace: Mapping[str, float]


def _plan(recipes: Mapping[str, Settings], run: Path, *, seeds: int, budget: Budget, log: Log) -> _Plan:
    """Plan the trainings. Checks everything that can be known before the first one."""
    if seeds < 1:
        raise SettingsError(f"seeds = {seeds}: must be at least 1")
    if (run / "manifest.json").exists():
        raise SettingsError(f"--run {run}: this is a run folder; name another folder for the comparison")
    if ((parent := run.resolve().parent) / SHARED / DIGESTS).exists():
        raise SettingsError(f"--run {run}: this folder belongs to the comparison {parent}; name another one")
    base = next(iter(recipes.values()))
    if seeds > 1 and (base.data.demo or not base.data.valid):
        raise SettingsError(
            f"--seeds {seeds}: the held-out text would depend on the seed; give data.valid and data.train as files"
        )
    for name, settings in recipes.items():
        with naming(name):
            check(settings)
    if not has_read_text(run / SHARED):
        for path in text_files(base.data).values():
            if not path.exists():
                raise DataError(f"there is no file {path}; name the folder of the data with --data FOLDER")
    pace: Mapping[str, float] = {}
    with shared_by(base, run, log) as shared:
        recipes = {name: shared.apply(settings) for name, settings in recipes.items()}
        if budget.params is not None:
            recipes = scaled(recipes, budget.params, shared, log)
        if shared.settings.training.max_minutes is not None:
            recipes, pace = with_updates(recipes, run, shared, log)
    plan = {
        run / name / f"seed{seed + 1}": settings.with_values("training", seed=shared.settings.training.seed + seed)
        for seed in range(seeds)
        for name, settings in recipes.items()
    }
    for path, settings in plan.items():
        if (path / "manifest.json").exists():
            manifest = Manifest.read(path)
            if start := manifest.asked_settings().tokenizer.start:  # from before the folder was moved
                plan[path] = settings = with_vocabulary_of(settings, start)
            manifest.require_same(settings)  # also of a run that another process is training
            with suppress(FolderInUse):
                RunFolder.create(path, settings, to_toml(settings)).close()
    if not all((path / SCORES_FILE).exists() for path in plan):
        require_same_text(base, run)
    return _Plan(plan, _conditions(shared.settings.training, seeds, budget), pace)


def _train_all(plan: Mapping[Path, Settings], log: Log) -> dict[str, str]:
    """Train what no other process trains, and wait for the remaining ones; why trainings failed, by run folder."""
    first, failed, reported = next(iter(plan)), dict[str, str](), False
    waiting = {path: number for number, path in enumerate(plan, 1)}
    while waiting:
        before = len(waiting)
        for path, number in list(waiting.items()):
            if is_locked(path):
                continue
            try:
                if (path / SCORES_FILE).exists():
                    Manifest.read(path).require_same(plan[path])  # another process may have trained it
                else:
                    log.say(f"{path.parent.name}, {path.name} ({number} of {len(plan)})")
                    _train(path, plan[path], log)
                del waiting[path]
            except FolderInUse:  # since a moment ago
                continue
            except TrainingError as error:
                if path == first:
                    raise
                failed[str(path)] = " ".join(str(error).split())
                log.warn(f"{path}: {error}; the other trainings continue")
                del waiting[path]
        if len(waiting) == before:
            if not reported:
                log.say(f"waiting for another process, which trains {', '.join(map(str, waiting))}")
                reported = True
            time.sleep(WAIT_SECONDS)
    return failed


def _train(path: Path, settings: Settings, log: Log) -> None:
    """Train and score the run unless that is done."""
    if not is_finished(path):
        release_memory()
        reset_peak_memory()
        train(settings, path, log=log)
    store_measures(path)


def _conditions(training: TrainingSettings, seeds: int, budget: Budget) -> list[str]:
    """What all trainings share, for people."""
    numbers = f"seed {training.seed}" if seeds == 1 else f"seeds {training.seed} to {training.seed + seeds - 1}"
    lines = [
        f"the same for all: text, vocabulary, batches of {training.batch_tokens:,} tokens, search, scoring, {numbers}",
        f"budget of each training: {budget.describe(training)}",
    ]
    return [*lines, f"sizes: {RULE}"] if budget.params is not None else lines


def _finish(run: Path, plan: _Plan, failed: Mapping[str, str], log: Log) -> RecipeComparison:
    """Aggregate, measure the speeds, and write the files."""
    runs: dict[str, list[Path]] = {}
    for path in plan.runs:
        if str(path) not in failed:
            runs.setdefault(path.parent.name, []).append(path)
    speeds = _speeds(run, {name: paths[0] for name, paths in runs.items()}, log)
    measures = {
        name: {str(path): read_measures(path, plan.pace.get(name)) for path in paths} for name, paths in runs.items()
    }
    first = list(next(iter(measures.values())).values())
    systems = [
        system_of(name, plan.runs[runs[name][0]].model.kind, found, first, speeds.per_second.get(name))
        for name, found in measures.items()
    ]
    one = first[0].sets[0]
    found = RecipeComparison(
        measure=one.measure,
        signature=one.signature,
        systems=systems,
        conditions=plan.conditions,
        settings=_differing({name: RunFolder.open(paths[0]).settings for name, paths in runs.items()}),
        speeds=speeds,
        failed=failed,
    )
    write_json(run / TABLE, found.to_json())
    write_text(run / PAGE, comparison_html(found, run))
    log.say(f"comparison: {run / TABLE}    page: {run / PAGE}")
    return found


def _speeds(run: Path, models: Mapping[str, Path], log: Log) -> Speeds:
    """Those of an earlier call for the same models, or measured now."""
    digests = {name: load_metadata(path / "model.safetensors").get("sha256", "") for name, path in models.items()}
    with suppress(RunFolderError, TypeError, KeyError):  # missing, damaged, or of another version
        found = Speeds(**read_json(run / TABLE)["speeds"])
        if found.models == digests and all(isinstance(value, float) for value in found.per_second.values()):
            return found
    return measure_speeds(models, digests, log)


def _differing(recipes: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """The model and training settings that not all recipes have in common."""
    values = {
        name: {
            f"{section}.{key}": value
            for section in ("model", "training")
            for key, value in getattr(settings, section).model_dump(mode="json").items()
            if key not in ("preset", "start", "micro_batch_tokens")
        }
        for name, settings in recipes.items()
    }
    keys = dict.fromkeys(key for found in values.values() for key in found)
    differing = [key for key in keys if len({str(found.get(key)) for found in values.values()}) > 1]
    return {name: {key: found[key] for key in differing if key in found} for name, found in values.items()}
