"""The TASKS table."""

from __future__ import annotations

from typing import Any

from transduce.errors import SettingsError, nearest
from transduce.evaluation.result_files import Wording
from transduce.tasks.base import Task
from transduce.tasks.causal import CausalTask
from transduce.tasks.classification import ClassificationTask
from transduce.tasks.masked import MaskedTask
from transduce.tasks.translation import TranslationTask

AnyTask = Task[Any, Any]

TASKS: dict[str, AnyTask] = {
    task.name: task for task in (TranslationTask(), CausalTask(), MaskedTask(), ClassificationTask())
}
WORDINGS: dict[str, Wording] = {name: task.wording for name, task in TASKS.items()} | {
    "encoding": Wording(
        title="An encoder of texts, without a head",
        does="can be fine-tuned",
        command="transduce train --from THIS_FOLDER ...",
        shape="text encoder · {model}",
    )
}
"""Descriptions of models by task; `encoding` is that of imported encoders, from which other runs are fine-tuned."""


def find_task(name: str) -> AnyTask:
    """The task of this name. Raises `SettingsError` for an unknown one."""
    if name not in TASKS:
        raise SettingsError(f"task = '{name}'{nearest(name, TASKS)}; allowed: {', '.join(TASKS)}")
    return TASKS[name]
