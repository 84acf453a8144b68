"""`distill`: from a teacher's run folder to a student's, in one resumable call."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transduce.config.kinds import preset_values
from transduce.config.recipe import read_recipe, to_toml
from transduce.config.settings import DataSettings, Settings
from transduce.decoding.loading import check_reads_text, open_folder
from transduce.decoding.translator import Translator
from transduce.distillation.result import DistillationResult, compare_models
from transduce.distillation.text import RECORD, DistillationOptions, DistilledText
from transduce.distillation.training_text import text_settings
from transduce.errors import SettingsError, UserError
from transduce.logging import Log
from transduce.pipeline import is_finished, train
from transduce.runs.folder import RunFolder, has_read_text
from transduce.tasks.defaults import SIZE_KEYS
from transduce.tasks.finetune import find_start
from transduce.tasks.resolve import check

_DEFAULT = DistillationOptions()


def distill(
    teacher: str | Path,
    run: str | Path,
    options: DistillationOptions = _DEFAULT,
    *,
    changes: Mapping[str, Any] | None = None,
    data: Path | None = None,
    text: Path | None = None,
    baseline: Path | None = None,
    log: Log | None = None,
) -> DistillationResult:
    """Train a student on the translations of a teacher (sequence-level distillation, Kim and Rush 2016).

    Translates the teacher's training sources, trains the student on the result, with the teacher's tokenizer and
    settings and the original validation and test data, and compares both on the test sets. The same call resumes after
    a kill.

    Args:
        teacher: Run folder of a translator.
        run: Run folder of the student.
        options: How the training text is made.
        changes: Settings of the student that differ from the teacher's, by section. A `model.preset` replaces the
            teacher's sizes.
        data: Folder with the training text, if it has moved since the teacher's training.
        text: Folder of the text that is made (default: RUN.distilled). Students of one teacher can share it.
        baseline: Run folder of a model to compare with. If there is none, the student is also trained there, without
            distillation.
        log: For progress (default: to stderr).

    Raises:
        UserError: The teacher, its text or a setting cannot be used, or text or student were begun with others.
        Interrupted: SIGINT, SIGTERM or SIGHUP, when everything is saved.
    """
    log, run, given = log or Log(), Path(run), dict(changes or {})
    folder = open_folder(teacher, task=Translator.task)
    check_reads_text(folder, "distillation")
    made = DistilledText(_text_folder(text, run, baseline), folder, text_settings(folder, given, data), options)
    runs = {"teacher": Path(teacher), "student": run}
    student = _student_settings(folder, made.data(distilled=True), given)
    start = find_start(student)
    check(student if start is None else start.settings)
    to_train = [run]
    if baseline is not None:
        runs["baseline"] = baseline
        plain = _student_settings(folder, made.data(distilled=False), given)
        if _check_baseline(baseline, plain):
            to_train.append(baseline)
    made.is_complete()  # refuses a folder with other text
    with RunFolder.create(run, student, to_toml(student)) as new:  # refuses a folder with another student
        pass
    if not all(map(has_read_text, to_train)):
        _make_text(made, new, check_text="data" not in given, log=log)
    train(student, run, log=log)
    if baseline in to_train[1:]:
        log.say(f"training the same model without distillation: {baseline}")
        train(plain, baseline, log=log)
    found = compare_models(runs, student, log)
    with RunFolder.create(run, student, to_toml(student)) as finished:
        finished.write_record(RECORD, found.to_json())
    return found


def _text_folder(text: Path | None, run: Path, baseline: Path | None) -> Path:
    """The folder of the text. Raises if two of the three folders are the same, or if it is a run folder."""
    folder = Path(os.path.realpath(text or f"{os.path.realpath(run)}.distilled"))
    if baseline is not None and os.path.realpath(baseline) == os.path.realpath(run):
        raise SettingsError(f"baseline = {baseline}: this is the student's run folder; name another folder")
    runs = {os.path.realpath(path) for path in (run, baseline) if path is not None}
    if os.fspath(folder) in runs or (folder / "manifest.json").exists():
        raise SettingsError(f"text = {folder}: this is a run folder; name another folder for the translations")
    return folder


def _check_baseline(baseline: Path, settings: Settings) -> bool:
    """Whether the baseline is still to be trained. Raises for another run that is not finished, or no translator."""
    if is_finished(baseline):
        open_folder(baseline, task=Translator.task)
        return False
    if (baseline / "manifest.json").exists():
        RunFolder.create(baseline, settings, to_toml(settings)).close()
    return True


def _make_text(made: DistilledText, student: RunFolder, *, check_text: bool, log: Log) -> None:
    """Make the text. A user's mistake leaves no new run folder."""
    try:
        made.make(check_text=check_text, translate=not has_read_text(student.path), log=log)
    except UserError:
        if not student.resumed:
            shutil.rmtree(student.path, ignore_errors=True)
        raise


def _student_settings(teacher: RunFolder, data: DataSettings, changes: Mapping[str, Any]) -> Settings:
    """The teacher's recipe with other text, its tokenizer, and the changes."""
    recipe = teacher.path / "recipe.toml"
    known = read_recipe(recipe) if recipe.exists() else {}
    values: dict[str, Any] = {section: dict(known.get(section, {})) for section in ("tokenizer", "model", "training")}
    values["training"].pop("start", None)
    values["training"].pop("guided_alignment", None)  # not parallel to the teacher's translations
    values |= {"task": "translation", "data": data.model_dump(mode="json", exclude_none=True)}
    for section in ("decoding", "evaluation"):
        values[section] = getattr(teacher.settings, section).model_dump(mode="json")
    for section, content in changes.items():
        if not isinstance(content, Mapping):
            Settings.from_mapping({section: content})  # refuses a value in place of a section
    if set(changes.get("tokenizer", {})) <= {"sampling"}:
        sampling = {key: value for key, value in values["tokenizer"].items() if key == "sampling"}
        values["tokenizer"] = {**sampling, "start": os.path.realpath(teacher.path)}
    model = changes.get("model", {})
    if "preset" in model:
        other = preset_values(Settings.from_mapping({"model": {"preset": model["preset"]}}).model)
        replaced = SIZE_KEYS | set(other)
        values["model"] = {key: value for key, value in values["model"].items() if key not in replaced}
    for section, content in changes.items():
        if section == "data":
            continue  # already in `data`
        values[section] = values.get(section, {}) | content if isinstance(content, Mapping) else content
    return Settings.from_mapping(values)
