"""The TASKS table."""

from __future__ import annotations

from typing import Any

from transduce.errors import SettingsError, nearest
from transduce.tasks.base import Task
from transduce.tasks.causal import Causal
from transduce.tasks.classification import ClassificationTask
from transduce.tasks.masked import MaskedTask
from transduce.tasks.translation import Translation

TASKS: dict[str, Task[Any, Any]] = {
    task.name: task for task in (Translation(), Causal(), MaskedTask(), ClassificationTask())
}


def find_task(name: str) -> Task[Any, Any]:
    """The task of this name; a `SettingsError` names those that there are."""
    if name not in TASKS:
        raise SettingsError(f"task = '{name}'{nearest(name, TASKS)}; allowed: {', '.join(TASKS)}")
    return TASKS[name]
