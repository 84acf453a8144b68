"""`compare`: from recipes to a table, in one resumable call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from transduce.comparison.conditions import RULE, Shared, scaled, with_update_budgets, with_vocabulary_of
from transduce.comparison.measures import SCORES_FILE, RunMeasures, Speeds, read_measures
from transduce.comparison.page import comparison_html
from transduce.comparison.recipes import SHARED, Budget, naming, read_recipes, with_shared_conditions
from transduce.comparison.result import RecipeComparison, system_of
from transduce.config.settings import Settings, TrainingSettings
from transduce.errors import DataError, RunFolderError, SettingsError, TrainingError, UserError, message_of
from transduce.evaluation.significance import ScoredModel
from transduce.evaluation.speed import measure_in_turns
from transduce.logging import Log
from transduce.pipeline import is_finished, prepare, train
from transduce.process import release_memory
from transduce.runs.atomic import read_json, write_json, write_text
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.lock import locked_folder
from transduce.runs.manifest import Manifest
from transduce.tasks.registry import find_task
from transduce.tasks.resolve import check
from transduce.training.meter import reset_peak_memory

_DEFAULT = Budget()
TABLE, PAGE = "compare.json", "compare.html"
TIMED_EXAMPLES = 500  # in a round of the measurement of speed


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
    after a kill; finished trainings are not repeated. More recipes or seeds can be added later. Writes `compare.json`
    and `compare.html`.

    Args:
        recipes: Recipe files, or nested settings by name, whose paths are relative to the working directory.
        run: Folder of the comparison; the run folders are RUN/NAME/seed1 and so on.
        seeds: Number of trainings of each recipe, with `training.seed` and the following numbers.
        budget: Limits of each training (default: the limits of the first recipe).
        data: Folder that data paths are relative to.
        overrides: `section.key=value` for all recipes.
        log: For progress (default: to stderr).

    Raises:
        UserError: A recipe cannot be used, or has other conditions than the first, before anything is trained.
        Interrupted: SIGINT, SIGTERM or SIGHUP during a training, when everything is saved.
    """
    log, run = log or Log(), Path(run)
    settings = with_shared_conditions(read_recipes(recipes, data=data, overrides=overrides), budget)
    with locked_folder(run, use="comparing"):
        runs, conditions = _plan(settings, run, seeds=seeds, budget=budget, log=log)
        failed = _train_all(runs, log)
        return _finish(run, runs, conditions=conditions, failed=failed, log=log)


def _plan(
    recipes: Mapping[str, Settings], run: Path, *, seeds: int, budget: Budget, log: Log
) -> tuple[dict[Path, Settings], list[str]]:
    """Settings by run folder, all recipes with the first seed first, and a description of the shared settings.

    Checks everything that can be known before the first training.
    """
    if seeds < 1:
        raise SettingsError(f"seeds = {seeds}: must be at least 1")
    if (run / "manifest.json").exists():
        raise SettingsError(f"run = {run}: this is a run folder; name another folder for the comparison")
    base = next(iter(recipes.values()))
    if seeds > 1 and (base.data.demo or not base.data.valid):
        raise SettingsError(
            f"seeds = {seeds}: the held-out text would depend on the seed; give data.valid and data.train as files"
        )
    for name, settings in recipes.items():
        with naming(name):
            check(settings)
    is_new = not has_read_text(run / SHARED)
    if is_new:
        log.say("reading the text")
    prepare(base, run / SHARED, log=Log(quiet=True))
    shared = Shared(run / SHARED)
    try:
        recipes = {name: shared.apply(settings) for name, settings in recipes.items()}
        if budget.params is not None:
            recipes = scaled(recipes, budget.params, shared, log)
        if shared.settings.training.max_minutes is not None:
            recipes = with_update_budgets(recipes, shared, log)
    except UserError:
        if is_new:
            rmtree(shared.path)
        raise
    first_seed = shared.settings.training.seed
    runs = {
        run / name / f"seed{number + 1}": settings.with_values("training", seed=first_seed + number)
        for number in range(seeds)
        for name, settings in recipes.items()
    }
    for path, settings in runs.items():
        if (path / "manifest.json").exists():
            manifest = Manifest.read(path)
            if start := manifest.asked_settings().tokenizer.start:  # from before the folder was moved
                runs[path] = settings = with_vocabulary_of(settings, start)
            manifest.require_same(settings)
    return runs, _conditions(shared.settings.training, seeds, budget)


def _conditions(training: TrainingSettings, seeds: int, budget: Budget) -> list[str]:
    """Describe the settings that all trainings share."""
    numbers = f"seed {training.seed}" if seeds == 1 else f"seeds {training.seed} to {training.seed + seeds - 1}"
    lines = [
        f"the same for all: text, vocabulary, batches of {training.batch_tokens:,} tokens, search, scoring, {numbers}",
        f"budget of each training: {budget.describe(training)}",
    ]
    return [*lines, f"sizes: {RULE}"] if budget.params is not None else lines


