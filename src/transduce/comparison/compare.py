"""`compare`: train several recipes and tabulate their results, in one resumable call."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from transduce.config.recipe import apply_overrides, read_recipe
from transduce.config.section import traits_of
from transduce.config.settings import Settings, TrainingSettings
from transduce.data.preparation import read_scored_sets
from transduce.decoding.translator import Translator
from transduce.errors import DataError, SettingsError, TrainingError, UserError, message_of
from transduce.evaluation.evaluate import classifier_outputs, recorded_outputs, translation_outputs
from transduce.evaluation.html import compact
from transduce.evaluation.run_record import read_record
from transduce.evaluation.significance import MEASURES, Difference, Outputs, compare_outputs
from transduce.logging import Log
from transduce.pipeline import is_finished, prepare, train
from transduce.process import release_memory
from transduce.runs.atomic import expecting, write_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.lock import locked_folder
from transduce.runs.manifest import Manifest, settings_by_name
from transduce.tasks.base import PAIRS
from transduce.tasks.resolve import check
from transduce.training.meter import reset_peak_memory

TABLE, SCORES_FILE = "compare.json", "comparison.json"
SECTIONS = ("data", "tokenizer", "decoding", "evaluation")
LIMITS = ("max_updates", "max_epochs", "max_minutes")
TRAINING = tuple(key for key, field in TrainingSettings.model_fields.items() if traits_of(field).shared)
"""Names of the `training` settings that must be equal in all recipes."""


def _translation_outputs(folder: RunFolder) -> list[Outputs]:
    settings = folder.settings
    translator = Translator.load(folder.path, device=settings.training.device)
    return translation_outputs(translator, read_scored_sets(PAIRS.sources(settings)), settings)


OUTPUTS: Mapping[str, Callable[[RunFolder], list[Outputs]]] = {
    "translation": _translation_outputs,
    "causal": recorded_outputs,
    "masked": recorded_outputs,
    "classification": classifier_outputs,
}
"""For each task, the function that scores a finished run on each example of its held-out text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasures:
    """Measures of one finished training.

    `seconds`: duration of the training with its validations. `nll`: validation loss of the final weights without label
    smoothing, in nats per target token. `tokens_per_second`: None if the training was too short to log it. `memory`:
    peak memory in bytes.
    """

    n_parameters: int
    updates: int
    seconds: float
    tokens_per_second: float | None
    memory: int | None
    nll: float
    sets: tuple[Outputs, ...]

    @property
    def n_examples(self) -> dict[str, int]:
        return {outputs.name: len(outputs.statistics) for outputs in self.sets}


