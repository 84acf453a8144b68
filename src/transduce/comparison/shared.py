"""What all recipes of a comparison share: the text, the vocabulary, and the settings that belong to them.

They are those of the first recipe. The vocabulary is learned, and unset settings are chosen, once: in the folder
`shared` of the comparison, a run folder that is not trained.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from transduce.comparison.recipes import SECTIONS, TRAINING
from transduce.config.settings import Settings
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.runs.folder import RunFolder
from transduce.tasks.base import Prepared
from transduce.tasks.registry import find_task
from transduce.tasks.resolve import check, resolve
from transduce.text.tokenizer import Tokenizers, load_tokenizers


class Shared:
    """The prepared folder of the first recipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = RunFolder.open(path, model=False)
        self.settings = self.folder.settings
        self.task = find_task(self.settings.task)

    @cached_property
    def tokenizers(self) -> Tokenizers:
        """The vocabulary."""
        return load_tokenizers(self.folder)

    @cached_property
    def prepared(self) -> Prepared[Any]:
        """The encoded text."""
        return self.task.open_prepared(self.folder)

    @cached_property
    def texts(self) -> Any:
        """The text, read again: complete settings of other recipes need to know its size."""
        return self.task.read(self.settings, Log(quiet=True))

    def apply(self, settings: Settings) -> Settings:
        """A recipe with the shared settings, checked."""
        own, shared = settings.model_dump(exclude_unset=True), self.settings.model_dump()
        sections = {name: shared[name] for name in SECTIONS}
        training = own.get("training", {}) | {key: shared["training"][key] for key in TRAINING}
        mixed = with_vocabulary_of(Settings.from_mapping({**own, **sections, "training": training}), self.path)
        check(mixed)
        return mixed

    def resolved(self, settings: Settings) -> Settings:
        """Complete settings of a recipe."""
        machine = this_machine(settings.training.device)
        return resolve(self.task, settings, self.texts, machine, Log(quiet=True), known=self.tokenizers)[0]


def with_vocabulary_of(settings: Settings, run: Path) -> Settings:
    """The same settings with the vocabulary of a run instead of one of its own."""
    values = settings.model_dump(exclude_unset=True)
    return Settings.from_mapping(
        {**values, "tokenizer": {"sampling": settings.tokenizer.sampling, "start": run.absolute()}}
    )
