"""The text that a run was trained on, read once more as the training has read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transduce.config.settings import DataSettings, Settings
from transduce.data.corpus import text_files
from transduce.data.preparation import PairTexts
from transduce.errors import DataError
from transduce.logging import Log
from transduce.runs.folder import RunFolder
from transduce.tasks.registry import find_task
from transduce.text.tokenizer import load_tokenizers


def training_data(run: RunFolder, changes: Mapping[str, Any], root: Path | None) -> DataSettings:
    """The data settings of a run, with the changes, and files looked for in `root`."""
    values = run.settings.data.model_dump(exclude_unset=True) | dict(changes.get("data", {}))
    data = Settings.from_mapping({"data": values}).resolve_paths(Path()).data
    if root is not None:
        data = _moved(data, root)
    if not data.train and not data.demo:
        raise DataError(
            f"{run.path} has no training text (it was imported); name the text with "
            """--set 'data.train=[{src="a.en", tgt="a.de"}]', and data.valid and data.test likewise"""
        )
    return data


def _moved(data: DataSettings, root: Path) -> DataSettings:
    """The same files below `root`: each path relative to the folder that all of them share."""
    sets = {name: getattr(data, name) for name in ("train", "valid", "test")}
    paths = [
        path
        for corpora in sets.values()
        for one in corpora
        for path in (one.src, one.tgt, one.path)
        if path is not None
    ]
    if not paths:
        return data
    shared, target = os.path.commonpath([path.parent for path in paths]), Path(os.path.realpath(root))

    def move(path: Path | None) -> Path | None:
        return None if path is None else target / path.relative_to(shared)

    moved = {
        name: tuple(
            one.model_copy(update={"src": move(one.src), "tgt": move(one.tgt), "path": move(one.path)})
            for one in corpora
        )
        for name, corpora in sets.items()
    }
    return data.model_copy(update=moved)


def read_training_text(
    run: RunFolder, settings: Settings, log: Log, *, spool_in: Path | None = None, check: bool = True
) -> PairTexts:
    """The sentence pairs of `settings`, cleaned and without what was held out.

    Args:
        run: The run.
        settings: Its settings, with the data to read.
        log: For notes about the text.
        spool_in: The folder whose disk holds the temporary files.
        check: Whether the text must be that of the training.

    Raises:
        DataError: A file is missing, or the text is not that of the training.
    """
    task, data = find_task("translation"), settings.data
    for path in text_files(data).values():
        if not path.exists():
            raise DataError(f"there is no file {path}; name the folder of the training text with --data FOLDER")
    texts: PairTexts = task.read(settings, log, spool_in=spool_in)
    then = run.read_record("data.json").get("fingerprint") if check else None
    if then is not None and then != task.fingerprint(run.settings, load_tokenizers(run), texts.digests):
        raise DataError(
            f"the training text of {run.path} has changed since its training; restore the files, or name other text "
            "with --set data.train=[...]"
        )
    return texts
