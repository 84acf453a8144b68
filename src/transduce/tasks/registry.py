"""The TASKS table."""

from __future__ import annotations

from typing import Any

from transduce.errors import SettingsError, nearest
from transduce.evaluation.result_files import Wording
from transduce.tasks.base import Task, TaskInfo
from transduce.tasks.causal import CausalTask
from transduce.tasks.classification import ClassificationTask
from transduce.tasks.masked import MaskedTask
from transduce.tasks.translation import TranslationTask

AnyTask = Task[Any, Any]


class Encoding(TaskInfo):
    """Imported encoders without a head. No training makes them; other runs are fine-tuned from them."""

    name = "encoding"
    wording = Wording(
        title="An encoder of texts, without a head",
        does="can be fine-tuned",
        command="transduce train --from THIS_FOLDER ...",
        shape="text encoder · {model}",
    )


TASKS: dict[str, AnyTask] = {
    task.name: task for task in (TranslationTask(), CausalTask(), MaskedTask(), ClassificationTask())
}
TASK_INFOS: dict[str, TaskInfo] = {**TASKS, Encoding.name: Encoding()}
"""TASKS, and tasks that only imported models have."""


def find_task(name: str) -> AnyTask:
    """The task of this name. Raises `SettingsError` for an unknown one."""
    if name not in TASKS:
        raise SettingsError(f"task = '{name}'{nearest(name, TASKS)}; allowed: {', '.join(TASKS)}")
    return TASKS[name]
