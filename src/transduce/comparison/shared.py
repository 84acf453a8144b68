"""What all recipes of a comparison share: the text, the vocabulary, and the settings that belong to them.

They are those of the first recipe. The vocabulary is learned, and unset settings are chosen, once: in the folder
`shared` of the comparison, a run folder that is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import Any

from transduce.comparison.recipes import SECTIONS, SHARED, TRAINING
from transduce.config import Settings
from transduce.data.corpus import text_files
from transduce.errors import DataError, UserError
from transduce.logging import Log
from transduce.machine import this_machine
from transduce.pipeline import prepare
from transduce.runs.atomic import expecting, read_json, write_json
from transduce.runs.folder import RunFolder, has_read_text
from transduce.runs.manifest import fingerprint
from transduce.tasks.base import Prepared
from transduce.tasks.registry import find_task
from transduce.tasks.resolve import check, resolve
from transduce.text.tokenizer import Tokenizers, load_tokenizers

QUIET = Log(quiet=True)
DIGESTS = "text.json"  # of the files of the text


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
        return self.task.read(self.settings, QUIET)

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
        return resolve(self.task, settings, self.texts, machine, QUIET, known=self.tokenizers)[0]


@contextmanager
def shared_by(first: Settings, run: Path, log: Log) -> Iterator[Shared]:
    """Prepare the folder, or open it. A user's mistake inside removes a new one, so that the recipe can be changed."""
    path = run / SHARED
    is_new = not has_read_text(path)
    if is_new:
        log.say("reading the text")
    prepare(first, path, log=QUIET)
    try:
        yield Shared(path)
    except UserError:
        if is_new:
            rmtree(path)
        raise


def require_same_text(settings: Settings, run: Path) -> None:
    """Raise a `DataError` for a file that has changed since the first call; the runs look for missing ones."""
    path, files = run / SHARED / DIGESTS, text_files(settings.data)
    now = {f"{name}: {file.name}": fingerprint(file)["sha256"] for name, file in files.items() if file.is_file()}
    if not path.exists():
        write_json(path, now)
    with expecting(path):
        then = dict(read_json(path))
    for name, digest in now.items():
        if then.get(name, digest) != digest:
            raise DataError(
                f"{name} has changed since this comparison began; restore it, or name another folder with --run"
            )


def with_vocabulary_of(settings: Settings, run: Path) -> Settings:
    """The same settings with the vocabulary of a run instead of one of its own."""
    values = settings.model_dump(exclude_unset=True)
    return Settings.from_mapping(
        {**values, "tokenizer": {"sampling": settings.tokenizer.sampling, "start": run.absolute()}}
    )