def _train_all(runs: Mapping[Path, Settings], log: Log) -> dict[str, str]:
    """Train and score one run after the other, unless that is done; reasons of failed trainings, by run folder.

    Raises the error of the first training, with which the others would be compared.
    """
    first, failed = next(iter(runs)), dict[str, str]()
    for number, (path, settings) in enumerate(runs.items(), 1):
        if (path / SCORES_FILE).exists():
            continue
        log.say(f"{path.parent.name}, {path.name} ({number} of {len(runs)})")
        try:
            if not is_finished(path):
                release_memory()
                reset_peak_memory()
                train(settings, path, log=log)
            _store_scores(path)
        except TrainingError as error:
            if path == first:
                raise
            failed[str(path)] = message_of(error)
            log.warn(f"{path}: {error}; the other trainings continue")
    return failed


def _store_scores(run: Path) -> None:
    """Score a finished run and store the result in its folder."""
    with RunFolder.open_locked(run) as folder:
        sets = find_task(folder.settings.task).scored_model(folder).outputs()
        folder.write_record(SCORES_FILE, {"sets": [one.to_json() for one in sets]})


def _finish(
    run: Path, runs: Mapping[Path, Settings], *, conditions: list[str], failed: Mapping[str, str], log: Log
) -> RecipeComparison:
    """Aggregate, measure the decoding speeds, and write the files."""
    measured = {path: read_measures(path) for path in runs if str(path) not in failed}
    _check_same_examples(measured)
    by_recipe: dict[str, dict[Path, RunMeasures]] = {}
    for path, one in measured.items():
        by_recipe.setdefault(path.parent.name, {})[path] = one
    first_seeds = {name: next(iter(found)) for name, found in by_recipe.items()}
    baseline = list(next(iter(by_recipe.values())).values())
    systems = [
        system_of(name, runs[first_seeds[name]].model.kind, found, baseline) for name, found in by_recipe.items()
    ]
    found = RecipeComparison(
        measure=baseline[0].sets[0].measure,
        signature=baseline[0].sets[0].signature,
        systems=systems,
        conditions=conditions,
        settings=_differing({name: RunFolder.open(path).settings for name, path in first_seeds.items()}),
        speeds=_speeds(run, first_seeds, log),
        failed=failed,
    )
    write_json(run / TABLE, found.to_json())
    write_text(run / PAGE, comparison_html(found, run))
    log.say(f"comparison: {run / TABLE}    page: {run / PAGE}")
    return found


def _check_same_examples(measures: Mapping[Path, RunMeasures]) -> None:
    """Raise a `DataError` for a run that was scored on other text than the first, as paired tests need the same."""
    first = next(iter(measures))
    for path, found in measures.items():
        if found.n_examples != measures[first].n_examples:
            raise DataError(
                f"{path} was scored on other text than {first}: the files have changed between the trainings; restore "
                f"them, remove {path} and try again"
            )


def _speeds(run: Path, models: Mapping[str, Path], log: Log) -> Speeds:
    """Those of an earlier call for the same models, or measured now."""
    digests = {name: RunFolder.open(path).weights_digest() for name, path in models.items()}
    with suppress(RunFolderError, TypeError, KeyError):  # missing, damaged, or of another version
        found = Speeds(**read_json(run / TABLE)["speeds"])
        if found.models == digests:
            return found
    return _measure_speeds(models, digests, log)


def _measure_speeds(runs: Mapping[str, Path], digests: Mapping[str, str], log: Log) -> Speeds:
    """Measure the models in turns. If the native library does not support one of them, PyTorch computes all."""
    folders = {name: RunFolder.open(run) for name, run in runs.items()}
    models: dict[str, ScoredModel] = {
        name: find_task(folder.settings.task).scored_model(folder) for name, folder in folders.items()
    }
    unit = next(iter(models.values())).unit
    if not unit:
        return Speeds(digests)
    if len({model.engine for model in models.values()}) > 1:
        for model in models.values():
            model.use_pytorch()
    per_second = measure_in_turns({name: model.run_again for name, model in models.items()}, TIMED_EXAMPLES, log)
    engine = next(iter(models.values())).engine
    return Speeds(digests, unit, engine, per_second)


def _differing(recipes: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """The model and training settings in which recipes differ from the first; for the first, those of any other."""
    values = {
        name: {
            f"{section}.{key}": value
            for section in ("model", "training")
            for key, value in getattr(settings, section).model_dump(mode="json").items()
            if key not in ("preset", "start", "micro_batch_tokens")
        }
        for name, settings in recipes.items()
    }
    first, *others = values.values()
    differing = {key for other in others for key in {**first, **other} if first.get(key) != other.get(key)}

    def shown(own: Mapping[str, Any]) -> dict[str, Any]:
        return {key: own[key] for key in own if key in differing and (own is first or own[key] != first.get(key))}

    return {name: shown(own) for name, own in values.items()}
