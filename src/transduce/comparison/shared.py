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
    def texts(self) -> Any:
        """The text, read."""
        self.log.say("reading the text")
        return self.task.read(self.asked, QUIET)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The vocabulary; learned from the text if there is none yet."""
        return self._first[1]

    @property
    def n_labels(self) -> int | None:
        """Number of labels of a classifier."""
        labels = self._first[0].data.labels
        return len(labels) if labels else None

    def resolved(self, settings: Settings) -> Settings:
        """Complete settings of a recipe for this text."""
        return self._resolve(settings, self.tokenizers)[0]

    @cached_property
    def _first(self) -> tuple[Settings, Tokenizers]:
        """Complete settings of the first recipe, and the vocabulary."""
        if has_read_text(self.first_run):
            folder = RunFolder.open(self.first_run, model=False)
            return folder.settings, load_tokenizers(folder)
        settings, known = self.asked, None
        if (start := find_start(settings)) is not None:
            settings, known = start.settings, load_tokenizers(start.run)
        return self._resolve(settings, known)

    def _resolve(self, settings: Settings, known: Tokenizers | None) -> tuple[Settings, Tokenizers]:
        machine = this_machine(settings.training.device)
        return resolve(self.task, settings, self.texts, machine, QUIET, known=known)
