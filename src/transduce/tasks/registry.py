"""The TASKS table."""

from __future__ import annotations

from typing import Any

from transduce.config import ModelSettings, Settings
from transduce.config.model import kinds_for
from transduce.errors import SettingsError, nearest
from transduce.tasks.base import Task, TaskInfo
from transduce.tasks.causal import CausalTask
from transduce.tasks.classification import ClassificationTask
from transduce.tasks.encoding import Encoding
from transduce.tasks.masked import MaskedTask
from transduce.tasks.translation import TranslationTask

TASKS: dict[str, Task[Any, Any]] = {
    task.name: task for task in (TranslationTask(), CausalTask(), MaskedTask(), ClassificationTask())
}
TASK_INFOS: dict[str, TaskInfo] = {**TASKS, Encoding.name: Encoding()}
"""TASKS, and what imported models can be for that no training here is for."""


def find_task(name: str) -> Task[Any, Any]:
    """The task of this name. Raises `SettingsError` for an unknown one."""
    if name not in TASKS:
        raise SettingsError(f"task = '{name}'{nearest(name, TASKS)}; allowed: {', '.join(TASKS)}")
    return TASKS[name]


def check_task(task: Task[Any, Any], settings: Settings, model: ModelSettings) -> None:
    """Refuse settings that do not fit the task or have no effect in it; `model` has the preset's sizes."""
    if model.kind not in (kinds := kinds_for(task.name)):
        raise SettingsError(f"model.kind = '{model.kind}' does not fit task '{task.name}'; use {' or '.join(kinds)}")
    for name in sorted(frozenset[str]().union(*(other.uses for other in TASKS.values())) - task.uses):
        section, key = name.split(".")
        part = getattr(settings, section)
        if key in part.model_fields_set and getattr(part, key) != type(part).model_fields[key].default:
            raise SettingsError(f"{name} has no effect in task '{task.name}'; leave it out")
    task.check(settings, model)
