"""The text and the vocabulary that all recipes of a comparison share."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from transduce.config import Settings
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.runs.folder import RunFolder, has_read_text
from transduce.tasks.finetune import find_start
from transduce.tasks.registry import AnyTask, find_task
from transduce.tasks.resolve import resolve
from transduce.text.tokenizer import Tokenizers, load_tokenizers

QUIET = Log(quiet=True)


class SharedText:
    """Those of the first recipe. The text is read when it is first needed, as the first training will read it."""

    def __init__(self, settings: Settings, first_run: Path, log: Log) -> None:
        self.asked, self.first_run, self.log = settings, first_run, log
        self.task: AnyTask = find_task(settings.task)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """Those of the first run once it has read its text; they are learned from the text before."""
        return self._known or self.resolved(self.asked)[1]

    @cached_property
    def n_labels(self) -> int | None:
        """Number of labels of a classifier."""
        run = self.first_run
        settings = RunFolder.open(run, model=False).settings if self._known else self.resolved(self.asked)[0]
        return len(settings.data.labels) if settings.data.labels else None

    @cached_property
    def texts(self) -> Any:
        """The text, read."""
        self.log.say("reading the text")
        return self.task.read(self.asked, QUIET)

    def resolved(self, settings: Settings) -> tuple[Settings, Tokenizers]:
        """Complete settings of a recipe for this text, and the vocabulary."""
        known, start = self._known, find_start(settings)
        if start is not None:
            settings, known = start.settings, load_tokenizers(start.run)
        machine = this_machine(settings.training.device)
        return resolve(self.task, settings, self.texts, machine, QUIET, known=known)

    @cached_property
    def _known(self) -> Tokenizers | None:
        run = self.first_run
        return load_tokenizers(RunFolder.open(run, model=False)) if has_read_text(run) else None