def read_measures(run: Path) -> RunMeasures:
    """Read the measures of a scored run. Raises `RunFolderError` for a damaged file."""
    folder = RunFolder.open(run)
    record, stored = read_record(folder), folder.read_record(SCORES_FILE)
    with expecting(run / SCORES_FILE):
        sets = tuple(map(Outputs.from_json, stored["sets"]))
    with expecting(run / "metrics.jsonl"):
        validations, end = record.of("validation"), record.of("end")[-1]
        is_last = folder.settings.training.average == "last"
        best = [validation for validation in validations if validation["update"] == end["best_update"]]
        kept = (validations if is_last or not best else best)[-1]
        speeds = [speed for _, speed in record.points("update", "tokens_per_second")]
        return RunMeasures(
            n_parameters=int(record.n_parameters or 0),
            updates=int(end["update"]),
            seconds=float(end["seconds"]),
            tokens_per_second=statistics.median(speeds) if speeds else None,
            memory=end.get("memory"),
            nll=float(kept["nll"]),
            sets=sets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Measures of one recipe over its seeds.

    `minutes`, `tokens_per_second` (target tokens in training) and `updates` are means; `memory` is the largest peak in
    bytes. `nll` has a value per seed; `scores` has, for each test set, a value per seed. `differences`: for each test
    set, the difference from the score of the first recipe; None if the set is one running text.
    """

    name: str
    runs: tuple[str, ...]
    n_parameters: int
    updates: float
    minutes: float
    tokens_per_second: float | None
    memory: int | None
    nll: Sequence[float]
    scores: Mapping[str, Sequence[float]]
    differences: Mapping[str, Difference | None]

    def to_json(self) -> dict[str, Any]:
        differences = {name: difference and difference.to_json() for name, difference in self.differences.items()}
        return asdict(self) | {"differences": differences}


def system_of(name: str, runs: Mapping[Path, RunMeasures], baseline: Sequence[RunMeasures]) -> System:
    """Aggregate the measures of a recipe's runs (by folder). `baseline`: measures of the first recipe's runs."""
    measures = list(runs.values())
    speeds = [run.tokens_per_second for run in measures if run.tokens_per_second is not None]
    scores, differences = dict[str, list[float]](), dict[str, Difference | None]()
    for number, outputs in enumerate(measures[0].sets):
        ours, theirs = ([run.sets[number] for run in system] for system in (measures, baseline))
        scores[outputs.name] = [one_seed.value for one_seed in ours]
        differences[outputs.name] = compare_outputs(ours, theirs) if len(outputs.statistics) > 1 else None
    return System(
        name=name,
        runs=tuple(map(str, runs)),
        n_parameters=measures[0].n_parameters,
        updates=statistics.fmean(run.updates for run in measures),
        minutes=statistics.fmean(run.seconds for run in measures) / 60,
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        memory=max((run.memory for run in measures if run.memory is not None), default=None),
        nll=[run.nll for run in measures],
        scores=scores,
        differences=differences,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeComparison:
    """The result of a comparison, with one system per recipe, in the order of the recipes.

    `conditions`: a line about the shared settings. `failed`: the reason of each failed training, by run folder.
    """

    measure: str
    signature: str
    systems: Sequence[System]
    conditions: str
    failed: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"systems": [system.to_json() for system in self.systems]}

    def table(self) -> tuple[list[str], list[list[str]]]:
        form, sets = MEASURES[self.measure].form, list(self.systems[0].scores)
        header = ["recipe", "parameters", "updates", "minutes", "tokens/s", "memory", "nats/token"]
        for name in sets:
            header += [f"{self.measure} {name}", "against the first"]
        rows = []
        for number, system in enumerate(self.systems):
            row = [
                system.name,
                compact(system.n_parameters),
                f"{system.updates:,.0f}",
                f"{system.minutes:.1f}",
                "" if system.tokens_per_second is None else f"{system.tokens_per_second:,.0f}",
                "" if system.memory is None else f"{system.memory / 1e6:,.0f} MB",
                _format_scores(system.nll, "{:.3f}"),
            ]
            for name in sets:
                row.append(_format_scores(system.scores[name], form))
                row.append(_format_difference(system.differences[name], form) if number else "")
            rows.append(row)
        return header, rows

    def lines(self) -> list[str]:
        header, rows = self.table()
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [self.conditions, ""]
        for row in (header, *rows):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        return [*lines, "", *self._notes()]

    def _notes(self) -> list[str]:
        """Explain the columns of the table, and list the failed trainings."""
        measure = MEASURES[self.measure]
        better = "higher is better" if measure.higher_is_better else "lower is better"
        notes = [f"{self.measure}: {better}" + (f"; {self.signature}" if self.signature else "")]
        if any(len(system.runs) > 1 for system in self.systems):
            notes.append("±: standard deviation over seeds")
        if any(system.memory for system in self.systems):
            notes.append("memory: peak of the process, including memory kept from earlier trainings")
        if any(any(system.differences.values()) for system in self.systems[1:]):
            notes.append(
                "against the first: difference of the means, [95 % interval] by paired bootstrap over the test set; "
                "* p < 0.05 and an interval without 0, not corrected for the number of recipes"
            )
        return [*notes, *(f"failed: {run}: {why}" for run, why in self.failed.items())]


def _format_scores(values: Sequence[float], form: str) -> str:
    """Format as the mean or, for several values, as mean ± sample standard deviation."""
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean


def _format_difference(difference: Difference | None, form: str) -> str:
    if difference is None:
        return ""
    return difference.format(form.replace("{:", "{:+")) + ("*" if difference.is_significant else " ")


def compare(
    recipes: Sequence[str | Path] | Mapping[str, Mapping[str, Any]],
    run: str | Path,
    *,
    seeds: int = 1,
    minutes: float | None = None,
    updates: int | None = None,
    data: Path | None = None,
    overrides: Sequence[str] = (),
    log: Log | None = None,
) -> RecipeComparison:
    """Train every recipe with every seed under the same conditions, score the models and compare them with the first.

    All recipes use the text, vocabulary, batches, limits, search and scoring of the first. After a kill, the same call
    resumes; finished trainings are not repeated. More recipes or seeds can be added later. Writes `compare.json`.

    Args:
        recipes: Recipe files, or nested settings by name, whose paths are relative to the working directory.
        run: Folder of the comparison; the run folders are RUN/NAME/seed1 and so on.
        seeds: Number of trainings of each recipe. Their seeds are `training.seed` and the following numbers.
        minutes: Time limit of each training, instead of the limits of the recipes.
        updates: Number of updates of each training, instead of the limits of the recipes. If `minutes` is given too,
            the first limit that is reached ends a training.
        data: Folder that data paths are relative to.
        overrides: `section.key=value` for all recipes.
        log: Log for progress (default: to stderr).

    Raises:
        UserError: A recipe cannot be used, or has other conditions than the first; raised before anything is trained.
        Interrupted: SIGINT, SIGTERM or SIGHUP arrived during a training; everything is saved.
    """
    log, run, budget = log or Log(), Path(run), {"max_minutes": minutes, "max_updates": updates}
    limits = {name: value for name, value in budget.items() if value is not None}
    settings = read_recipes(recipes, limits=limits, data=data, overrides=overrides)
    with locked_folder(run, use="comparing"):
        runs = _plan(settings, run, seeds=seeds, log=log)
        failed = _train_all(runs, log)
        return _finish(run, runs, failed, log)


def read_recipes(
    given: Sequence[str | Path] | Mapping[str, Mapping[str, Any]],
    *,
    limits: Mapping[str, float],
    data: Path | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Settings]:
    """Read recipes; return their settings by name, with the shared settings of the first. Arguments: see `compare`.

    `limits`: `training` limits for all recipes; if empty, the limits of the first recipe hold. Raises `SettingsError`
    if a recipe is invalid, or gives a shared setting another value than the first.
    """
    if isinstance(given, Mapping):
        recipes = [(name, copy.deepcopy(dict(values)), Path()) for name, values in given.items()]
    else:
        recipes = [(Path(path).stem, read_recipe(Path(path)), Path(path).parent) for path in given]
    if not recipes:
        raise SettingsError("no recipe to compare; name at least one")
    settings: dict[str, Settings] = {}
    for name, values, folder in recipes:
        if name in ("", ".", "..") or Path(name).name != name:
            raise SettingsError(f"recipe '{name}': its name becomes that of a folder; rename the recipe")
        if name in settings:
            raise SettingsError(f"several recipes are called '{name}'; rename all but one of the files")
        apply_overrides(values, overrides)
        for section in (*SECTIONS, "training"):
            if not isinstance(values.setdefault(section, {}), dict):
                raise SettingsError(f"{name}: '{section}' must be a section, [{section}]")
        if data is not None:
            values["data"]["root"] = str(data.absolute())
        if limits:
            values["training"] = {key: value for key, value in values["training"].items() if key not in LIMITS}
            values["training"] |= limits
        if settings:
            values = _completed(values, name, next(iter(settings.values())))
        settings[name] = Settings.from_mapping(values, origin=name).resolve_paths(folder)
        _check_shared(name, settings[name], *next(iter(settings.items())))
    return settings


def _completed(values: Mapping[str, Any], name: str, base: Settings) -> dict[str, Any]:
    """Return a recipe's values, with missing shared settings taken from the first recipe."""
    shared = base.model_dump(mode="json", exclude_unset=True)
    training = {key: value for key, value in shared.get("training", {}).items() if key in TRAINING}
    sections = {section: {**shared.get(section, {}), **values[section]} for section in SECTIONS}
    return {"task": base.task, "name": name, **values, **sections, "training": {**training, **values["training"]}}


def _check_shared(name: str, settings: Settings, first: str, base: Settings) -> None:
    """Raise `SettingsError` for a recipe that fine-tunes, or that has another shared setting than the first recipe."""
    if settings.training.start is not None:
        raise SettingsError(f"{name}: training.start is set; a comparison trains from scratch: leave it out")
    ours, theirs = dict(settings_by_name(settings)), dict(settings_by_name(base))
    for key in ours | theirs:
        section, _, rest = key.partition(".")
        is_shared = key == "task" or section in SECTIONS or (section == "training" and rest in TRAINING)
        if is_shared and key != "data.root" and ours.get(key) != theirs.get(key):
            here, there = ("unset" if value is None else value for value in (ours.get(key), theirs.get(key)))
            hint = " (or give a budget, which replaces it)" if rest in LIMITS else ""
            raise SettingsError(
                f"{name}: {key} is {here}, and {there} in {first}; all recipes of a comparison share it: leave it "
                f"out{hint}"
            )


def _plan(recipes: Mapping[str, Settings], run: Path, *, seeds: int, log: Log) -> dict[Path, Settings]:
    """Check the settings, and return them by run folder; all recipes with the first seed come first.

    The first run is prepared here, since all other runs take over its vocabulary and its unset shared settings.
    """
    if seeds < 1:
        raise SettingsError(f"seeds = {seeds}: must be at least 1")
    if (run / "manifest.json").exists():
        raise SettingsError(f"run = {run}: this is a run folder; name another folder for the comparison")
    first, base = next(iter(recipes.items()))
    if seeds > 1 and (base.data.demo or not base.data.valid):
        raise SettingsError(
            f"seeds = {seeds}: the held-out text would depend on the seed; give data.valid and data.train as files"
        )
    for name, settings in recipes.items():
        _check(name, settings)
    baseline = run / first / "seed1"
    is_new = not baseline.exists()
    try:
        if not has_read_text(baseline):
            prepare(base, baseline, log=log)
        shared = RunFolder.open(baseline, model=False).settings
        runs = {}
        for number in range(seeds):
            for name, settings in recipes.items():
                path = run / name / f"seed{number + 1}"
                if path != baseline:
                    settings = _with_shared(settings, shared, baseline, seed=base.training.seed + number)
                    _check(name, settings)
                if (path / "manifest.json").exists():
                    manifest = Manifest.read(path)
                    start = manifest.asked_settings().tokenizer.start
                    if start is not None and start.parts[-2:] == baseline.parts[-2:]:  # the folder may have been moved
                        settings = settings.with_values("tokenizer", start=start)
                    manifest.require_same(settings)
                runs[path] = settings
    except UserError:
        if is_new:
            rmtree(baseline, ignore_errors=True)
            with suppress(OSError):  # the folder contains other runs
                baseline.parent.rmdir()
        raise
    return runs


def _check(name: str, settings: Settings) -> None:
    """Raise `SettingsError`, with the name of the recipe, for settings that cannot work."""
    try:
        check(settings)
    except SettingsError as error:
        raise SettingsError(f"{name}: {error}") from None


def _with_shared(settings: Settings, shared: Settings, baseline: Path, *, seed: int) -> Settings:
    """Return a recipe's settings with the vocabulary and the shared settings of the baseline's run."""
    own, values = settings.model_dump(exclude_unset=True), shared.model_dump()
    sections = {name: values[name] for name in SECTIONS}
    sections["tokenizer"] = {"sampling": shared.tokenizer.sampling, "start": baseline.absolute()}
    training = {**own.get("training", {}), **{key: values["training"][key] for key in TRAINING}, "seed": seed}
    return Settings.from_mapping({**own, **sections, "training": training})


def _train_all(runs: Mapping[Path, Settings], log: Log) -> dict[str, str]:
    """Train and score each run that is not finished; return the reasons of failed trainings, by run folder.

    If the first training fails, its error is raised: all comparisons need its scores.
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
            with RunFolder.open_locked(path) as folder:
                sets = OUTPUTS[folder.settings.task](folder)
                folder.write_record(SCORES_FILE, {"sets": [outputs.to_json() for outputs in sets]})
        except TrainingError as error:
            if path == first:
                raise
            failed[str(path)] = message_of(error)
            log.warn(f"{path}: {error}; the other trainings continue")
    return failed


def _finish(run: Path, runs: Mapping[Path, Settings], failed: Mapping[str, str], log: Log) -> RecipeComparison:
    """Aggregate the runs of each recipe, and write `compare.json`."""
    measures = {path: read_measures(path) for path in runs if str(path) not in failed}
    first, baseline = next(iter(measures.items()))
    by_recipe: dict[str, dict[Path, RunMeasures]] = {}
    for path, run_measures in measures.items():
        if run_measures.n_examples != baseline.n_examples:
            raise DataError(
                f"{path} was scored on other text than {first}: the files have changed between the trainings; restore "
                f"them, remove {path} and try again"
            )
        by_recipe.setdefault(path.parent.name, {})[path] = run_measures
    baselines = list(by_recipe[first.parent.name].values())
    result = RecipeComparison(
        measure=baseline.sets[0].measure,
        signature=baseline.sets[0].signature,
        systems=[system_of(name, by_path, baselines) for name, by_path in by_recipe.items()],
        conditions=_conditions(RunFolder.open(first).settings, runs),
        failed=failed,
    )
    write_json(run / TABLE, result.to_json())
    log.say(f"comparison: {run / TABLE}")
    return result


def _conditions(shared: Settings, runs: Mapping[Path, Settings]) -> str:
    training, seeds = shared.training, sorted({settings.training.seed for settings in runs.values()})
    limits = {name.removeprefix("max_"): getattr(training, name) for name in LIMITS}
    budget = " or ".join(f"{value:,.12g} {unit}" for unit, value in limits.items() if value is not None)
    numbers = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    return (
        f"the same for all: text, vocabulary, batches of {training.batch_tokens:,} tokens, search, scoring, {numbers}, "
        f"{budget}"
    )
